"""Damaged outputs: whatever is cut, shuffled or flipped, the import gives rows or our error."""

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.collect.damage import survives
from tests.collect.parsed import parse
from tests.published import folder

LOGS = folder("logs")
DATA = Path(__file__).parents[1] / "data"
NAMES = sorted(path.name for path in LOGS.glob("*.log"))
#: The largest log has 70 KB; the damage is looked for in the first part of it.
LIMIT = 12_000
RELAXED = settings(
    deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def content(name: str) -> bytes:
    text = (LOGS / name).read_bytes()
    start = max(0, len(text) - LIMIT)
    return text[start:]


@RELAXED
@given(name=st.sampled_from(NAMES), at=st.floats(0, 1))
def test_truncated_anywhere(name: str, at: float, tmp_path: Path) -> None:
    data = content(name)
    survives(data[: int(at * len(data))], name, tmp_path)


@RELAXED
@given(name=st.sampled_from(NAMES), random=st.randoms(use_true_random=False))
def test_lines_in_any_order(name: str, random: st.randoms, tmp_path: Path) -> None:  # type: ignore[valid-type]
    lines = content(name).splitlines(keepends=True)
    random.shuffle(lines)  # type: ignore[attr-defined]
    survives(b"".join(lines), name, tmp_path)


@RELAXED
@given(
    name=st.sampled_from(NAMES),
    flips=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=40),
)
def test_flipped_bytes(name: str, flips: list[tuple[float, int]], tmp_path: Path) -> None:
    data = bytearray(content(name))
    for at, value in flips:
        data[min(int(at * len(data)), len(data) - 1)] = value
    survives(bytes(data), name, tmp_path)


@RELAXED
@given(data=st.binary(max_size=400))
def test_any_bytes(data: bytes, tmp_path: Path) -> None:
    survives(data, "noise.log", tmp_path)


@RELAXED
@given(at=st.floats(0, 0.999), flips=st.lists(st.tuples(st.floats(0, 1), st.integers(32, 126))))
def test_damaged_json(at: float, flips: list[tuple[float, int]], tmp_path: Path) -> None:
    data = bytearray((DATA / "nccl_tests_v3.json").read_bytes())
    for place, value in flips[:20]:
        data[min(int(place * len(data)), len(data) - 1)] = value
    survives(b"{" + bytes(data[1 : max(2, int(at * len(data)))]), "x.json", tmp_path)


_WORDS = """0 8 1024 -1 float sum none N/A 1.5 99999999999999999999 1e+400 nan inf 1e-07
# size time algbw busbw Bytes -> _ 1_0 ٣"""
_TOKENS = st.sampled_from(_WORDS.split())


@RELAXED
@given(lines=st.lists(st.lists(_TOKENS, min_size=1, max_size=22), max_size=12))
def test_any_words_of_the_format(lines: list[list[str]]) -> None:
    output = parse("\n".join(map(" ".join, lines)))
    assert all(row["size_bytes"] > 0 and row["time_us"] > 0 for row in output.rows)


@RELAXED
@given(
    size=st.integers(1, 1 << 40),
    time=st.floats(1.0, 1e6),
    wrong=st.one_of(st.none(), st.integers(0, 99_999)),
)
def test_what_was_printed_is_read(size: int, time: float, wrong: int | None) -> None:
    algbw = size / time / 1e3
    check = "N/A" if wrong is None else str(wrong)
    half = f"{time:.2f} {algbw:.2f} {algbw * 1.75:.2f} {check}"
    text = f"# Collective test starting: all_reduce_perf\n{size} {size} int8 sum -1 {half} {half}"
    first, second = parse(text).rows
    assert first["size_bytes"] == second["size_bytes"] == size
    assert first["time_us"] == float(f"{time:.2f}")
    assert first.get("wrong_values") == wrong
    assert first["status"] == ("wrong_values" if wrong else "ok")
