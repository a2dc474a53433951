"""Learning from recorded steps: d3rlpy's Q learning on our networks, and what draws its batches.

d3rlpy is imported here alone: gym, which it still imports, does not print its notice of retirement,
and PRDC, an algorithm that no recipe has, does not import scikit-learn, seconds of every process.

The loss is a Huber loss in z = log(-Q), less beta x H(softmax(-z)) over the allowed actions
(entropy: Mnih et al. 2016, section 4; Pensieve section 4.2), so that predictions do not part before
the data says so. Behaviour cloning has the cross entropy of -z with the actions taken.

N steps, E episodes, B rows of a batch, A actions.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional

from dynamiccl.datasets.costs import NUM_CELLS
from dynamiccl.datasets.history import Float32Array
from dynamiccl.datasets.steps import Int64Array, Steps
from dynamiccl.errors import UnknownName
from dynamiccl.train.data import TrainingData
from dynamiccl.train.loop import Loop, Source
from dynamiccl.train.networks import (
    MASKED_Q,
    Z_MAX,
    Z_MIN,
    ActionHead,
    ActionInputs,
    Imitator,
    Network,
    Trunk,
    make_head,
    set_scaling,
)
from dynamiccl.train.recipe import Recipe, recipe_of_file

if find_spec("gym_notices") is not None:
    from gym_notices import notices

    notices.notices.clear()
for _name in ("prdc", "torch.prdc_impl"):
    sys.modules.setdefault(f"d3rlpy.algos.qlearning.{_name}", ModuleType(_name))

import d3rlpy
from d3rlpy.dataset import TransitionMiniBatch
from d3rlpy.models import EncoderFactory, QFunctionFactory
from d3rlpy.models.torch import DiscreteQFunctionForwarder, Encoder
from d3rlpy.models.torch.q_functions.utility import compute_reduce
from d3rlpy.optimizers import AdamFactory
from d3rlpy.optimizers.lr_schedulers import CosineAnnealingLRFactory


class _TrunkForD3rlpy(Encoder):
    """Takes the tuple (window_BKW, context_BF, mask_BA)."""

    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, x: Any) -> torch.Tensor:
        return self.trunk(x[0], x[1])  # type: ignore[no-any-return]


@dataclass()
class _Trunks(EncoderFactory):
    recipe: Recipe

    def create(self, observation_shape: Any) -> _TrunkForD3rlpy:
        window, context, _ = observation_shape
        sizes, encoder = self.recipe.hidden_sizes, self.recipe.window_encoder
        return _TrunkForD3rlpy(Trunk(window, int(context[0]), sizes, encoder))


@dataclass(kw_only=True)
class Networks(QFunctionFactory):
    """Makes a recipe's networks for d3rlpy, and their losses."""

    share_encoder: bool = False
    recipe: Recipe
    #: For a head with actions as inputs; None: one output each.
    actions: ActionInputs | None = None
    #: Beta, which the training loop lowers.
    entropy_weight: float = 0.0

    def create_discrete(
        self, encoder: Any, hidden_size: int, action_size: int
    ) -> tuple[Network, "Loss"]:
        """A network, and its loss."""
        trunk = encoder.trunk
        if self.recipe.algorithm == "DiscreteBC":
            imitator = Imitator(trunk, hidden_size, action_size, self.actions)
            return imitator, ImitationLoss(imitator, self)
        head = make_head(hidden_size, action_size, self.actions, dueling=self.recipe.dueling)
        network = Network(trunk, head)
        return network, Loss(network, self)


