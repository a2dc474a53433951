"""Chooses the abstain threshold of trained networks: a margin, or a bound (`caution`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from dynamiccl.train.cautious.caution import MIN_GAIN
from dynamiccl.train.cautious.run import calibration_figures
from dynamiccl.train.cross_fitting import CrossFitting
from dynamiccl.train.data import TrainingData
from dynamiccl.train.heads import Member
from dynamiccl.train.policy_module import PolicyModule, StatefulPolicyModule
from dynamiccl.train.recipe import Recipe
from dynamiccl.train.recipe_checks import Caution
from dynamiccl.train.sure_module import SurePolicyModule


@dataclass(frozen=True, slots=True)
class Decided:
    """A policy with its threshold, and its validation regret."""

    module: nn.Module
    #: ln of time that a gain must be beyond in any case.
    margin: float
    #: On the validation tasks.
    regret: float
    figures: dict[str, float]
    #: Of a bound, the least that the tasks of each machine can keep.
    least_alphas: list[float]


def decide_caution(members: Sequence[Member], data: TrainingData, recipe: Recipe) -> Decided:
    """The policy of trained ensemble members, with its threshold."""
    if recipe.caution == Caution.MARGIN:
        margin, regret = _choose_margin(members, data, recipe)
        if recipe.state_units:
            (member,) = members
            module: PolicyModule = StatefulPolicyModule(member, margin, recipe.warm_margin)
            return Decided(module, margin, regret, {}, [])
        module = PolicyModule(members, margin, recipe.warm_margin, is_unanimous=recipe.unanimous)
        return Decided(module, margin, regret, {}, [])
    bound = CrossFitting(data, recipe.num_members).bound(members, recipe.alpha)
    sizes = [with_costs for with_costs, _ in bound.calibrations]
    return Decided(
        SurePolicyModule(members, bound.places, recipe.warm_margin),
        MIN_GAIN,
        bound.regret,
        calibration_figures("sizes", sizes, recipe.alpha),
        [each.least_alpha() for each in sizes],
    )


def _choose_margin(
    members: Sequence[Member], data: TrainingData, recipe: Recipe
) -> tuple[float, float]:
    """(margin, regret) with the smallest validation regret; of equals the largest margin."""
    scored = [
        (data.validation_regret(members, m, is_unanimous=recipe.unanimous), -m)
        for m in recipe.abstain_margins
    ]
    regret, negative_margin = min(scored)
    return -negative_margin, regret
