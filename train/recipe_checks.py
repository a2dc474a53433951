"""Validation of a recipe's settings, single and combined."""

from enum import StrEnum
from typing import Any, Final

from dynamiccl.datasets.splits import split_by
from dynamiccl.errors import UnknownName, UserError
from dynamiccl.train.bounds import check_bounds

#: `recipe.Recipe`, which imports this.
Recipe = Any


#: Algorithms whose actors play in the simulator.
ONLINE: Final = ("A3C", "IMPALA")
#: Algorithms without networks (fit.py).
CAUTIOUS: Final = ("GaussianProcess",)


class CostBase(StrEnum):
    """The base over which the times of configs are learned."""

    COST = "cost"
    TIME = "time"
    HELD_OUT = "held-out"


class RewardScale(StrEnum):
    """The reward of actors in simulated worlds.

    `raw`: minus the time in ms; `reference`: minus time / NCCL's default in quiet; `clipped`: the
    same, clipped at -2 (cf. the clipped rewards of Atari agents); `log`: minus its logarithm.
    """

    RAW = "raw"
    REFERENCE = "reference"
    CLIPPED = "clipped"
    LOG = "log"


def check_recipe(recipe: Recipe) -> None:
    """Raise UserError for a setting out of bounds, and for conflicting settings.

    Raises UnknownName for a value that is not among its choices.
    """
    check_bounds(recipe, f"recipe '{recipe.name}' (--set)")
    split_by(recipe.split)
    if recipe.held_calls > 1 and recipe.gamma > 0.0:
        raise UserError(
            f"held_calls={recipe.held_calls} takes the place of looking ahead, and gamma is "
            f"{recipe.gamma}: --set gamma=0, or --set held_calls=1"
        )
    _check_algorithm(recipe)
    enums = {"cost_base": CostBase, "reward_scale": RewardScale}
    for name, choices in enums.items():
        if getattr(recipe, name) not in list(choices):
            named = [each.value for each in choices]
            raise UnknownName(name, getattr(recipe, name), named, where=f"--set {name}")
    if recipe.lambda_congestion and not recipe.trigger:
        raise UserError(
            f"lambda_congestion={recipe.lambda_congestion} needs interference levels, which a "
            "Trigger tells: --set trigger=RUN_DIRECTORY, or leave it at 0"
        )


def _check_algorithm(recipe: Recipe) -> None:
    """Check settings that only some algorithms have."""
    if recipe.level_threshold and recipe.algorithm not in CAUTIOUS:
        raise UserError(
            f"level_threshold={recipe.level_threshold} is for a policy of times, and the "
            f"algorithm of '{recipe.name}' is {recipe.algorithm}: leave it at 0, or take "
            "'threshold-rule'"
        )
    if any(recipe.probe_every) and not recipe.state_units:
        raise UserError(
            f"probe_every={','.join(map(str, recipe.probe_every))} counts in the state of a job, "
            "and state_units is 0: leave it at 0, or take 'a3c-lstm' or 'impala-lstm'"
        )
    if recipe.state_units and not recipe.seen_decisions:
        raise UserError(
            "seen_decisions=0 with state_units: the state needs the last decision; --set "
            "seen_decisions=1, or state_units=0"
        )
    if recipe.state_units and recipe.algorithm not in ONLINE:
        raise UserError(
            f"state_units={recipe.state_units} is for algorithms that play, and the algorithm of "
            f"'{recipe.name}' is {recipe.algorithm}: leave it out, or take 'a3c-lstm'"
        )
    if recipe.start:
        _check_start(recipe)


def _check_start(recipe: Recipe) -> None:
    if recipe.algorithm in CAUTIOUS:
        raise UserError(
            f"start={recipe.start} is for networks, and the algorithm of '{recipe.name}' is "
            f"{recipe.algorithm}: leave it out, or take 'ddqn-actions' or 'a3c-lstm'"
        )
    if recipe.num_members > 1:
        raise UserError(
            f"start={recipe.start} with num_members={recipe.num_members}: all would begin, and "
            "remain, the same; --set num_members=1"
        )