class Loss(DiscreteQFunctionForwarder):
    """Huber loss in z to the target, minus entropy."""

    def __init__(self, network: Network, made_by: Networks) -> None:
        self.network, self.made_by = network, made_by

    def compute_expected_q(self, x: Any) -> torch.Tensor:
        """Q values (B, A), masked actions at MASKED_Q."""
        window_BKW, context_BF, mask_BA = x
        if not bool(mask_BA.any()):  # nothing follows a batch of one-step episodes
            return torch.full_like(mask_BA, MASKED_Q)
        q_BA = -torch.exp(self.network(window_BKW, context_BF).clamp(Z_MIN, Z_MAX))
        return q_BA.masked_fill(mask_BA < 0.5, MASKED_Q)

    def compute_error(  # noqa: PLR0913, PLR0917 - the signature is d3rlpy's
        self,
        observations: Any,
        actions: torch.Tensor,
        rewards: torch.Tensor,
        target: torch.Tensor,
        terminals: torch.Tensor,
        gamma: float | torch.Tensor = 0.99,
        reduction: str = "mean",
    ) -> torch.Tensor:
        """Of the taken actions against the target r + gamma * Q'."""
        window_BKW, context_BF, mask_BA = observations
        action_B1, beta = actions.long().view(-1, 1), self.made_by.entropy_weight
        hidden_BH, head = self.network.trunk(window_BKW, context_BF), self.network.head
        if beta > 0.0 or not isinstance(head, ActionHead):
            z_BA = head(hidden_BH, context_BF)
            z_B1 = z_BA.gather(1, action_B1)
        else:
            z_B1 = head.taken(hidden_BH, context_BF, action_B1)
        y_B1 = rewards + gamma * target * (1 - terminals)
        wanted_B1 = torch.log((-y_B1).clamp_min(1e-3)).clamp(Z_MIN, Z_MAX)
        loss = functional.smooth_l1_loss(z_B1, wanted_B1, beta=0.1, reduction="none")
        if beta > 0.0:
            loss = loss - beta * entropy(z_BA, mask_BA)
        return cast(torch.Tensor, compute_reduce(loss, reduction))

    def compute_target(self, x: Any, action: torch.Tensor | None = None) -> torch.Tensor:
        """Q of an action (B, 1), or of all (B, A)."""
        q_BA = self.compute_expected_q(x)
        return q_BA if action is None else q_BA.gather(1, action.long().view(-1, 1))

    def set_q_func(self, q_func: Any) -> None:
        """Replace the network, as d3rlpy does for distributed training."""
        self.network = q_func


class ImitationLoss(Loss):
    """Cross entropy of logits with the actions taken."""

    def compute_error(self, observations: Any, actions: torch.Tensor, *_: Any, **how: Any) -> Any:
        """Loss of the taken actions."""
        window_BKW, context_BF, mask_BA = observations
        imitator = cast(Imitator, self.network)
        hidden_BH = imitator.trunk(window_BKW, context_BF)
        logits_BA = Categorical(logits=imitator.logits(hidden_BH, context_BF, mask_BA)).logits
        log_BA = torch.log_softmax(logits_BA, dim=1)
        loss = -log_BA.gather(1, actions.long().view(-1, 1))
        return compute_reduce(loss, how.get("reduction", "mean"))


def entropy(z_BA: torch.Tensor, mask_BA: torch.Tensor) -> torch.Tensor:
    """H (B, 1) in nats of softmax(-z) over allowed actions; 0 where none is."""
    log_BA = torch.log_softmax((-z_BA).masked_fill(mask_BA < 0.5, MASKED_Q), dim=1)
    terms_BA = (log_BA.exp() * log_BA).masked_fill(mask_BA < 0.5, 0.0)
    return -terms_BA.sum(dim=1, keepdim=True)


#: Behaviour cloning is a loss of ours under d3rlpy's double DQN.
ALGORITHMS: Final = ("DoubleDQN", "DiscreteCQL", "DiscreteBC")


