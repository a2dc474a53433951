"""Outputs of the stand-in, damaged as crashes and other ranks damage them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynamiccl.collect.benchmark.output import Output, is_row, last_words, read_output
from dynamiccl.nccl import Collective
from tests.fakes.nccl_tests.install import install_stand_in
from tests.fakes.running import StandIn

SIZES = (1024, 2048, 4096)
CYCLES = 3
BLOCKS = CYCLES * len(SIZES)


@dataclass(frozen=True)
class Recorded:
    """What one benchmark printed and wrote."""

    lines: tuple[str, ...]
    json: str
    folder: Path

    @property
    def rows(self) -> list[int]:
        """Numbers of the lines that are rows."""
        return [number for number, line in enumerate(self.lines) if is_row(line)]

    def read(
        self,
        lines: Sequence[str] | None = None,
        json: str | None = None,
        *,
        sizes: Sequence[int] = SIZES,
        num_blocks: int = BLOCKS,
    ) -> Output:
        path = self.folder / "read.json"
        path.unlink(missing_ok=True)
        if json is not None:
            path.write_text(json)
        return read_output(
            self.lines if lines is None else lines,
            path,
            collective=Collective.AllReduce,
            sizes=sizes,
            num_blocks=num_blocks,
        )


def record(folder: Path, *more: str, sizes: Sequence[int] = SIZES, **settings: str) -> Recorded:
    stand_in = StandIn(install_stand_in(folder / "bin"))
    path = folder / "rows.json"
    walk = ["-b", str(sizes[0]), "-e", str(sizes[-1]), "-f", "2"]
    # Wrong values end in an exit code of their own.
    done = stand_in.run(
        "all_reduce_perf",
        *(*walk, "-g", "8", "-n", "3", "-w", "1", "-c", "1", "-N", str(CYCLES), "-J", str(path)),
        *more,
        settings=settings,
    )
    return Recorded(tuple(done.stdout.splitlines()), path.read_text(), folder)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(tmp_path_factory.mktemp("recorded"), "-I", "1")


@pytest.fixture(scope="module")
def one_size(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(tmp_path_factory.mktemp("one-size"), sizes=(1024,))


def source(output: Output) -> set[str]:
    return {half["source"] for block in output.blocks for half in block}


def sizes_of(output: Output) -> list[int]:
    return [block[0]["size_bytes"] for block in output.blocks]


def figures(output: Output) -> list[list[tuple[Any, ...]]]:
    return [
        [(half["in_place"], half["size_bytes"], half["time_us"]) for half in block]
        for block in output.blocks
    ]


def test_blocks_come_in_the_order_of_the_walk_with_both_halves(recorded: Recorded) -> None:
    for written in (None, recorded.json):
        found = recorded.read(json=written)
        assert sizes_of(found) == list(SIZES) * CYCLES
        assert {tuple(half["in_place"] for half in block) for block in found.blocks} == {
            (False, True)
        }


def test_json_has_the_digits_and_text_the_release(recorded: Recorded) -> None:
    text, json = recorded.read(), recorded.read(json=recorded.json)
    assert (source(text), source(json)) == ({"nccl-tests-text"}, {"nccl-tests-json"})
    for one, other in zip(figures(text), figures(json), strict=True):
        for (*_, rough), (*_, fine) in zip(one, other, strict=True):
            assert fine == pytest.approx(rough, rel=0.01)
    facts = {"gpu": "FAKE H100", "nccl_version": "2.29.7", "nccl_tests_version": "2.19.6"}
    assert json.environment == text.environment == facts
    assert len(json.blocks[0][0]["iteration_times_us"]) == 3


def test_halves_hold_nothing_that_the_harness_knows_better(recorded: Recorded) -> None:
    for written in (None, recorded.json):
        for block in recorded.read(json=written).blocks:
            for half in block:
                assert not half.keys() & {"system", "run", "repeat", "launch_profile", "trial"}
                assert half["wrong_values"] == 0


def test_nothing_printed_is_no_block(recorded: Recorded) -> None:
    assert recorded.read([]) == Output((), {})
    assert recorded.read(["mpirun: command not found"]) == Output((), {})


def test_blocks_beyond_those_that_there_should_be_are_left_out(recorded: Recorded) -> None:
    assert len(recorded.read(num_blocks=4).blocks) == 4
    assert recorded.read(json=recorded.json, num_blocks=0).blocks == ()


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_json_that_is_cut_off_anywhere_gives_way_to_the_text(
    data: st.DataObject, recorded: Recorded
) -> None:
    whole = recorded.json.rstrip()
    cut = data.draw(st.integers(0, len(whole) - 1))
    found = recorded.read(json=whole[:cut])
    assert found == recorded.read()


@pytest.mark.parametrize(
    "json", ["", "null", "[]", "{}", '{"results": []}', '{"version": 99, "results": []}', "\0"]
)
def test_json_that_is_something_else_gives_way_to_the_text(json: str, recorded: Recorded) -> None:
    assert recorded.read(json=json) == recorded.read()


@given(kept=st.integers(0, 40), tail=st.integers(0, 120))
@settings(deadline=None, max_examples=60)
def test_text_that_is_cut_off_anywhere_keeps_its_whole_rows(
    kept: int, tail: int, recorded: Recorded
) -> None:
    lines = list(recorded.lines[:kept])
    torn = recorded.lines[kept][:tail] if kept < len(recorded.lines) else ""
    found = recorded.read([*lines, torn])
    whole = recorded.read()
    assert found.blocks == whole.blocks[: len(found.blocks)]
    assert sum(map(is_row, lines)) <= len(found.blocks) <= sum(map(is_row, [*lines, torn]))


def test_json_with_fewer_rows_than_the_text_is_not_taken(recorded: Recorded) -> None:
    content = json.loads(recorded.json)
    del content["results"][-1]
    found = recorded.read(json=json.dumps(content))
    assert source(found) == {"nccl-tests-text"}
    assert len(found.blocks) == BLOCKS


def test_json_makes_up_for_rows_that_the_text_lost(recorded: Recorded) -> None:
    lines = list(recorded.lines)
    lines[recorded.rows[4]] = lines[recorded.rows[4]][:60]
    assert len(recorded.read(lines).blocks) == 4
    found = recorded.read(lines, recorded.json)
    assert source(found) == {"nccl-tests-json"}
    assert len(found.blocks) == BLOCKS


def test_row_of_a_size_that_is_not_the_next_ends_what_is_believed(recorded: Recorded) -> None:
    lines = list(recorded.lines)
    del lines[recorded.rows[4]]
    assert sizes_of(recorded.read(lines)) == [*SIZES, SIZES[0]]
    doubled = list(recorded.lines)
    doubled.insert(recorded.rows[1], doubled[recorded.rows[1]])
    assert sizes_of(recorded.read(doubled)) == list(SIZES[:2])
    assert recorded.read(sizes=(4096, 2048)).blocks == ()


@pytest.mark.parametrize("row", range(CYCLES))
def test_row_that_is_torn_where_its_count_ends_keeps_its_place(
    row: int, one_size: Recorded
) -> None:
    lines = list(one_size.lines)
    head, datatype, tail = lines[one_size.rows[row]].partition("float")
    lines[one_size.rows[row]] = f"{head.rstrip()}node7: abort"
    lines.insert(one_size.rows[row] + 1, datatype + tail)
    assert len(one_size.read(lines, sizes=(1024,)).blocks) == row


def test_row_without_a_time_keeps_its_place(one_size: Recorded) -> None:
    """With one size nothing but its place tells whose a row is."""
    lines = list(one_size.lines)
    words = lines[one_size.rows[1]].split()
    lines[one_size.rows[1]] = " ".join(
        [*words[:5], "0.00", "0.00", "0.00", "0", "0.00", "0.00", "0.00", "0"]
    )
    whole = one_size.read(sizes=(1024,), num_blocks=CYCLES)
    assert len(whole.blocks) == CYCLES
    found = one_size.read(lines, sizes=(1024,), num_blocks=CYCLES)
    assert found.blocks == whole.blocks[:1]


#: What another rank says, with and without the end of a line.
WORDS = st.sampled_from(
    [
        "node7: NCCL WARN Call to ibv_reg_mr failed",
        "[1759999999.1] [node7:4242:0] ucp_context.c:1 UCX  WARN x\n",
        "\nnode7:4242:4250 [3] NCCL INFO comm 0x55d0 rank 3 nranks 8 - Init COMPLETE\n",
        "  \n",
        "abort",
        "[1,3]<stderr>:",
        "Warning: Permanently added",
        "x\n",
    ]
)


@given(data=st.data(), words=WORDS)
@settings(deadline=None, max_examples=120)
@pytest.mark.parametrize("which", ["recorded", "one_size"])
def test_words_of_another_rank_never_give_a_time_to_another_block(
    data: st.DataObject, words: str, which: str, request: pytest.FixtureRequest
) -> None:
    made: Recorded = request.getfixturevalue(which)
    sizes = SIZES if which == "recorded" else (1024,)
    text = "\n".join(made.lines)
    first = text.index(made.lines[made.rows[0]])
    at = data.draw(st.integers(first, len(text)))
    damaged = (text[:at] + words + text[at:]).split("\n")
    whole = figures(made.read(sizes=sizes))
    found = figures(made.read(damaged, sizes=sizes))
    assert found == whole[: len(found)]


@example(junk=["1024 256 float sum -1"])
@example(junk=["1024 256 float sum -1 x y z"])
@given(junk=st.lists(st.text(st.characters(codec="utf-8"), max_size=60), max_size=8))
@settings(deadline=None, max_examples=60)
def test_garbage_is_never_an_error(junk: list[str], recorded: Recorded) -> None:
    found = recorded.read([*recorded.lines, *junk])
    assert found.blocks[:BLOCKS] == recorded.read().blocks
    recorded.read(junk, json="".join(junk))


def test_wrong_values_are_told_half_by_half(tmp_path: Path) -> None:
    made = record(tmp_path, FAKE_WRONG="ABSTAIN")
    for written in (None, made.json):
        found = made.read(json=written)
        wrong = [half for block in found.blocks for half in block if half["wrong_values"]]
        assert wrong
        assert {half["status"] for half in wrong} == {"wrong_values"}


@pytest.mark.parametrize("release", ["2.13.12", "2.16.9", "2.17.3", "2.18.2"])
def test_older_releases_are_read(release: str, tmp_path: Path) -> None:
    stand_in = StandIn(install_stand_in(tmp_path))
    text = stand_in.output(
        "all_reduce_perf",
        *("-b", "1024", "-e", "4096", "-f", "2", "-g", "8", "-N", "2"),
        settings={"FAKE_NCCL_TESTS_VERSION": release},
    )
    found = read_output(
        text.splitlines(),
        tmp_path / "none",
        collective=Collective.AllReduce,
        sizes=SIZES,
        num_blocks=6,
    )
    assert sizes_of(found) == list(SIZES) * 2
    assert sum(map(is_row, text.splitlines())) == 6


@pytest.mark.parametrize(
    "line",
    [
        "#  size  count  type  redop  root  time",
        "# Out of bounds values : 0 OK",
        "",
        "1024 256",
        "    1024 256 float sum -1",
        "node7: 1024 256 float sum -1 10.0",
    ],
)
def test_what_is_no_row_is_no_progress(line: str) -> None:
    assert not is_row(line)


def test_last_words_are_those_of_the_failure() -> None:
    lines = [
        "# nThread 1 nGpus 8",
        "node1: Test NCCL failure common.cu:222 'unhandled system error'",
        "  1024  256  float  sum  -1  10.0  0.10  0.10  0",
        "srun: error: node1: task 0: Exited with exit code 3",
        "srun: done",
    ]
    assert last_words(lines) == (
        "node1: Test NCCL failure common.cu:222 'unhandled system error' | "
        "srun: error: node1: task 0: Exited with exit code 3"
    )
    # Real Slurm: the lines about the others hid what the benchmark said.
    slurm = [
        "NVML: Driver/library version mismatch",
        "srun: error: n2: tasks 2-3: Exited with exit code 3",
        "slurmstepd-n1: error: *** STEP 1.2 ON n1 CANCELLED AT 2026-11-23T18:28:43 ***",
        "srun: error: n1: tasks 0-1: Terminated",
    ]
    assert last_words(slurm) == " | ".join(slurm[:2])
    assert last_words(slurm[1:]) == " | ".join(slurm[1:])
    assert last_words(["one", "", "two", "three", "four"]) == "two | three | four"
    assert last_words([]) == last_words(["", "  "]) == "no output"
    assert last_words(["# nThread 1", "#  size  count"]) == "no output"
    assert last_words(["# nThread 1", "Segmentation fault"]) == "Segmentation fault"
    assert len(last_words(["error " + "x" * 5000])) == 600
