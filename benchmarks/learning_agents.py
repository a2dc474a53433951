"""Policies with a Trigger in whole jobs under changing interference, against simpler players.

The world is the fitted B300 node under `busy-host`: NVLS does not feel slow host CPUs, rings do, so
what is best depends on what nobody tells. Every seed has a quiet sweep, recordings of jobs that
stray from NCCL's choice in half of their calls, quiet recordings for a Trigger, and policies and
Trigger of its own; policies learn on training sizes alone (octaves 18, 20, 22, 24) and play on the
workloads' sizes, most of them of other octaves. Total true communication time of episodes of
100,000 calls, the same surroundings for all rows of a seed; Student's intervals over seeds.
"""

from pathlib import Path
from typing import Any, Final

from harness import Number, parallel
from scenario_places import record_exploring, train_trigger

from dynamiccl.collect.simulated import simulate
from dynamiccl.evaluate import simulate as compare
from dynamiccl.evaluate.simulate import (
    Estimate,
    Row,
    Setting,
    Totals,
    policy_contenders,
    simple_contenders,
)
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import make_workload
from dynamiccl.train.environment import delay_calls
from dynamiccl.train.fit import fit
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipe import make_recipe
from dynamiccl.train.trigger import Detector

SYSTEM: Final = "b300-nvlink"
SCENARIO: Final = "busy-host"
SHAPE: Final = Group(1, 8)
WORKLOADS: Final = ("decode", "lora")
DATA_SET: Final = "b300-nvlink, busy-host, jobs"
CALLS: Final = 100_000
JOBS: Final = 2
STEPS: Final = 6_000
#: A decision is in force for a while: it is judged by that, and looks no further ahead.
ALONE: Final = ("gamma=0", "num_steps=1", "entropy_start=0", "held_calls=8", "action_inputs=false")
SWEEP: Final = """
name = "quiet"
system = "b300-nvlink"
collectives = ["AllReduce"]
algorithms = ["Ring", "Tree", "NVLS"]
groups = [{{ num_nodes = 1, ranks_per_node = 8 }}]
sizes = {{ min = "64K", max = "64M", steps_per_octave = 2 }}
cycles = 3
[simulator]
system = "b300-nvlink"
seed = {seed}
"""
#: Row, recipe, and whether the Trigger tells it the interference of calls: then " + Trigger" comes
#: behind the name.
POLICIES: Final = (
    ("feed-forward policy", "ddqn-dueling", False),
    ("feed-forward policy", "ddqn-dueling", True),
    ("recurrent policy", "drqn-lstm", False),
    ("recurrent policy", "drqn-lstm", True),
)


def agents(out: Path, seeds: int) -> dict[str, Any]:
    """The figures of all rows."""
    played: dict[str, list[Totals]] = {}
    folders = [(out / f"seed-{seed}", seed) for seed in range(seeds)]
    for _ in parallel(_prepare, folders):
        pass
    rows = [(*each, row) for each in folders for row in range(1 + len(POLICIES))]
    found = dict(parallel(_play_row, rows))
    for _, part in sorted(found.items(), key=lambda item: item[0][1:]):
        for name, totals in part.items():
            played.setdefault(name, []).extend(totals)
    setting = _setting()
    trained = frozenset(name for name in played if "policy" in name)
    compared = compare.conclude(setting, played, trained)
    delay = delay_calls(simple_contenders(setting)[0].world)
    return {
        "data_sets": {DATA_SET: {row["name"]: _figures(row) for row in compared["rows"]}},
        "agents_calls": CALLS,
        "agents_jobs_per_seed": JOBS,
        "agents_delay_calls": delay,
    }


def _figures(row: Row) -> dict[str, Number]:
    found: dict[str, Number] = {k: value for k, value in row.items() if isinstance(value, float)}
    for name, each in row.items():
        if isinstance(each, Estimate):
            found |= {name: each.mean, f"{name}_lo": each.low, f"{name}_hi": each.high}
    return found


def _setting() -> Setting:
    return Setting(
        system=find_system(SYSTEM),
        workload=make_workload(WORKLOADS, SHAPE),
        scenario=find_scenario(SCENARIO),
        calls=CALLS,
        jobs=JOBS,
    )


def _prepare(data: Path, seed: int) -> None:
    """Sweep, record jobs, and train a Trigger."""
    simulate(SWEEP.format(seed=seed), data / "data")
    setting = _setting()
    record_exploring(setting, data / "data", jobs=48, calls=40_000, seed=10_000 + seed)
    train_trigger(setting, data, seed)


def _play_row(data: Path, seed: int, row: int) -> dict[str, list[Totals]]:
    """Row 0: all players without training; else a trained policy."""
    setting = _setting()
    if row == 0:
        return compare.play(setting, simple_contenders(setting), [seed])
    name, recipe, is_told = POLICIES[row - 1]
    settings = [*ALONE, f"steps={STEPS}", *([f"trigger={data}"] if is_told else [])]
    done = fit(
        data / "data",
        make_recipe(recipe, settings),
        experiment=name,
        tracking_uri=f"sqlite:///{data / f'mlflow-{row}.db'}",
        seed=seed,
    )
    policy = TorchPolicy.load(Path(done.run_directory) / "policy")

    def watch() -> Detector:
        return Detector.load(data)

    contenders = policy_contenders(setting, name, policy, watch if is_told else None)[:1]
    return compare.play(setting, contenders, [seed])