def make_algorithm(recipe: Recipe, *sources: Steps, actions: ActionInputs | None = None) -> Any:
    """A recipe's d3rlpy algorithm for `sources` of the same shapes and actions.

    Raises UnknownName for an algorithm or window encoder, and as `recipe_of_file`.
    """
    if recipe.source:  # a run that goes on has not read it yet
        recipe_of_file(Path(recipe.source))
    if recipe.algorithm not in ALGORITHMS:
        raise UnknownName("algorithm", recipe.algorithm, ALGORITHMS)
    schedule = CosineAnnealingLRFactory(T_max=recipe.steps)
    common: dict[str, Any] = {
        "batch_size": recipe.batch_size,
        "gamma": recipe.gamma,
        "learning_rate": recipe.learning_rate,
        "optim_factory": AdamFactory(lr_scheduler_factory=schedule),
        "encoder_factory": _Trunks(recipe),
        "q_func_factory": Networks(recipe=recipe, actions=actions),
        "n_critics": recipe.num_members,
        "target_update_interval": recipe.target_update_interval,
    }
    config: Any = d3rlpy.algos.DoubleDQNConfig(**common)
    if recipe.algorithm == "DiscreteCQL":
        config = d3rlpy.algos.DiscreteCQLConfig(**common, alpha=recipe.conservative_weight)
    algorithm = config.create(device="cpu:0")
    algorithm.create_impl(sources[0].shapes, sources[0].mask.shape[1])
    modules = algorithm.impl.modules
    networks = [*modules.q_funcs, *modules.targ_q_funcs]
    set_scaling(networks, sources)
    return algorithm


