"""What is read of a launch: logs, and outputs as crashes and other ranks damage them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.collect.launch import choices_of, comm_logs, last_words, read_rows, wrong_comms
from dynamiccl.collect.output import MEANT_AS_ROW
from dynamiccl.collect.schedule import Choice, LaunchMode, deal
from tests.collect.benchmark.stand_in import feasible, launch_of, sweep
from tests.fakes.nccl_tests.install import run_stand_in

SIZES = (1024, 2048, 4096)
CYCLES = 3
BLOCKS = CYCLES * len(SIZES)
Blocks = list[list[dict[str, Any]]]


class Recorded:
    """What one benchmark printed and wrote."""

    def __init__(self, folder: Path, sizes: Sequence[int], *more: str) -> None:
        self.folder, self.sizes, path = folder, sizes, folder / "rows.json"
        walk = ("-b", str(sizes[0]), "-e", str(sizes[-1]), "-f", "2", "-N", str(CYCLES))
        calls = ("-g", "8", "-n", "3", "-w", "1", "-c", "1", "-J", str(path))
        text = run_stand_in(folder, "all_reduce_perf", *walk, *calls, *more)
        self.lines, self.json = text.splitlines(), path.read_text()
        #: Numbers of the lines that are rows.
        self.rows = [n for n, line in enumerate(self.lines) if MEANT_AS_ROW.search(line)]

    def read(self, lines: Sequence[str] = (), json: str = "", sizes: Sequence[int] = ()) -> Blocks:
        """Its own lines where none are given, and no JSON."""
        path = self.folder / "read.json"
        path.unlink(missing_ok=True)
        if json:
            path.write_text(json)
        return read_rows(lines or self.lines, path, sizes=sizes or self.sizes)[0]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("recorded"), SIZES, "-I", "1")


@pytest.fixture(scope="module")
def one_size(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("one-size"), SIZES[:1])


def source(blocks: Blocks) -> set[str]:
    return {half["source"] for block in blocks for half in block}


def sizes_of(blocks: Blocks) -> list[int]:
    return [block[0]["size_bytes"] for block in blocks]


def figures(blocks: Blocks) -> list[list[tuple[Any, ...]]]:
    names = ("in_place", "size_bytes", "time_us")
    return [[tuple(half[name] for name in names) for half in block] for block in blocks]


def test_json_has_the_digits_and_text_the_release(recorded: Recorded) -> None:
    text, json = recorded.read(), recorded.read(json=recorded.json)
    assert (source(text), source(json)) == ({"nccl-tests-text"}, {"nccl-tests-json"})
    for one, other in zip(figures(text), figures(json), strict=True):
        for (*_, rough), (*_, fine) in zip(one, other, strict=True):
            assert fine == pytest.approx(rough, rel=0.01)
    facts = {"gpu": "FAKE H100", "nccl_version": "2.30.7", "nccl_tests_version": "2.19.6"}
    for path in (recorded.folder / "absent", recorded.folder / "read.json"):
        assert read_rows(recorded.lines, path, sizes=SIZES)[1] == facts
    assert len(json[0][0]["iteration_times_us"]) == 3


def test_the_one_with_more_rows_is_taken(recorded: Recorded) -> None:
    content = json.loads(recorded.json)
    del content["results"][-1]
    found = recorded.read(json=json.dumps(content))
    assert (source(found), len(found)) == ({"nccl-tests-text"}, BLOCKS)
    lines = list(recorded.lines)
    lines[recorded.rows[4]] = lines[recorded.rows[4]][:60]
    assert len(recorded.read(lines)) == 4
    found = recorded.read(lines, recorded.json)
    assert (source(found), len(found)) == ({"nccl-tests-json"}, BLOCKS)


def test_row_of_another_size_ends_what_is_believed(recorded: Recorded) -> None:
    lines = list(recorded.lines)
    del lines[recorded.rows[4]]
    assert sizes_of(recorded.read(lines)) == [*SIZES, SIZES[0]]
    doubled = list(recorded.lines)
    doubled.insert(recorded.rows[1], doubled[recorded.rows[1]])
    assert sizes_of(recorded.read(doubled)) == list(SIZES[:2])
    assert recorded.read(sizes=(4096, 2048)) == []


def test_row_without_a_time_keeps_its_place(one_size: Recorded) -> None:
    """With one size nothing but its place tells whose a row is."""
    lines = list(one_size.lines)
    words = lines[one_size.rows[1]].split()
    lines[one_size.rows[1]] = " ".join([*words[:5], *("0.00", "0.00", "0.00", "0") * 2])
    whole = one_size.read()
    assert len(whole) == CYCLES
    assert one_size.read(lines) == whole[:1]
    # JSON that lacks a time has no other place to keep.
    content = json.loads(one_size.json)
    content["results"][1]["out_of_place"]["time"] = 0
    halves = one_size.read(json=json.dumps(content))
    assert [len(block) for block in halves] == [2, 1, 2]
    content["results"][1]["in_place"]["time"] = 0
    assert one_size.read(lines, json.dumps(content)) == whole[:1]


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
def test_words_of_another_rank_move_no_time(
    data: st.DataObject, words: str, which: str, request: pytest.FixtureRequest
) -> None:
    made: Recorded = request.getfixturevalue(which)
    text = "\n".join(made.lines)
    first = text.index(made.lines[made.rows[0]])
    at = data.draw(st.integers(first, len(text)))
    damaged = (text[:at] + words + text[at:]).split("\n")
    whole, found = figures(made.read()), figures(made.read(damaged))
    assert found == whole[: len(found)]


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
    slurm = ["srun: error: n2: tasks 2-3: Exited with exit code 3", "srun: error: n1: Terminated"]
    assert last_words(["NVML: mismatch", *slurm]) == f"NVML: mismatch | {slurm[0]}"
    assert last_words(slurm) == " | ".join(slurm)
    assert last_words(["one", "", "two", "three", "four"]) == "two | three | four"
    assert last_words(["", "#  size"]) == "no output"
    assert len(last_words(["error " + "x" * 5000])) == 600


def ranks(groups: Callable[[int], int], hosts: str = "aaaabbbb") -> list[str]:
    """The ranks of a job as nccl-tests lists them, each with the colour of its communicator."""
    return [
        f"#  Rank {rank:2d} Group {groups(rank):2d} Pid 7 on n{host} device {rank % 4} [0:1:2] H100"
        for rank, host in enumerate(hosts)
    ]


def test_other_communicators_than_were_asked_for_are_told() -> None:
    for split, lines, said in (
        ("MOD 4", ranks(lambda rank: rank % 4), None),
        ("", ranks(lambda _: 0), None),
        ("MOD 4", ranks(lambda rank: rank % 2), "4 ranks on 2 hosts"),
        ("MOD 4", ranks(lambda rank: rank // 2), "2 ranks on 1 hosts"),
        # Without MPI each process is alone; and ranks that are dealt round the nodes.
        ("MOD 4", ranks(lambda _: 0), "(8 ranks on 2 hosts); build it with MPI"),
        ("MOD 4", ranks(lambda rank: rank % 4, "abababab"), "node by node"),
        ("", ranks(lambda rank: rank % 4), "remove NCCL_TESTS_SPLIT from the environment"),
    ):
        more = f', split = "{split}"' if split else ""
        made = sweep(groups=f"[{{ num_nodes = 2, ranks_per_node = 4{more} }}]")
        wrong = wrong_comms(made.trials[0].setting, lines)
        assert wrong is None if said is None else said in str(wrong)


#: Of a block: two halves of a synchronising and a timed call.
CALLS = 4
PREFIX = "node1:4242:4250 [0] NCCL INFO "


MADE = sweep()
LAUNCH = launch_of(feasible(MADE), LaunchMode.READ_BACK)
GRID = deal(LAUNCH)


def named(size: int, algorithm: str = "RING", protocol: str = "LL", high: int = 23) -> str:
    return (
        f"{PREFIX}AllReduce: {size} Bytes -> Algo {algorithm} proto {protocol} "
        f"channel{{Lo..Hi}}={{0..{high}}}"
    )


def walk() -> list[str]:
    """One line for each call of every block: blocks differ in their channels."""
    return [
        named(GRID.benchmark_bytes[number % len(GRID.benchmark_bytes)], high=number)
        for number in range(len(GRID.blocks))
        for _ in range(CALLS)
    ]


WARMUP = [named(1 << power, "TREE") for power in (20, 21, 22)]


def ran(*logs: list[str], warmup: Sequence[str] = WARMUP) -> list[Choice | None]:
    return choices_of([[*warmup, *log] for log in logs], MADE.file, LAUNCH, GRID)


EVERY: list[Choice | None] = [["Ring", "LL", n + 1] for n in range(len(GRID.blocks))]


def test_each_block_has_the_choice_of_its_calls() -> None:
    assert ran(walk()) == EVERY
    assert ran(walk(), warmup=[*WARMUP, WARMUP[0]]) == []
    other = [
        f"{PREFIX}NCCL_DEBUG_SUBSYS set by environment to INIT,ENV,TUNING",
        f"{PREFIX}Channel 00/24 : 0 1 2 3 4 5 6 7",
        "",
        f"{PREFIX}Broken: 12 Bytes -> Algo RING proto LL",
    ]
    assert ran([line for call in walk() for line in (*other, call)]) == EVERY


@given(at=st.integers(0, len(walk()) - 2))
@settings(deadline=None, max_examples=40)
def test_log_that_ends_early_names_the_blocks_before(at: int) -> None:
    log = walk()
    assert ran(log[:at]) == EVERY[: at // CALLS]
    assert ran(log[:at] + log[at + 1 :]) == EVERY[: at // CALLS]
    assert ran([*log[:at], log[at], *log[at:]]) == []


def test_calls_that_differ_leave_their_block_unknown() -> None:
    log, size = walk(), GRID.benchmark_bytes[0]
    log[5] = named(GRID.benchmark_bytes[1], "TREE", "SIMPLE", 1)
    assert ran(log) == [EVERY[0], None, *EVERY[2:]]
    unnamed = f"{PREFIX}AllReduce: {size} Bytes -> CE"
    for call in (named(size, "NEW"), named(size).replace("{0..", "{24.."), unnamed):
        assert ran([call] * CALLS + walk()[CALLS:]) == [None, *EVERY[1:]]


def test_what_all_communicators_ran_is_taken(tmp_path: Path) -> None:
    for name in ("n1.7", "n2.8"):
        (tmp_path / f"nccl.{name}.log").write_text("\n".join([*WARMUP, *walk()]))
    (tmp_path / "nccl.n1.9.log").write_text("of a rank that logs no calls")
    assert len(comm_logs(tmp_path)) == 2
    assert ran(*comm_logs(tmp_path), warmup=()) == EVERY
    other = [*WARMUP, *walk()[:-CALLS], *(line.replace("RING", "TREE") for line in walk()[-CALLS:])]
    (tmp_path / "nccl.n2.8.log").write_text("\n".join(other))
    assert ran(*comm_logs(tmp_path), warmup=()) == [*EVERY[:-1], None]
