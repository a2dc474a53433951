"""Totals of `dynamiccl-evaluate simulate`: AutoCCL's search, ours and IMPALA, by their CLI.

Actors and learners run beside each other, so most runs of them cannot be repeated. This one can:
one actor, and two updates, the first from a trajectory under the first weights, the last with a
learning rate of 0, as the last one of every run. After some dozens of updates two kinds of CPU
would have learned different things.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

from dynamiccl.train.policy import save_script
from dynamiccl.train.trigger import TriggerModule
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
RECIPE: Final = "impala-lstm"
SETTINGS: Final = (
    f"places={SYSTEM}:{'+'.join(WORKLOADS)}:{SCENARIO}",
    *("actors=1", "jobs=4", "episode_rounds=20", "hidden_sizes=16", "average_decay=0"),
    *("steps=2", "steps_per_epoch=2", "num_steps=10", "learning_rate=0.03"),
    *("state_units=8", "probe_every=0"),
)
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
    (directory / "trigger").mkdir()
    save_script(TriggerModule().eval(), directory / "trigger" / "trigger.pt")
    settings = [word for each in SETTINGS for word in ("--set", each)]
    how = ("--data", "data", "--recipe", RECIPE, *settings, "--seed", 1)
    fitted = command("train", "fit", *how)
    policy = ("--policy", f"{RECIPE}={fitted['run_id']}", "--trigger", "trigger")
    size = ("--calls", 500, "--seeds", 1)
    # Nobody looks at its page: `commands-simulate` draws one.
    with mock.patch("dynamiccl.evaluate.simulate.draw_courses", return_value=""):
        found = command("evaluate", "simulate", *policy, *place, *work, *size, "--out", "page")
    return {row["name"]: row["seed_seconds"] for row in found["rows"]}


def same_totals(kept: Any, made: Any) -> list[str]:
    """Exactly, but for players that learned."""
    learned = {name for name in kept if RECIPE in name}
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
