"""The schedule that the plugin plays in a launch, from the launch's grid."""

from typing import Final

from dynamiccl.collect.benchmark.command import Calls
from dynamiccl.collect.benchmark.grid import Grid
from dynamiccl.collect.grid import Setting
from dynamiccl.schedule import Schedule

#: Out-of-place and in-place: every benchmark that NCCL asks a tuner about runs both.
HALVES: Final = 2


def schedule_of(setting: Setting, grid: Grid, calls: Calls) -> Schedule:
    """The schedule that the plugin applies, call by call (pure)."""
    return Schedule(
        collective=setting.collective,
        num_ranks=setting.num_ranks,
        num_nodes=setting.num_nodes,
        warmup=warmup_of(setting, grid, calls),
        halves=HALVES,
        calls_per_half=calls.per_half,
        sizes=grid.benchmark_bytes,
        cycles=grid.configs,
    )


def warmup_of(setting: Setting, grid: Grid, calls: Calls) -> tuple[tuple[int, int], ...]:
    """The warm-up as (nBytes, calls) runs: every doubling from the first size to the last.

    nccl-tests v2.16.9 to v2.19.6 `src/common.cu`, TimeTest: whatever the factor of the walk is.
    """
    if calls.warmup == 0:
        return ()
    runs = []
    size = grid.chain.sizes[0]
    while size <= grid.chain.sizes[-1]:
        runs.append((setting.benchmark_bytes(size), calls.warmup))
        size *= 2
    return tuple(runs)
