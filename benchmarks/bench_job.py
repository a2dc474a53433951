"""Coverage of `dynamiccl-evaluate job`'s intervals on jobs with known truth.

    python benchmarks/bench_job.py          # four minutes; FULL=1: five times as many jobs

Shipped and drawn workloads, in quiet and in other scenarios that ship. A job's trace under NCCL's
own choice and a sweep of 3 or 5 noisy cycles go in; then the same job is played under the table
that the answer is about. *Coverage* is the share of 90 % intervals that hold the truth, of jobs in
which the table changes anything. *False gains*: it says "gain" where there is none.
"""

import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import numpy as np
import polars as pl
from harness import COLLECTIVES, FULL, simulated, write_result

from dynamiccl.datasets.schema import CALLS
from dynamiccl.datasets.store import read
from dynamiccl.drawn_worlds import Ints
from dynamiccl.evaluate.job import NCCL_OWN, TABLE, Answer, Verdict, answer
from dynamiccl.evaluate.job_calls import Measured, job_of
from dynamiccl.nccl import Collective
from dynamiccl.simulator.record_jobs import all_configs
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import WORKLOADS, WorkCall, Workload, make_workload
from dynamiccl.simulator.world import World
from dynamiccl.sizes import size_bin

#: Settings were chosen on the seeds below.
JUDGED_FROM: Final = 5000
SWEEPS: Final = 60 if FULL else 12
#: A true saving that is worth telling: share of the step.
WORTH: Final = 0.02
GROUPS: Final = (Group(4, 8), Group(1, 8), Group(4, 1))
SHAPES: Final = (
    f"{{ num_nodes = {g.num_nodes}, ranks_per_node = {g.ranks_per_node} }}" for g in GROUPS
)
SCENARIOS: Final = ("quiet", "congested", "busy-host", "shared-node", "shared-uplink")
SWEEP: Final = {
    "collectives": COLLECTIVES,
    "algorithms": '["Ring", "Tree", "NVLS", "NVLSTree"]',
    "groups": f"[{', '.join(SHAPES)}]",
    "sizes": '{ min = "1K", max = "1G", steps_per_octave = 1 }',
}
_BEGIN: Final = datetime(2026, 1, 1, tzinfo=UTC)


def main() -> None:
    """Judge all jobs."""
    jobs = list(judged(JUDGED_FROM, SWEEPS))
    acting = [job for job in jobs if job["acts"]]
    figures: dict[str, Any] = {"job_jobs": len(acting)}
    for name in ("communication", "step"):
        held = [
            job[name].low - 1e-9 <= job[f"{name}_truth"] <= job[name].high + 1e-9 for job in acting
        ]
        figures[f"job_coverage_{name}"] = float(np.mean(held))
    for verdict in get_args(Verdict):
        said = sum(job["verdict"] == verdict for job in jobs)
        figures[f"job_said_{verdict.replace('-', '_')}"] = said
    able = [job["verdict"] == "gain" for job in jobs if job["step_truth"] > WORTH]
    figures["job_jobs_with_a_gain"] = len(able)
    figures["job_gains_said"] = float(np.mean(able)) if able else None
    false = [
        job["verdict"] == "gain" and job["step_truth"] <= 0.0 < job["step"].low for job in jobs
    ]
    write_result("job", figures | {"job_false_gains": sum(false)})


def judged(first: int, sweeps: int) -> Iterator[dict[str, Any]]:
    """Jobs in the simulator: each sweep with every scenario, on shipped and drawn workloads."""
    system, names = find_system("h100-ib"), list(WORKLOADS)
    for number in range(sweeps):
        seed = first + number
        random = np.random.default_rng(seed)
        with tempfile.TemporaryDirectory() as folder:
            sweep = simulated(Path(folder), seed, (3, 5)[number % 2], SWEEP)
            known = Measured(read(sweep), None, None)
        for index, scenario in enumerate(SCENARIOS):
            named = make_workload([names[(number + 3 * index) % len(names)]], GROUPS[0])
            for workload in (named, drawn(random), drawn(random)):
                if not all(call.group in GROUPS for call in workload.calls):
                    continue
                # A job's first steps load kernels and connect; that is paid once.
                around = find_scenario(scenario).model_copy(update={"first_use_us": 0.0})
                world = World(system, workload, all_configs(system, workload), around)
                yield judged_job(world, known, seed + 17 * index)


def drawn(random: np.random.Generator) -> Workload:
    """An iteration of three to eight different calls, each repeated."""
    collectives = (Collective.AllReduce, Collective.AllGather, Collective.ReduceScatter)
    calls: list[WorkCall] = []
    for _ in range(int(random.integers(3, 9))):
        size = int(2 ** random.uniform(12.0, 29.0)) // 512 * 512
        beside = 0.0 if random.random() < 0.5 else float(2 ** random.uniform(7.0, 13.0))
        call = WorkCall(
            GROUPS[int(random.integers(len(GROUPS)))],
            collectives[int(random.integers(3))],
            size,
            float(2 ** random.uniform(4.0, 11.0)),
            beside,
        )
        calls += [call] * int(random.integers(1, 9))
    return Workload("drawn", tuple(calls))


