"""Totals of `dynamiccl-evaluate simulate`: AutoCCL's search, ours, A3C and IMPALA, by their CLI.

Actors and learners run beside each other, so most runs of them cannot be repeated. These can: one
actor, no average of weights, and only updates that nothing can overtake. A3C's one actor learns
from what it plays itself, and stops after its last update. IMPALA's learner makes two: the first
from a trajectory under the first weights, and the last one of a run has a learning rate of 0. After
some dozens of updates two kinds of CPU would have learned different things.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from tests.golden.golden import Golden, equal_values
from tests.golden.tables import run, simulate

SYSTEM: Final = "b300-nvlink"
SCENARIO: Final = "busy-host"
WORKLOADS: Final = ("decode", "lora")
SWEEP: Final = f"""
name = "quiet"
system = "{SYSTEM}"
collectives = ["AllReduce"]
groups = [{{ num_nodes = 1, ranks_per_node = 8 }}]
sizes = {{ min = "64K", max = "64M" }}
cycles = 1
[simulator]
system = "{SYSTEM}"
seed = 0
"""
_SMALL: Final = (
    f"places={SYSTEM}:{'+'.join(WORKLOADS)}:{SCENARIO}",
    *("actors=1", "jobs=4", "episode_rounds=20", "hidden_sizes=16", "average_decay=0"),
)
RECIPES: Final = {
    "a3c": (*_SMALL, "steps=3", "steps_per_epoch=3", "num_steps=10", "learning_rate=0.1"),
    "impala-lstm": (
        *_SMALL,
        *("steps=2", "steps_per_epoch=2", "num_steps=10", "learning_rate=0.03"),
        *("state_units=8", "probe_every=0"),
    ),
}
#: Machines differ in the last bits, and what is learned with them: totals of players that learned
#: may differ by this share.
LEARNED: Final = 0.02


def make_totals(directory: Path) -> Any:
    """Seconds of each player's jobs, by seed."""
    torch.set_num_threads(1)
    simulate(directory, SWEEP)
    place = ("--system", SYSTEM, "--scenario", SCENARIO, "--nodes", 1)
    work = [word for each in WORKLOADS for word in ("--workload", each)]
    command = partial(run, directory=directory)
    recorded = ("--jobs", 2, "--calls", 2000, "--explore", 0)
    command("collect", "jobs", *place, *work, *recorded, "--out", "calls")
    quick = ("--steps", 1, "--calls-per-rung", 20_000)
    trigger = command("train", "trigger", "--data", "calls", *quick)
    policies = []
    for recipe, settings in RECIPES.items():
        words = [word for each in settings for word in ("--set", each)]
        fitted = command("train", "fit", "--data", "data", "--recipe", recipe, *words, "--seed", 1)
        policies += ["--policy", f"{recipe}={fitted['run_id']}"]
    size = ("--calls", 800, "--jobs", 2, "--seeds", 2)
    watch = ("--trigger", trigger["run_id"])
    found = command(
        "evaluate", "simulate", *policies, *watch, *place, *work, *size, "--out", "page"
    )
    return {row["name"]: row["seed_seconds"] for row in found["rows"]}


def same_totals(kept: Any, made: Any) -> list[str]:
    """Exactly, but for players that learned."""
    learned = {name for name in kept if any(recipe in name for recipe in RECIPES)}
    exact = {name: value for name, value in kept.items() if name not in learned}
    return equal_values(exact, made) + [
        f"{name}: {kept[name]} s were kept, now it is {made.get(name)}"
        for name in sorted(learned)
        if not _near(kept[name], made.get(name, []))
    ]


def _near(kept: list[float], made: list[float]) -> bool:
    return len(kept) == len(made) and all(
        math.isclose(one, other, rel_tol=LEARNED) for one, other in zip(kept, made, strict=True)
    )


GOLDENS: Final = (Golden("jobs-totals", make_totals, same_totals),)
