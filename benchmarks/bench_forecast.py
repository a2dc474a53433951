"""Coverage of `dynamiccl-evaluate forecast`'s intervals on jobs with known truth.

    python benchmarks/bench_forecast.py          # FULL=1: five times as many jobs

*Simulated jobs*: the shipped workloads, and workloads that are drawn (groups, collectives, sizes,
compute before and beside), in quiet and in other scenarios that ship. A job's trace under NCCL's
own choice and a sweep of 3 or 5 noisy cycles go into the forecast; then the same job is played
under the table that the forecast is about. *Measured sweeps*: times that other people published
(datasets/sample, and more where it is at hand), each cell with its own deviations, drawn anew as a
sweep of 3 or 5 runs; the job calls some of them under NCCL's own choice.

*Coverage* is the share of 90 % intervals that hold the truth, of jobs in which the table changes
anything. Settings were chosen on other seeds (TUNING=1 judges on those). *False gains* are jobs of
which it says "gain" where the truth is none. Writes out/bench/forecast.json. Four minutes.
"""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl
from forecast_jobs import as_calls, play
from harness import write_result

from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.cells import CELL_COLUMNS, CONFIG_COLUMNS, independent
from dynamiccl.datasets.rows import config_of, measurements_table
from dynamiccl.datasets.schema import TASK_COLUMNS
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.forecast.forecast import TABLE, Conclusion, Forecast, forecast
from dynamiccl.evaluate.forecast.gains import Measured
from dynamiccl.evaluate.forecast.job import job_of
from dynamiccl.evaluate.forecast.saving import Estimate
from dynamiccl.nccl import ABSTAIN as OWN
from dynamiccl.nccl import Collective, Config
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.record_jobs import all_configs
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import WORKLOADS, WorkCall, Workload, make_workload
from dynamiccl.simulator.world import World
from dynamiccl.sizes import size_bin

ROOT: Final = Path(__file__).resolve().parents[1]
#: Seeds below are for choosing settings; what is written was judged on those from here on.
JUDGED_FROM: Final = 5000
#: A true saving that is worth telling: share of the step, or of communication without steps.
WORTH: Final = 0.02
#   TUNING   1: other seeds, to choose settings by.
#   VERBOSE  anything: every case of bench_forecast on a line of its own.
TUNING: Final = os.environ.get("TUNING") == "1"
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
    """One job: forecast and truth, as shares saved."""

    kind: str
    verdict: Conclusion
    communication: tuple[Estimate, float]
    step: tuple[Estimate, float] | None
    acts: bool

    @property
    def false_gain(self) -> bool:
        """Whether the forecast is a gain where there is none."""
        told, truth = self.step or self.communication
        return self.verdict is Conclusion.GAIN and truth <= 0.0 < told.low


def holds(pair: tuple[Estimate, float]) -> bool:
    """Whether the interval contains the truth."""
    told, truth = pair
    return told.low - 1e-9 <= truth <= told.high + 1e-9


def main() -> None:
    """Judge all jobs."""
    many = 5 if os.environ.get("FULL") else 1
    first = 0 if TUNING else JUDGED_FROM
    sims = list(simulated(first, 12 * many))
    real = list(measured(first, 60 * many))
    figures: dict[str, float | int | str | None] = {}
    pairs: dict[str, list[tuple[Estimate, float]]] = {
        "communication": [j.communication for j in sims if j.acts],
        "step": [j.step for j in sims if j.acts and j.step is not None],
        "measured": [j.communication for j in real if j.acts],
    }
    for name, told in pairs.items():
        figures[f"forecast_coverage_{name}"] = float(np.mean([holds(each) for each in told]))
        figures[f"forecast_jobs_{name}"] = len(told)
        widths = [each.high - each.low for each, _ in told]
        figures[f"forecast_width_{name}_median"] = float(np.median(widths))
        errors = [abs(each.mean - truth) for each, truth in told]
        figures[f"forecast_error_{name}_mean"] = float(np.mean(errors))
    every = [each for told in pairs.values() for each in told]
    figures["forecast_coverage"] = float(np.mean([holds(each) for each in every]))
    for verdict in Conclusion:
        mine = [j for j in (*sims, *real) if j.verdict is verdict]
        figures[f"forecast_said_{verdict.value.replace('-', '_')}"] = len(mine)
    for name, jobs in (("", sims), ("_measured", real)):
        able = [j for j in jobs if (j.step or j.communication)[1] > WORTH]
        figures[f"forecast_jobs_with_a_gain{name}"] = len(able)
        figures[f"forecast_gains_said{name}"] = (
            float(np.mean([j.verdict is Conclusion.GAIN for j in able])) if able else None
        )
    figures["forecast_false_gains"] = int(sum(j.false_gain for j in (*sims, *real)))
    if TUNING or os.environ.get("VERBOSE"):
        for j in (*sims, *real):
            tell(j)
    write_result("forecast-tuning" if TUNING else "forecast", figures)


def tell(judged: Judged) -> None:
    """Print one job, for choosing settings."""
    words = [f"{judged.kind:40} {judged.verdict:12} {'acts' if judged.acts else '    '}"]
    for name, pair in (("comm", judged.communication), ("step", judged.step)):
        if pair is not None:
            words.append(f"{name} {pair[1]:+.4f} {pair[0].text} {'' if holds(pair) else 'OUT'}")
    print(" | ".join(words))


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
    """One job's forecast against itself under the table."""
    calls = max(6 * len(world.order), 600)
    own = play(world, np.zeros(len(world.keys), dtype=np.int64), seed, calls)
    found = forecast(job_of(as_calls(own.calls), own.steps), known)
    table = play(world, table_of(found, world), seed, calls)
    arm = found.arms[TABLE]
    assert arm.step is not None
    return Judged(
        f"{world.workload.name} in {world.scenario.meaning[:20]}",
        found.verdict,
        (arm.communication, 1.0 - table.communication_us / own.communication_us),
        (arm.step, 1.0 - table.job_us / own.job_us),
        any(pick is not None and pick.config != OWN for pick in arm.picks),
    )


