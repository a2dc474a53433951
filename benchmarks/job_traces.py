"""Simulated jobs: a profiler's trace, and the true saving.

A job is played under NCCL's own choice, which gives the trace, and again with the same seed under a
table: surroundings, noise and compute are the same, so the difference is the table's.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.schema import CALLS
from dynamiccl.simulator.world import CallResults, World

_BEGIN: Final = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Played:
    """A job's calls and what they came to, us of true times."""

    calls: pl.DataFrame
    steps: pl.DataFrame
    communication_us: float
    job_us: float


def play(world: World, actions: npt.NDArray[np.int64], seed: int, num_calls: int) -> Played:
    """Play one job under `actions` (keys,), 0 being NCCL's own choice; times of all ranks known."""
    jobs = world.jobs(1, seed)
    rows: list[dict[str, Any]] = []
    steps: dict[int, dict[str, float]] = {}
    clock = communication = truly = 0.0
    step = 0
    for _ in range(num_calls):
        place, key = int(jobs.place[0]), int(jobs.key[0])
        ran = jobs.step(actions[jobs.key])
        exposed = exposed_us(world, place, ran)
        call = world.keys[key]
        noise = float(ran.measured_us[0] / ran.true_us[0])
        time_us = float(ran.measured_us[0])
        rows.append(
            {
                "run": f"job-{seed}", "sequence": len(rows), "step": step,
                "timestamp": _BEGIN + timedelta(microseconds=clock),
                "group": f"{call.group.num_nodes}x{call.group.ranks_per_node}",
                "collective": call.collective.wire, "size_bytes": call.size_bytes,
                "num_nodes": call.group.num_nodes, "num_ranks": call.group.num_ranks,
                "time_us": time_us, "exposed_us": min(exposed * noise, time_us),
            }
        )  # fmt: skip
        lasted = float(ran.lasted_us[0]) + exposed * (noise - 1.0)
        sums = steps.setdefault(step, dict.fromkeys(("step", "communication", "exposed"), 0.0))
        sums["step"] += lasted
        sums["communication"] += time_us
        sums["exposed"] += rows[-1]["exposed_us"]
        communication += float(ran.true_us[0])
        clock += lasted
        truly += float(ran.lasted_us[0])
        step += place == len(world.order) - 1
    steps_frame = pl.DataFrame(
        [
            {
                "run": f"job-{seed}", "source_file": "job", "step": number,
                "step_us": sums["step"], "communication_us": sums["communication"],
                "exposed_us": sums["exposed"], "idle_us": 0.0,
                "compute_us": sums["step"] - sums["exposed"],
            }
            for number, sums in steps.items()
        ]
    )  # fmt: skip
    return Played(pl.DataFrame(rows), steps_frame, communication, truly)


def exposed_us(world: World, place: int, ran: CallResults) -> float:
    """What of a call runs beside no compute: all, or from the end of the compute beside it on."""
    beside, call = float(world.beside_us[place]), float(ran.true_us[0])
    if beside == 0.0:
        return call
    waiting = min(world.contention.held_us, beside / 4.0)
    speed = float(world.compute_speed[int(ran.key[0]), int(ran.action[0])])
    compute_ends = beside / speed
    whole = float(ran.lasted_us[0]) - float(world.before_us[place])
    return min(call, max(0.0, whole - compute_ends)) if compute_ends < waiting + call else 0.0


def as_calls(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of some columns as the `calls` table has them, seen on all ranks; the rest is null."""
    full = rows.with_columns(
        pl.lit("simulated").alias("system"),
        pl.lit("job").alias("sweep"),
        pl.lit("simulator").alias("source"),
        ranks_seen=pl.col("num_ranks"),
        ranks_timed=pl.col("num_ranks"),
    )
    return pl.concat([pl.DataFrame(CALLS.empty_table()), full], how="diagonal_relaxed")
