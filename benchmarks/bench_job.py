"""Coverage of `dynamiccl-evaluate job`'s intervals on jobs with known truth.

    python benchmarks/bench_job.py          # FULL=1: five times as many jobs

The shipped workloads, and workloads that are drawn (groups, collectives, sizes, compute before and
beside), in quiet and in other scenarios that ship. A job's trace under NCCL's own choice and a
sweep of 3 or 5 noisy cycles go in; then the same job is played under the table that the answer is
about.

*Coverage* is the share of 90 % intervals that hold the truth, of jobs in which the table changes
anything. Settings were chosen on other seeds. *False gains* are jobs of which it says "gain" where
the truth is none. Writes out/bench/job.json. Four minutes.
"""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

import numpy as np
import numpy.typing as npt
from harness import write_result
from job_traces import as_calls, play

from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.job import NCCL_OWN, TABLE, Answer, Estimate, Verdict, answer
from dynamiccl.evaluate.job_calls import Measured, job_of
from dynamiccl.nccl import Collective
from dynamiccl.simulator.record_jobs import all_configs
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import WORKLOADS, WorkCall, Workload, make_workload
from dynamiccl.simulator.world import World
from dynamiccl.sizes import size_bin

#: Seeds below are for choosing settings; what is written was judged on those from here on.
JUDGED_FROM: Final = 5000
#: A true saving that is worth telling: share of the step.
WORTH: Final = 0.02
SHAPE: Final = Group(4, 8)
GROUPS: Final = (SHAPE, Group(1, 8), Group(4, 1))
SCENARIOS: Final = ("quiet", "congested", "busy-host", "shared-node", "shared-uplink")
SWEEP: Final = """
name = "s{seed}"
system = "h100-ib-simulated"
collectives = ["AllReduce", "AllGather", "ReduceScatter"]
algorithms = ["Ring", "Tree", "NVLS", "NVLSTree"]
groups = [
    {{ num_nodes = 4, ranks_per_node = 8 }},
    {{ num_nodes = 1, ranks_per_node = 8 }},
    {{ num_nodes = 4, ranks_per_node = 1 }},
]
sizes = {{ min = "1K", max = "1G", steps_per_octave = 1 }}
nccl_version = "2.27.5"
cycles = {cycles}
[simulator]
seed = {seed}
noise_sigma = 0.02
"""


@dataclass(frozen=True, slots=True)
class Judged:
    """One job: what was told, and the truth, as shares saved."""

    verdict: Verdict
    communication: tuple[Estimate, float]
    step: tuple[Estimate, float]
    acts: bool

    @property
    def false_gain(self) -> bool:
        """Whether it says that there is a gain where there is none."""
        told, truth = self.step
        return self.verdict == "gain" and truth <= 0.0 < told.low


def holds(pair: tuple[Estimate, float]) -> bool:
    """Whether the interval contains the truth."""
    told, truth = pair
    return told.low - 1e-9 <= truth <= told.high + 1e-9


def main() -> None:
    """Judge all jobs."""
    jobs = list(simulated(JUDGED_FROM, 60 if os.environ.get("FULL") else 12))
    acting = [job for job in jobs if job.acts]
    figures: dict[str, float | int | str | None] = {}
    pairs: dict[str, list[tuple[Estimate, float]]] = {
        "communication": [j.communication for j in acting],
        "step": [j.step for j in acting],
    }
    for name, told in pairs.items():
        figures[f"job_coverage_{name}"] = float(np.mean([holds(each) for each in told]))
        figures[f"job_jobs_{name}"] = len(told)
    for verdict in get_args(Verdict):
        said = sum(job.verdict == verdict for job in jobs)
        figures[f"job_said_{verdict.replace('-', '_')}"] = said
    able = [job.verdict == "gain" for job in jobs if job.step[1] > WORTH]
    figures["job_jobs_with_a_gain"] = len(able)
    figures["job_gains_said"] = float(np.mean(able)) if able else None
    figures["job_false_gains"] = sum(job.false_gain for job in jobs)
    write_result("job", figures)


def simulated(first: int, sweeps: int) -> Iterator[Judged]:
    """Jobs in the simulator: each sweep with every scenario, on shipped and drawn workloads."""
    system = find_system("h100-ib")
    for number in range(sweeps):
        seed = first + number
        random = np.random.default_rng(seed)
        with tempfile.TemporaryDirectory() as folder:
            cycles = (3, 5)[number % 2]
            simulate(SWEEP.format(seed=seed, cycles=cycles), Path(folder))
            known = Measured(read(Path(folder)), None, None)
        for index, scenario in enumerate(SCENARIOS):
            names = list(WORKLOADS)
            named = make_workload([names[(number + 3 * index) % len(names)]], SHAPE)
            for workload in (named, drawn(random), drawn(random)):
                if not all(call.group in GROUPS for call in workload.calls):
                    continue
                # A job's first steps load kernels and connect; that is paid once.
                around = find_scenario(scenario).model_copy(update={"first_use_us": 0.0})
                world = World(system, workload, all_configs(system, workload), around)
                yield judge_simulated(world, known, seed + 17 * index)


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


def judge_simulated(world: World, known: Measured, seed: int) -> Judged:
    """What is told of one job, against the job under the table."""
    calls = max(6 * len(world.order), 600)
    own = play(world, np.zeros(len(world.keys), dtype=np.int64), seed, calls)
    found = answer(job_of(as_calls(own.calls), own.steps, SHAPE.ranks_per_node), known)
    table = play(world, table_of(found, world), seed, calls)
    arm = found.arms[TABLE]
    assert arm.step is not None
    return Judged(
        found.told["verdict"],
        (arm.communication, 1.0 - table.communication_us / own.communication_us),
        (arm.step, 1.0 - table.job_us / own.job_us),
        any(kind["better_config"] not in {None, NCCL_OWN} for kind in arm.kinds),
    )


def table_of(found: Answer, world: World) -> npt.NDArray[np.int64]:
    """(keys,) the actions of the table that an answer is about."""
    actions = np.zeros(len(world.keys), dtype=np.int64)
    for kind in found.arms[TABLE].kinds:
        place = tuple(kind[name] for name in ("collective", "bin", "num_nodes", "num_ranks"))
        for key, call in enumerate(world.keys):
            shape = (call.group.num_nodes, call.group.num_ranks)
            if (call.collective.wire, size_bin(call.size_bytes), *shape) == place:
                keys = [each.key for each in world.configs]
                config = kind["better_config"]
                actions[key] = 0 if config in {None, NCCL_OWN} else keys.index(config)
    return actions


if __name__ == "__main__":
    main()
