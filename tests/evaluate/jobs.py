"""Jobs and sweeps small enough to compute by hand, for tests of `evaluate job`."""

from collections.abc import Sequence
from typing import Any, Final

import polars as pl

from dynamiccl.datasets.schema import STEPS
from dynamiccl.evaluate.job import Answer, answer
from dynamiccl.evaluate.job_calls import Job, Measured, job_of
from tests.calls import calls_frame, traced
from tests.rows import MIB, default, forced, frame

RUNS: Final = 4


def sweep(
    best_us: float = 80.0, sizes: Sequence[int] = (MIB,), noise: float = 0.0, **columns: Any
) -> pl.DataFrame:
    """NCCL's own choice takes 100 us, Ring/LL `best_us`, Tree/LL 130, in RUNS runs each.

    With `noise` run 0 has all of it in Ring/LL, and run 1 as much less.
    """
    rows = []
    for size in sizes:
        for run in range(RUNS):
            place = {"run": f"cycle-{run}", "size_bytes": size, **columns}
            off = 1.0 + noise * {0: 1.0, 1: -1.0}.get(run, 0.0)
            rows += [
                default(100.0, **place),
                forced("Ring", "LL", best_us * off, **place),
                forced("Tree", "LL", 130.0, **place),
            ]
    return frame(*rows)


def steps_frame(count: int, step_us: float, **columns: Any) -> pl.DataFrame:
    """Steps of one rank; what is not named is idle."""
    plain = dict.fromkeys(("compute_us", "communication_us", "exposed_us", "idle_us"), 0.0)
    told = {"system": "trace", "sweep": "trace", "source": "kineto", "run": "job-1", "rank": 0}
    told |= {"source_file": "rank0.json", "step_us": step_us, **plain, **columns}
    rows = [{**told, "step": number} for number in range(count)]
    types = pl.Schema(STEPS)
    return pl.DataFrame([{n: row.get(n) for n in types} for row in rows], schema=types)


def job(
    calls: Sequence[dict[str, Any]], steps: pl.DataFrame | None = None, ranks_per_node: int = 8
) -> Job:
    """The job of some calls."""
    return job_of(calls_frame(*calls), steps, ranks_per_node)


def stepped(each: Sequence[dict[str, Any]], count: int = 4) -> list[dict[str, Any]]:
    """The same calls in each of `count` steps."""
    return [{**call, "step": step} for step in range(count) for call in each]


def exposed_job(exposed_us: float, **columns: Any) -> Job:
    """Four steps of 1,000 us with two all-reduces of 100 us, of which so much is exposed."""
    call = traced(0, 100.0, num_nodes=1, exposed_us=exposed_us, group="tp", **columns)
    steps = steps_frame(
        4, 1000.0, compute_us=1000.0 - 2 * exposed_us, communication_us=200.0,
        exposed_us=2 * exposed_us,
    )  # fmt: skip
    return job(stepped([call, call]), steps)


def against(found: Job, measured: pl.DataFrame, *chosen: Any, sm_price: float = 0.0) -> Answer:
    """What is in it for a job by a sweep, and by a policy and its manifest where given."""
    return answer(found, Measured(measured, None, found.nccl_version, sm_price), *chosen)


def arm_of(found: Answer) -> Any:
    """The arm that the verdict is about."""
    return next(iter(found.arms.values()))
