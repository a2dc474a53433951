import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.collect.benchmark.grid import Grid, deal
from dynamiccl.collect.benchmark.read_back import PlainChoice, choices_by_block
from dynamiccl.collect.runner import LaunchMode
from tests.collect.benchmark.sweeps import launch_of, sweep

RANKS = 8
CALLS = 4
PREFIX = "node1:4242:4250 [0] NCCL INFO "


def grid(**keys: str) -> Grid:
    trials = [trial for trial in sweep(**keys).trials if trial.infeasible is None]
    return deal(launch_of(trials, LaunchMode.READ_BACK), max_blocks=1000)


GRID = grid()
CHANNELS = 24


def named(size: int, algorithm: str = "RING", protocol: str = "LL", high: int = 23) -> str:
    return (
        f"{PREFIX}AllReduce: {size} Bytes -> Algo {algorithm} proto {protocol} "
        f"channel{{Lo..Hi}}={{0..{high}}}"
    )


def walk(made: Grid = GRID, *, calls: int = CALLS) -> list[str]:
    """One line for each call of every block: blocks differ in their channels."""
    return [
        named(made.benchmark_bytes[number % len(made.benchmark_bytes)], high=number)
        for number in range(len(made.blocks))
        for _ in range(calls)
    ]


def read(log: list[str], made: Grid = GRID, *, warmup: int = 0) -> list[PlainChoice | None]:
    return choices_by_block(log, made, num_ranks=RANKS, warmup_calls=warmup, calls_per_block=CALLS)


EVERY: list[PlainChoice | None] = [["Ring", "LL", n + 1] for n in range(len(GRID.blocks))]


def test_each_block_has_the_choice_of_its_calls() -> None:
    assert read(walk()) == EVERY


def test_warm_up_is_passed_over() -> None:
    ladder = [named(1 << power, "TREE") for power in (20, 21, 22)]
    assert read([*ladder, *walk()], warmup=3) == EVERY
    assert read([*ladder, *walk()], warmup=2) == []


def test_other_lines_of_the_log_do_not_count() -> None:
    other = [
        f"{PREFIX}NCCL_DEBUG_SUBSYS set by environment to INIT,ENV,TUNING",
        f"{PREFIX}Channel 00/24 : 0 1 2 3 4 5 6 7",
        "",
        f"{PREFIX}Broken: 12 Bytes -> Algo RING proto LL",
    ]
    log = [line for call in walk() for line in (*other, call)]
    assert read(log) == EVERY


@given(at=st.integers(0, len(walk()) - 1))
@settings(deadline=None, max_examples=40)
def test_log_that_ends_early_names_the_whole_blocks_before(at: int) -> None:
    assert read(walk()[:at]) == EVERY[: at // CALLS]


@given(at=st.integers(0, len(walk()) - 2))
@settings(deadline=None, max_examples=40)
def test_log_that_lacks_a_line_names_no_block_from_there_on(at: int) -> None:
    log = walk()
    found = read(log[:at] + log[at + 1 :])
    assert found == EVERY[: at // CALLS]


@given(at=st.integers(0, len(walk()) - 1))
@settings(deadline=None, max_examples=40)
def test_log_with_one_line_more_tells_nothing(at: int) -> None:
    log = walk()
    assert read([*log[:at], log[at], *log[at:]]) == []


def test_calls_of_one_size_that_were_counted_wrong_tell_nothing() -> None:
    made = grid(sizes="{ list = [1048576] }")
    assert read([named(1 << 20, "TREE")] * CALLS + walk(made), made) == []


def test_sizes_in_another_order_tell_nothing() -> None:
    log = walk()
    random.Random(0).shuffle(log)
    assert read(log) == []
    assert read([]) == []


def test_calls_of_a_block_that_differ_leave_it_unknown() -> None:
    log = walk()
    log[5] = named(GRID.benchmark_bytes[1], "TREE", "SIMPLE", 1)
    assert read(log) == [EVERY[0], None, *EVERY[2:]]


@pytest.mark.parametrize(
    "tail",
    [
        "Algo NEW proto LL channel{Lo..Hi}={0..3}",
        "Algo RING proto LL channel{Lo..Hi}={3..0}",
        "CE",
    ],
)
def test_kernel_that_has_no_name_leaves_its_block_unknown(tail: str) -> None:
    log = walk()
    log[:CALLS] = [f"{PREFIX}AllReduce: {GRID.benchmark_bytes[0]} Bytes -> {tail}"] * CALLS
    assert read(log) == [None, *EVERY[1:]]


@dataclass(frozen=True)
class Format:
    """How a release of NCCL logs a call, and what it does not say."""

    text: str
    channels: int | None


@pytest.mark.parametrize(
    "form",
    [
        Format("{size} Bytes -> Algo 1 proto 0 time 12.500000", None),
        Format("AllReduce: {size} Bytes -> Algo 1 proto 0 time 12.500000", None),
        Format("AllReduce: {size} Bytes -> Algo RING proto LL channel{{Lo..Hi}}={{2..5}}", 4),
    ],
)
def test_every_format_is_read(form: Format) -> None:
    log = [
        PREFIX + form.text.format(size=size)
        for _ in GRID.cycles
        for size in GRID.benchmark_bytes
        for _ in range(CALLS)
    ]
    assert read(log) == [["Ring", "LL", form.channels]] * len(GRID.blocks)


def test_bytes_of_one_rank_are_those_of_all() -> None:
    made = grid(collectives='["AllGather"]', algorithms='["Ring"]')
    log = [
        f"{PREFIX}AllGather: {size // RANKS} Bytes -> Algo RING proto LL channel{{Lo..Hi}}={{0..1}}"
        for _ in made.cycles
        for size in made.benchmark_bytes
        for _ in range(CALLS)
    ]
    assert read(log, made) == [["Ring", "LL", 2]] * len(made.blocks)
    whole = [line.replace(str(made.benchmark_bytes[0] // RANKS), "4") for line in log]
    assert read(whole, made) == []
