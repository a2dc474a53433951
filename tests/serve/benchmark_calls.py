"""The calls of one nccl-tests process in order, and random schedules for them."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from numpy.random import Generator

from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config
from dynamiccl.schedule import Schedule
from tests.serve.tables import random_config


@dataclass(frozen=True, slots=True)
class BenchmarkCall:
    """One collective of the benchmark; `block` is None in the warm-up."""

    size_bytes: int
    block: int | None
    config: Config


def benchmark_calls(schedule: Schedule) -> Iterator[BenchmarkCall]:
    """Warm-up; then cycle by cycle, size by size, half by half: one call, n timed, c checks."""
    for size_bytes, calls in schedule.warmup:
        for _ in range(calls):
            yield BenchmarkCall(size_bytes, None, ABSTAIN)
    block = 0
    for cycle in schedule.cycles:
        for size_bytes, config in zip(schedule.sizes, cycle, strict=True):
            for _half in range(schedule.halves):
                for _call in range(schedule.calls_per_half):
                    yield BenchmarkCall(size_bytes, block, config)
            block += 1


def random_schedule(
    random: Generator, collective: Collective, *, num_nodes: int = 1, chunks: bool = False
) -> Schedule:
    """Eight ranks a node, five sizes, six cycles; chunk sizes only where asked for."""

    def config() -> Config:
        drawn = random_config(random, collective) or ABSTAIN
        if drawn.algorithm is Algorithm.NVLSTree and num_nodes == 1:
            return ABSTAIN
        return drawn if chunks else dataclasses.replace(drawn, chunk_bytes=None)

    return Schedule(
        collective=collective,
        num_ranks=8 * num_nodes,
        num_nodes=num_nodes,
        warmup=tuple((1 << power, 3) for power in range(10, 15)),
        halves=2,
        calls_per_half=7,
        sizes=tuple(1 << power for power in range(10, 15)),
        cycles=tuple(tuple(config() for _ in range(5)) for _ in range(6)),
    )


def stage(directory: Path, schedule: Schedule) -> dict[str, str | None]:
    """Write `schedule` into `directory`; return the environment of a launch that plays it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "schedule"
    path.write_bytes(schedule.to_bytes())
    return {
        "DYNAMICCL_MODE": "sweep",
        "DYNAMICCL_SCHEDULE": str(path),
        "DYNAMICCL_SCHEDULE_HASH": schedule.content_hash,
        "DYNAMICCL_SWEEP_REPORT": str(directory / "report"),
    }