class GradientSteps(Source):
    """Gradient steps of a d3rlpy algorithm."""

    def __init__(self, algorithm: Any, batches: "Batches", recipe: Recipe) -> None:
        self._algorithm, self._batches, self._recipe = algorithm, batches, recipe
        self.members = algorithm.impl.q_function

    def update(self, step: int) -> dict[str, float]:
        """One gradient step on a batch."""
        networks = self._algorithm.config.q_func_factory
        networks.entropy_weight = self._recipe.entropy_weight(step)
        return {"loss": float(self._algorithm.update(self._batches.sample())["loss"])}

    def state(self) -> dict[str, Any]:
        """Networks, optimizers, and generators."""
        modules = self._algorithm.impl._checkpointer.modules
        return {
            "modules": {name: module.state_dict() for name, module in modules.items()},
            "grad_step": self._algorithm._grad_step,
            "replay_random": self._batches.random.bit_generator.state,
            "torch_random": torch.get_rng_state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """As if it had not been interrupted."""
        for name, module in self._algorithm.impl._checkpointer.modules.items():
            module.load_state_dict(state["modules"][name])
        self._algorithm._grad_step = state["grad_step"]
        self._batches.random.bit_generator.state = state["replay_random"]
        torch.set_rng_state(state["torch_random"])


def make_loop(data: TrainingData, recipe: Recipe, seed: int, actions: ActionInputs | None) -> Loop:
    """The loop of a recipe; half of a batch are calls of jobs, where there are any."""
    sources = data.sources(recipe)
    algorithm = make_algorithm(recipe, *sources, actions=actions)
    generator = np.random.default_rng(seed)
    part = recipe.batch_size // len(sources)
    replays = [Replay(steps, part, recipe, generator) for steps in sources]
    dropout = 0.0 if actions is None else recipe.cost_dropout
    batches = Batches(replays, data.cost_start, dropout)
    margin = recipe.abstain_margins[0]

    def validate(members: nn.ModuleList) -> dict[str, float]:
        networks, is_unanimous = cast(Iterable[Network], members), recipe.unanimous
        regret = data.validation_regret(networks, margin, is_unanimous=is_unanimous)
        return {"validation_regret": regret}

    return Loop(GradientSteps(algorithm, batches, recipe), recipe, validate)


class Replay:
    """Draws batches of n-step transitions from columns, faster than d3rlpy's buffer.

    As `MultiStepTransitionPicker` (2.8.1) gives them. The next observation of a step that ends its
    episode is all zero, mask included.
    """

    def __init__(
        self, steps: Steps, batch_size: int, recipe: Recipe, random: np.random.Generator
    ) -> None:
        """Weigh steps by the size of their task's group to the power of -`balance`."""
        self.steps, self.random = steps, random
        self._batch_size, self._recipe = batch_size, recipe
        group = steps.group[steps.task]
        choosable = steps.choosable.astype(np.float64)
        sizes = np.bincount(group, weights=choosable).clip(1.0)
        self._weight = sizes[group] ** -recipe.balance
        self._share = choosable * self._weight
        self._cumulative = np.cumsum(self._share)
        self._is_uniform = bool(steps.terminated.all()) and np.ptp(self._weight) == 0.0
        self._last = int(np.searchsorted(self._cumulative, self._cumulative[-1]))
        if not self._cumulative[-1] > 0:
            raise ValueError("no step leads anywhere: every episode is cut off after its first")

    def sample(self) -> TransitionMiniBatch:
        """A batch, sorted by step: neighbours are adjacent in memory."""
        drawn = self.random.random(self._batch_size)
        drawn.sort()
        if self._is_uniform:
            rows = (drawn * len(self.steps)).astype(np.int64)
            return self.batch(rows, self.steps.episode_of(rows))
        drawn *= self._cumulative[-1]
        episode = np.minimum(np.searchsorted(self._cumulative, drawn, side="right"), self._last)
        into = drawn - (self._cumulative[episode] - self._share[episode])
        offset = np.minimum(
            (into / self._weight[episode]).astype(np.int64), self.steps.choosable[episode] - 1
        )
        return self.batch(self.steps.starts[episode] + np.maximum(offset, 0), episode)

    def batch(self, rows: Int64Array, episode: Int64Array) -> TransitionMiniBatch:
        """Transitions that begin with `rows` of the episodes `episode`."""
        steps = self.steps
        following, ends = steps.advance(rows, episode, self._recipe.num_steps)
        rewards = steps.discounted(rows, following, self._recipe.gamma)
        parts = _parts(steps, rows, episode)
        if ends.all():
            next_parts = [np.zeros_like(part) for part in parts]
            next_actions = np.zeros((len(rows), 1), dtype=np.float32)
        else:
            stands_in = following - ends
            next_parts = _parts(steps, stands_in, episode)
            next_actions = _column(steps.action[stands_in])
            for part in (*next_parts, next_actions):
                part[ends] = 0.0
        return TransitionMiniBatch(
            observations=parts,
            actions=_column(steps.action[rows]),
            rewards=_column(rewards),
            next_observations=next_parts,
            next_actions=next_actions,
            terminals=_column(ends),
            intervals=_column(following - rows),
            transitions=[],
        )


class Batches:
    """Equal parts of each replay; NCCL's costs are hidden from a share of the rows."""

    def __init__(self, replays: Sequence[Replay], cost_start: int = 0, share: float = 0.0) -> None:
        self.random = replays[0].random
        self._replays, self._share = replays, share
        self._costs = slice(cost_start, cost_start + NUM_CELLS)

    def sample(self) -> TransitionMiniBatch:
        """One batch, concatenated."""
        parts = [replay.sample() for replay in self._replays]
        batch = parts[0] if len(parts) == 1 else _joined(parts)
        if self._share > 0.0:
            hidden = np.flatnonzero(self.random.random(len(batch.actions)) < self._share)
            for _, context, _ in (batch.observations, batch.next_observations):
                context[hidden, self._costs] = 0.0
        return batch


def _joined(parts: Sequence[TransitionMiniBatch]) -> TransitionMiniBatch:
    joined: dict[str, Any] = {"transitions": []}
    for name in {each.name for each in fields(TransitionMiniBatch)} - {"transitions"}:
        values = [getattr(part, name) for part in parts]
        if name in {"observations", "next_observations"}:
            joined[name] = [np.concatenate(each) for each in zip(*values, strict=True)]
        else:
            joined[name] = np.concatenate(values)
    return TransitionMiniBatch(**joined)


def _parts(steps: Steps, rows: Int64Array, episode: Int64Array) -> list[Float32Array]:
    found, mask, _ = steps.observe(rows, episode)
    return [found.window, found.context, mask]


def _column(values: npt.ArrayLike) -> Float32Array:
    return np.array(values, dtype=np.float32)[:, None]
