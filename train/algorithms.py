"""Builds the d3rlpy algorithm of a recipe; networks' input scaling and first weights.

A Q network predicts z = ln(time / reference), and an actor's logits are -z by its head's sharpness:
so weights can be copied from one to the other (`begin_with`), and what one prefers the other
prefers. Relevant differences in z are of the order of 0.01, for which a softmax is nearly uniform:
so an actor that begins with a Q network has its sharpness, and a Q network that begins with an
actor has its z scaled down.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import d3rlpy
import numpy as np
import torch
from d3rlpy.algos import DiscreteBC, DiscreteBCConfig
from d3rlpy.algos.qlearning.torch.bc_impl import DiscreteBCImpl, DiscreteBCModules
from d3rlpy.base import register_learnable
from d3rlpy.models.torch import Encoder
from d3rlpy.models.torch.encoders import compute_output_size
from d3rlpy.optimizers import AdamFactory
from d3rlpy.optimizers.lr_schedulers import CosineAnnealingLRFactory
from torch import nn

from dynamiccl.datasets.features import Observations
from dynamiccl.datasets.history import WINDOW_COLUMN, Float32Array
from dynamiccl.datasets.manifest import POLICY_NAME, find_policy_in
from dynamiccl.datasets.steps import Steps
from dynamiccl.errors import MissingPath, UnknownName, UserError
from dynamiccl.train.encoders import ObservationEncoder, ObservationEncoderFactory
from dynamiccl.train.heads import (
    SHARPNESS,
    ActionHead,
    ActionInputs,
    Head,
    Imitator,
    LogTimeFactory,
    LogTimeHead,
    LogTimeQFunction,
    Member,
)
from dynamiccl.train.policy import load_script
from dynamiccl.train.recipe import Recipe
from dynamiccl.train.recipes import recipe_of_file

#: Steps from which the scale of the features is taken.
_MAX_SCALED: Final = 200_000


def make_algorithm(recipe: Recipe, *sources: Steps, actions: ActionInputs | None = None) -> Any:
    """The d3rlpy algorithm of a recipe, with networks built and input scaling set.

    `sources` are its training steps, all with the same shapes and actions; `actions` is for a head
    with action features.
    Raises UnknownName when the recipe names an unknown algorithm or window encoder, and as
    `recipe_of_file` when its file is missing or broken.
    """
    if recipe.source:  # a run that goes on has not read it yet
        recipe_of_file(Path(recipe.source))
    if recipe.algorithm not in ALGORITHMS:
        raise UnknownName("algorithm", recipe.algorithm, ALGORITHMS)
    common: dict[str, Any] = {
        "batch_size": recipe.batch_size,
        "gamma": recipe.gamma,
        "learning_rate": recipe.learning_rate,
        "optim_factory": AdamFactory(
            lr_scheduler_factory=CosineAnnealingLRFactory(T_max=recipe.steps)
        ),
        "encoder_factory": ObservationEncoderFactory(
            list(recipe.hidden_sizes), recipe.window_encoder
        ),
    }
    told = None if actions is None else actions.to_json()
    made = ALGORITHMS[recipe.algorithm](recipe, common, told)
    algorithm = made.create(device="cpu:0")
    algorithm.create_impl(sources[0].shapes, sources[0].num_actions)
    networks = [*members_of(algorithm), *_targets(algorithm)]
    set_scaling(networks, sources)
    if recipe.start:
        begin_with(cast(list[Member], networks), Path(recipe.start))
    return algorithm


def members_of(algorithm: Any) -> nn.ModuleList:
    """The online networks of a built algorithm, one for each member of the ensemble."""
    if isinstance(algorithm, MaskedBC):
        return nn.ModuleList([algorithm.impl.modules.imitator])
    return cast(nn.ModuleList, algorithm.impl.q_function)


def set_entropy_weight(algorithm: Any, weight: float) -> None:
    """Set the entropy weight of the loss; no effect on behaviour cloning."""
    for member in members_of(algorithm):
        if isinstance(member, LogTimeQFunction):
            member.entropy_weight = weight


@dataclass()
class MaskedBCConfig(DiscreteBCConfig):
    """Settings of behaviour cloning with action masks."""

    #: `ActionInputs` as plain data, for a head with actions as its inputs.
    actions: list[Any] | None = None

    def create(self, device: Any = False, enable_ddp: bool = False) -> "MaskedBC":
        """Build the algorithm."""
        return MaskedBC(self, device, enable_ddp)

    @staticmethod
    def get_type() -> str:
        """The type name in a saved d3rlpy file."""
        return "dynamiccl_masked_bc"


class MaskedBC(DiscreteBC):
    """d3rlpy's DiscreteBC (2.8.1) with our `Imitator` network."""

    def inner_create_impl(self, observation_shape: Any, action_size: int) -> None:
        """Build the network and its optimizer."""
        encoder: Encoder = self._config.encoder_factory.create(observation_shape)
        hidden_size = compute_output_size([observation_shape], encoder)
        told = self._config.actions
        actions = None if told is None else ActionInputs.from_json(told)
        imitator = Imitator(encoder, hidden_size, action_size, actions).to(self._device)
        optim = self._config.optim_factory.create(
            imitator.named_modules(), lr=self._config.learning_rate, compiled=self.compiled
        )
        self._impl = DiscreteBCImpl(
            observation_shape=observation_shape,
            action_size=action_size,
            modules=DiscreteBCModules(optim=optim, imitator=imitator),
            # Its penalty on large logits would fall on those of masked actions.
            beta=0.0,
            compiled=self.compiled,
            device=self._device,
        )