def table_of(found: Forecast, world: World) -> npt.NDArray[np.int64]:
    """(keys,) the actions of the table that a forecast is about."""
    actions = np.zeros(len(world.keys), dtype=np.int64)
    picks = found.arms[TABLE].picks
    for kind, pick in zip(found.weighed.kinds, picks, strict=True):
        if pick is None:
            continue
        place = (kind.collective, kind.bin, kind.num_nodes, kind.num_ranks)
        for key, call in enumerate(world.keys):
            shape = (call.group.num_nodes, call.group.num_ranks)
            if (call.collective.wire, size_bin(call.size_bytes), *shape) == place:
                actions[key] = world.configs.index(pick.config)
    return actions


def measured(first: int, jobs: int) -> Iterator[Judged]:
    """Jobs that call what was measured, in the noise that was measured."""
    for name, tasks in published():
        for number in range(jobs):
            yield judge_measured(name, tasks, (3, 5)[number % 2], first + number)


def published() -> Iterator[tuple[str, list[pl.DataFrame]]]:
    """Systems and their tasks with three repeats of NCCL's own choice and of another config."""
    sample, more = ROOT / "datasets" / "sample", ROOT.parent / "shared" / "data" / "sweeps"
    files = {path.name: path for folder in (more, sample) for path in sorted(folder.glob("*.csv"))}
    files.pop("mscclpp_targets.csv", None)  # of MSCCL++'s kernels, which are no configs of NCCL's
    with tempfile.TemporaryDirectory() as folder:
        options = ImportOptions(systems_file=sample / "systems.toml")
        import_files(sorted(files.values()), Path(folder), options=options)
        rows = independent(read(Path(folder)))
    rows = rows.filter(pl.len().over(CELL_COLUMNS) >= 3)
    rows = rows.filter(pl.col("is_default").any().over(TASK_COLUMNS))
    rows = rows.filter((~pl.col("is_default")).any().over(TASK_COLUMNS))
    for (system,), part in rows.group_by("system", maintain_order=True):
        quiet = part.filter(pl.col("launch_profile") == "default")
        tasks = [task for _, task in quiet.group_by(TASK_COLUMNS, maintain_order=True)]
        if len(tasks) >= 6:
            yield str(system), tasks


def judge_measured(name: str, tasks: list[pl.DataFrame], runs: int, seed: int) -> Judged:
    """A sweep of all tasks, drawn, and a job that calls some of them."""
    random = np.random.default_rng(seed)
    chosen = random.choice(len(tasks), int(random.integers(2, 6)), replace=False)
    frame, true_us = drawn_sweep(tasks, runs, random)
    counts = random.integers(1, 20, len(chosen))
    factor = float(np.exp(random.normal(0.0, 0.1)))
    calls = [
        {
            "run": "job", "step": step, "collective": row["collective"],
            "size_bytes": row["size_bytes"], "num_nodes": row["num_nodes"],
            "num_ranks": row["num_ranks"],
            "time_us": true_us[place][OWN] * factor * float(np.exp(random.normal(0.0, 0.03))),
        }
        for step in range(20)
        for place, count in zip(chosen, counts, strict=True)
        for row in [tasks[place].row(0, named=True)] * int(count)
    ]  # fmt: skip
    found = forecast(job_of(as_calls(pl.DataFrame(calls)), None), Measured(frame, None, None))
    picks = {
        (kind.collective, kind.bin, kind.num_ranks): pick
        for kind, pick in zip(found.weighed.kinds, found.arms[TABLE].picks, strict=True)
    }
    saved = whole = 0.0
    for place, count in zip(chosen, counts, strict=True):
        row, times = tasks[place].row(0, named=True), true_us[place]
        pick = picks[row["collective"], size_bin(row["size_bytes"]), row["num_ranks"]]
        own = times[OWN]
        whole += count * own
        saved += count * (own - times.get(OWN if pick is None else pick.config, own))
    acts = any(pick is not None and pick.config != OWN for pick in picks.values())
    told = found.arms[TABLE].communication
    return Judged(name, found.verdict, (told, saved / whole), None, acts)


def drawn_sweep(
    tasks: list[pl.DataFrame], runs: int, random: np.random.Generator
) -> tuple[pl.DataFrame, list[dict[Config, float]]]:
    """A sweep of `runs` runs of the tasks' own deviations, and the true us of each task's configs.

    What a run did to one size it often did to the others (the raw repeats say so), so half of the
    cells of a run share which of their repeats is drawn.
    """
    shared = random.random(runs)
    rows, true_us = [], []
    for task in tasks:
        times: dict[Config, float] = {}
        for _, cell in task.group_by(CONFIG_COLUMNS, maintain_order=True):
            logs = np.sort(np.log(cell["time_us"].to_numpy()))
            row = cell.row(0, named=True)
            # Gains are of logarithms, and so is their truth: half of these cells have two states.
            times[OWN if row["is_default"] else config_of(row)] = float(np.exp(np.mean(logs)))
            at = np.where(random.random(runs) < 0.5, shared, random.random(runs))
            rows += [
                {
                    **row, "sweep": "drawn", "run": f"run-{run}", "repeat": 0,
                    "time_us": float(np.exp(logs[int(which * len(logs))])),
                }
                for run, which in enumerate(at)
            ]  # fmt: skip
        true_us.append(times)
    return pl.DataFrame(measurements_table(rows)), true_us


if __name__ == "__main__":
    main()