def judged_job(world: World, known: Measured, seed: int) -> dict[str, Any]:
    """What is told of one job, and the truth, the job under the table, as shares saved."""
    calls = max(6 * len(world.order), 600)
    own = play(world, np.zeros(len(world.keys), dtype=np.int64), seed, calls)
    found = answer(job_of(own.calls, own.steps, GROUPS[0].ranks_per_node), known)
    table, arm = play(world, table_of(found, world), seed, calls), found.arms[TABLE]
    return {
        "verdict": found.told["verdict"],
        "communication": arm.communication,
        "communication_truth": 1.0 - table.communication_us / own.communication_us,
        "step": arm.step,
        "step_truth": 1.0 - table.job_us / own.job_us,
        "acts": any(kind["better_config"] not in {None, NCCL_OWN} for kind in arm.kinds),
    }


def table_of(found: Answer, world: World) -> Ints:
    """(keys,) the actions of the table that an answer is about."""
    actions = np.zeros(len(world.keys), dtype=np.int64)
    numbers = {config.key: number for number, config in enumerate(world.configs)}
    for kind in found.arms[TABLE].kinds:
        place = tuple(kind[name] for name in ("collective", "bin", "num_nodes", "num_ranks"))
        for key, call in enumerate(world.keys):
            shape = (call.group.num_nodes, call.group.num_ranks)
            if (call.collective.wire, size_bin(call.size_bytes), *shape) == place:
                config = kind["better_config"]
                actions[key] = 0 if config in {None, NCCL_OWN} else numbers[config]
    return actions


class Played(NamedTuple):
    """A job's calls and what they came to, us of true times."""

    calls: pl.DataFrame
    steps: pl.DataFrame
    communication_us: float
    job_us: float


def play(world: World, actions: Ints, seed: int, num_calls: int) -> Played:
    """Play one job under `actions` (keys,), 0 being NCCL's own choice; times of all ranks known.

    Of equal seeds surroundings, noise and compute are the same: a difference is the actions'.
    """
    jobs = world.jobs(1, seed)
    number = int(jobs.place[0]) + np.arange(num_calls)
    ran = [jobs.step(actions[jobs.key]) for _ in range(num_calls)]
    step, place = np.divmod(number, len(world.order))
    key = world.order[place]
    true_us, measured_us, lasted_us = (
        np.array([getattr(each, name)[0] for each in ran])
        for name in ("true_us", "measured_us", "lasted_us")
    )
    beside_us = world.beside_us[place]
    ends_us = beside_us / world.compute_speed[key, actions[key]]
    # Beside no compute is all of a call, or what is left of it when the compute beside it ends.
    exposed_us = np.clip(lasted_us - world.before_us[place] - ends_us, 0.0, true_us)
    waits_us = np.minimum(world.contention.held_us, beside_us / 4.0)
    exposed_us[ends_us >= waits_us + true_us] = 0.0
    noise = measured_us / true_us
    step_us = lasted_us + exposed_us * (noise - 1.0)
    begins_us = np.cumsum(step_us) - step_us
    kinds = [
        {
            "group": f"{call.group.num_nodes}x{call.group.ranks_per_node}",
            "collective": call.collective.wire, "size_bytes": call.size_bytes,
            "num_nodes": call.group.num_nodes, "num_ranks": call.group.num_ranks,
            "ranks_seen": call.group.num_ranks, "ranks_timed": call.group.num_ranks,
            "run": f"job-{seed}", "system": "simulated", "sweep": "job", "source": "simulator",
        }
        for call in world.keys
    ]  # fmt: skip
    calls = pl.DataFrame(kinds)[key].with_columns(
        sequence=pl.Series(np.arange(num_calls)),
        step=pl.Series(step),
        timestamp=pl.Series([_BEGIN + timedelta(microseconds=us) for us in begins_us.tolist()]),
        time_us=pl.Series(measured_us),
        exposed_us=pl.Series(np.minimum(exposed_us * noise, measured_us)),
    )
    steps = calls.with_columns(step_us=pl.Series(step_us)).group_by("run", "step")
    told = steps.agg(
        pl.sum("step_us", "exposed_us"),
        communication_us=pl.sum("time_us"),
        compute_us=pl.sum("step_us") - pl.sum("exposed_us"),
        idle_us=pl.lit(0.0),
        source_file=pl.lit("job"),
    )
    empty = pl.DataFrame(CALLS.empty_table())
    calls = pl.concat([empty, calls], how="diagonal_relaxed")
    return Played(calls, told.sort("step"), float(true_us.sum()), float(lasted_us.sum()))


if __name__ == "__main__":
    main()