#: `ActionInputs` as plain data; None for a head with an output for each action.
Told = list[Any] | None


def _double_dqn(recipe: Recipe, common: dict[str, Any], actions: Told) -> Any:
    return d3rlpy.algos.DoubleDQNConfig(**common, **_q_learning(recipe, actions))


def _cql(recipe: Recipe, common: dict[str, Any], actions: Told) -> Any:
    alpha = recipe.conservative_weight
    return d3rlpy.algos.DiscreteCQLConfig(**common, **_q_learning(recipe, actions), alpha=alpha)


def _bc(_: Recipe, common: dict[str, Any], actions: Told) -> Any:
    return MaskedBCConfig(**common, actions=actions)


def _q_learning(recipe: Recipe, actions: Told) -> dict[str, Any]:
    return {
        "n_critics": recipe.num_members,
        "target_update_interval": recipe.target_update_interval,
        "q_func_factory": LogTimeFactory(dueling=recipe.dueling, actions=actions),
    }


#: What a recipe may name.
ALGORITHMS: Final = {"DoubleDQN": _double_dqn, "DiscreteCQL": _cql, "DiscreteBC": _bc}


def set_scaling(networks: Iterable[nn.Module], sources: Sequence[Steps]) -> None:
    """Set the input scaling (mean, spread over `sources`) of the encoder of each network."""
    seen = [_some_observations(steps) for steps in sources]
    context = _scaling(np.concatenate([each.context for each in seen]))
    valid = WINDOW_COLUMN["valid"]
    calls = np.concatenate([each.window[each.window[..., valid] > 0.0] for each in seen])
    mean, scale = _scaling(calls)
    mean[valid], scale[valid] = 0.0, 1.0  # it tells calls from padding and stays as it is
    for network in networks:
        encoder = cast(ObservationEncoder, cast(Member, network).encoder)
        encoder.set_scaling(window=(mean, scale), context=context)


def _scaling(rows: Float32Array) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each column; 0 and 1 without rows."""
    width = rows.shape[1]
    mean, scale = np.zeros(width, dtype=np.float32), np.ones(width, dtype=np.float32)
    if len(rows):
        mean = rows.mean(axis=0)
        spread = rows.std(axis=0)
        # A feature that never varies says nothing, and must not explode where it does at last.
        scale = np.where(spread > 1e-6, spread, 1.0)
    return torch.from_numpy(mean), torch.from_numpy(scale)


def _some_observations(steps: Steps) -> Observations:
    rows = np.arange(len(steps))
    if len(rows) > _MAX_SCALED:
        rows = np.sort(np.random.default_rng(0).choice(len(rows), _MAX_SCALED, replace=False))
    return steps.observe(rows, steps.episode_of(rows))[0]


def _targets(algorithm: Any) -> list[nn.Module]:
    return list(getattr(algorithm.impl.modules, "targ_q_funcs", []))


register_learnable(MaskedBCConfig)


#: In a policy module: the first network of the ensemble.
_MEMBER: Final = "members.0."


def begin_with(networks: Iterable[Member], path: Path) -> None:
    """Initialise encoders and heads with the weights of the first network of a policy.

    Raises MissingPath without a policy, CorruptFile, and UserError for a policy of another form.
    """
    folder = find_policy_in(path)
    if folder is None:
        raise MissingPath("policy", path, "give --set start= the directory of a run of networks")
    module = load_script(folder / POLICY_NAME)
    for network in networks:
        _copy(module, network, path)


def _copy(module: torch.jit.ScriptModule, network: Member, path: Path) -> None:
    found = module.state_dict()
    for name, part in (("trunk", network.encoder.trunk), ("head", network.head)):
        begin = f"{_MEMBER}{name}."
        weights = {k.removeprefix(begin): v for k, v in found.items() if k.startswith(begin)}
        try:
            part.load_state_dict(weights)
        except RuntimeError as error:
            said = str(error).splitlines()[1].strip()
            raise UserError(
                f"the policy at {path} has networks of another form ({said}): it must have been "
                "trained on the same data with the same hidden_sizes, window_encoder, "
                "action_inputs and state_units"
            ) from error
    theirs = getattr(module.members, "0").head
    sharpness = float(getattr(theirs, "sharpness", SHARPNESS))  # older files: of Q networks
    if isinstance(network.head, ActionHead):
        network.head.uses_cost = bool(theirs.uses_cost)
    if isinstance(network, Imitator):
        network.head.sharpness = sharpness
    else:
        _scale(network.head, sharpness / SHARPNESS)


def _scale(head: Head, factor: float) -> None:
    """Multiply differences of z by a factor; what NCCL's costs say of a time stays."""
    if isinstance(head, ActionHead):
        layer = head.out
    else:
        layer = head.advantage if isinstance(head, LogTimeHead) else head.layer
    with torch.no_grad():
        layer.weight.mul_(factor)
        layer.bias.mul_(factor)
