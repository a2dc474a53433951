"""Damaged traces: whatever is cut, shuffled or flipped, the import gives rows or our error."""

import gzip
import json
import re
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.collect.damage import survives
from tests.collect.traces.made import Chrome, inspector_line
from tests.collect.traces.test_inspector import dump_of_4_3

RELAXED = settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
KINDS = ("inspector", "inspector-4.3", "kineto", "kineto.gz")


def content(kind: str, folder: Path) -> bytes:
    """A sound trace of each kind."""
    path = folder / "sound"
    if kind.startswith("kineto"):
        chrome = Chrome()
        chrome.step(1, 0.0, 900.0)
        for number in range(3):
            chrome.compute(100.0 * number, 60.0)
            chrome.collective(100.0 * number + 50, 30.0)
        data = chrome.write(path).read_bytes()
        return gzip.compress(data, mtime=0) if kind.endswith("gz") else data
    lines = [inspector_line(0, n, 5.0) for n in range(3)]
    lines = dump_of_4_3(4, announced=4) if kind == "inspector-4.3" else lines
    return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


@RELAXED
@given(
    kind=st.sampled_from(KINDS),
    flips=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=20),
    kept=st.floats(0, 1),
)
def test_flipped_bytes_and_a_lost_end(
    kind: str, flips: list[tuple[float, int]], kept: float, tmp_path: Path
) -> None:
    data = bytearray(content(kind, tmp_path))
    for at, value in flips:
        data[min(int(at * len(data)), len(data) - 1)] = value
    survives(bytes(data[: int(kept * len(data))]), kind, tmp_path)


#: What stands where a trace has a number, a name, or a record.
ODD = st.sampled_from(["null", "-1", "1e400", '"x"', "[]", "{}", "true", "99999999999999999999"])


@RELAXED
@given(
    kind=st.sampled_from(KINDS[:3]),
    odd=ODD,
    place=st.integers(0, 400),
)
def test_any_value_may_be_of_another_type(kind: str, odd: str, place: int, tmp_path: Path) -> None:
    text = content(kind, tmp_path).decode()
    values = [at for at, char in enumerate(text) if char == ":" and text[at - 1] == '"']
    at = values[place % len(values)] + 1
    end = min(e for char in ",}]\n" if (e := text.find(char, at)) >= 0)
    survives((text[:at] + odd + text[end:]).encode(), kind, tmp_path)


def test_a_category_of_another_type_is_passed_over(tmp_path: Path) -> None:
    spoilt = re.sub(rb'"cat": "[a-z_]+"', b'"cat": []', content("kineto", tmp_path))
    assert b'"cat": []' in spoilt
    survives(spoilt, "kineto", tmp_path)
