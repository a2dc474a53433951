from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.collect.benchmark.blocks import REPORT_NAME
from dynamiccl.collect.benchmark.command import Calls
from dynamiccl.collect.benchmark.grid import Grid, deal
from dynamiccl.collect.benchmark.schedules import schedule_of, warmup_of
from dynamiccl.collect.grid import Setting, Trial, benchmark_bytes
from dynamiccl.collect.runner import Pick
from dynamiccl.nccl import Collective, Config
from dynamiccl.schedule import BlockState, PlayReport
from tests.collect.benchmark.sweeps import launch_of, sweep
from tests.fakes.nccl_tests.install import install_stand_in
from tests.fakes.running import StandIn

CALLS = Calls(iterations=3, warmup=2, checks=1)


def dealt(**keys: str) -> tuple[Setting, Grid]:
    trials = [trial for trial in sweep(**keys).trials if trial.infeasible is None]
    launch = launch_of(trials)
    return launch.setting, deal(launch, max_blocks=1000)


def test_schedule_is_the_grid() -> None:
    setting, grid = dealt()
    made = schedule_of(setting, grid, CALLS)
    assert made.collective is Collective.AllReduce
    assert (made.num_ranks, made.num_nodes, made.halves) == (8, 1, 2)
    assert made.calls_per_half == 1 + 3 + 1
    assert made.sizes == grid.benchmark_bytes
    assert made.cycles == grid.configs
    assert made.num_blocks == len(grid.blocks)


@pytest.mark.parametrize(
    ("sizes", "ladder"),
    [
        ('{ min = "1K", max = "8K" }', (1024, 2048, 4096, 8192)),
        # The ladder doubles whatever the walk does.
        ('{ min = "1K", max = "16K", factor = 4 }', (1024, 2048, 4096, 8192, 16384)),
        ("{ min = 1024, max = 9216, factor = 3 }", (1024, 2048, 4096, 8192)),
        ("{ list = [1024] }", (1024,)),
    ],
)
def test_warm_up_doubles_from_the_first_size_to_the_last(
    sizes: str, ladder: tuple[int, ...]
) -> None:
    setting, grid = dealt(sizes=sizes)
    assert warmup_of(setting, grid, CALLS) == tuple((size, 2) for size in ladder)


def test_without_warm_up_calls_there_is_no_warm_up() -> None:
    setting, grid = dealt()
    assert warmup_of(setting, grid, Calls(3, 0, 1)) == ()


def test_sizes_are_rounded_as_the_benchmark_does() -> None:
    setting, grid = dealt(
        collectives='["AllGather"]',
        algorithms='["Ring"]',
        groups="[{ num_nodes = 1, ranks_per_node = 3 }]",
        sizes="{ list = [1024, 2048] }",
    )
    made = schedule_of(setting, grid, CALLS)
    assert made.sizes == (1008, 2016)
    assert made.warmup == ((1008, 2), (2016, 2))


@given(
    collective=st.sampled_from([c for c in Collective if c.tunable]),
    first=st.integers(256, 1 << 20),
    factor=st.integers(2, 5),
    count=st.integers(1, 5),
)
@settings(deadline=None, max_examples=50)
def test_any_walk_makes_a_schedule_that_the_plugin_takes(
    collective: Collective, first: int, factor: int, count: int
) -> None:
    setting = Setting(collective, 1, 8)
    trials = [Trial(setting, first * factor**power, Config()) for power in range(count)]
    grid = deal(launch_of(trials, repeats=2), max_blocks=100)
    made = schedule_of(setting, grid, CALLS)
    assert all(calls == 2 for _, calls in made.warmup)
    assert made.warmup[0][0] == made.sizes[0]
    assert made.sizes == tuple(
        benchmark_bytes(collective, size, 8, "float") for size in grid.chain.sizes
    )
    assert made.num_calls == 2 * len(made.warmup) + 2 * 5 * len(grid.blocks)


@pytest.mark.parametrize(
    ("keys", "program"),
    [
        ({"sizes": '{ min = "64K", max = "1M", factor = 4 }'}, "all_reduce_perf"),
        (
            {
                "collectives": '["AllGather"]',
                "algorithms": '["Ring"]',
                "sizes": "{ list = [1000] }",
            },
            "all_gather_perf",
        ),
    ],
)
def test_benchmark_makes_just_these_calls(
    keys: dict[str, str], program: str, tmp_path: Path, sweep_path: Path
) -> None:
    """The plugin counts the calls of a real process, and plays every block."""
    setting, grid = dealt(**keys)
    made = schedule_of(setting, grid, CALLS)
    (tmp_path / "schedule").write_bytes(made.to_bytes())
    counts = ("-g", "8", "-n", "3", "-w", "2", "-c", "1", "-N", str(len(grid.cycles)))
    StandIn(install_stand_in(tmp_path / "bin")).output(
        program,
        *grid.chain.arguments,
        *counts,
        settings={
            "NCCL_TUNER_PLUGIN": str(sweep_path),
            "DYNAMICCL_MODE": "sweep",
            "DYNAMICCL_SCHEDULE": str(tmp_path / "schedule"),
            "DYNAMICCL_SCHEDULE_HASH": made.content_hash,
            "DYNAMICCL_SWEEP_REPORT": str(tmp_path / REPORT_NAME),
        },
    )
    report = PlayReport.from_bytes((tmp_path / REPORT_NAME).read_bytes())
    assert report.calls == made.num_calls
    assert report.stopped_at_call is None
    assert BlockState.NOT_REACHED not in report.states
    picks: tuple[Pick, ...] = grid.blocks
    for pick, state in zip(picks, report.states, strict=True):
        assert (state is BlockState.ABSTAINED) == (pick.trial.config == Config())
