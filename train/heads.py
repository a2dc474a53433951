"""Heads over an encoder's features: predicted log time of every action.

    B batch, H hidden size, F features of the context, A actions, C cells of NCCL's cost table,
    G action features, U units

Rewards are -time/reference, always negative and spread over two orders of magnitude: a bad protocol
is 50 times slower, and what has to be told apart is 2 %. The head therefore predicts z = log(-Q),
the log of time over reference, and the loss is taken in z (a value rescaling as in Pohlen et al.
2018, "Observe and Look Further", section 3.2); Q = -exp(z) itself stays the plain reward.

Dueling (Wang et al. 2016, section 3): z_a = V + A_a - A_0. The advantage is anchored at action 0
instead of at the mean, so V is the value of abstaining, an advantage is relative to NCCL's own
choice, and no Q value depends on which other actions the mask allows.

With actions as inputs (`ActionHead`), configs share what is learned of them: a channel count that
was rarely tried is near its neighbours, and a cell is what NCCL's own cost model says of it, give
or take:

    z_a = V(task) + n(task, a) + c_a  -  (n(task, 0) + c_0)

with c the logarithm of NCCL's own cost where it is known, so that the network learns how far that
is off; or 0 (data.py). A cell that NCCL does not take, where its costs are known, is no choice.

Entropy (A3C, Mnih et al. 2016, section 4; Pensieve section 4.2): the loss is lowered by
beta x H(softmax(-z)) over the allowed actions, so that predictions do not part before the data says
so. An imitator has no times: its logits stand in for -z.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, cast

import torch
from d3rlpy.models import QFunctionFactory
from d3rlpy.models.q_functions import register_q_func_factory
from d3rlpy.models.torch import (
    CategoricalPolicy,
    DiscreteQFunction,
    DiscreteQFunctionForwarder,
    Encoder,
)
from d3rlpy.models.torch.q_functions.base import QFunctionOutput
from d3rlpy.models.torch.q_functions.utility import compute_reduce
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.features import CONTEXT_COLUMN, NUM_CELLS
from dynamiccl.nccl import NUM_ALGORITHMS, NUM_PROTOCOLS, Config

#: Features of an action, in order.
ACTION_FEATURES: Final = (
    *(f"algorithm {number}" for number in range(NUM_ALGORITHMS)),
    *(f"protocol {number}" for number in range(NUM_PROTOCOLS)),
    "is NCCL's own choice",
    "channels are asked for",
    "log2 channels, 0 unless asked for",
    "log2 bytes of a channel, 0 unless channels are asked for",
    "chunk is asked for",
    "log2 chunk bytes, 0 unless asked for",
    "cost is known",
    "ln of NCCL's cost in us, 0 = unknown",
    "the same over NCCL's cheapest cell",
    "how many cells NCCL takes for cheaper",
)
#: Where it stands whether the cost is known, and ln of it.
COST_KNOWN: Final = ACTION_FEATURES.index("cost is known")
LOG_COST: Final = ACTION_FEATURES.index("ln of NCCL's cost in us, 0 = unknown")


class ActionFeatures(nn.Module):
    """(context_BF) -> (B, A, G): ACTION_FEATURES of every action of a catalogue."""

    is_compatible: torch.Tensor
    knobs: torch.Tensor
    channels: torch.Tensor

    def __init__(self, configs: Sequence[Config], cost_start: int) -> None:
        """`cost_start`: the context column where NCCL's costs begin; -1 = none."""
        super().__init__()
        self.cost_start = cost_start
        self.num_cells = NUM_CELLS
        self.num_protocols = NUM_PROTOCOLS
        self.num_algorithms = NUM_ALGORITHMS
        self.log2_size = CONTEXT_COLUMN["log2_size"]
        compatible = [
            [
                config.algorithm in {None, cell // NUM_PROTOCOLS}
                and config.protocol in {None, cell % NUM_PROTOCOLS}
                for cell in range(NUM_CELLS)
            ]
            for config in configs
        ]
        self.register_buffer("is_compatible", torch.tensor(compatible))  # (A, C)
        self.register_buffer("knobs", torch.tensor([_knobs(config) for config in configs]))
        asked = [
            [float(config.num_channels or 0), float(config.chunk_bytes or 0)] for config in configs
        ]
        numbers = torch.tensor(asked)
        log2_AN = torch.log2(numbers.clamp(min=1.0))
        own_A1 = torch.zeros(len(configs), 1)
        own_A1[ABSTAIN_ACTION] = 1.0
        # (A, 5): own choice, channels asked, log2 channels, chunk asked, log2 chunk
        flags = (numbers > 0.0).to(torch.float32)
        told = [own_A1, flags[:, :1], log2_AN[:, :1], flags[:, 1:], log2_AN[:, 1:]]
        self.register_buffer("channels", torch.cat(told, dim=1))

    def forward(self, context_BF: torch.Tensor) -> torch.Tensor:
        """The action features (B, A, G)."""
        batch, actions = context_BF.size(0), self.knobs.size(0)
        told_BA5 = self.channels.unsqueeze(0).expand(batch, actions, 5)
        cells_BAK = self.knobs.unsqueeze(0).expand(batch, actions, self.knobs.size(1))
        return self.told(context_BF, told_BA5, cells_BAK, self.is_compatible.unsqueeze(0))

    def some(self, context_BF: torch.Tensor, action_BA: torch.Tensor) -> torch.Tensor:
        """The features of chosen actions (B, A) for each context."""
        told_BA5, cells_BAK = self.channels[action_BA], self.knobs[action_BA]
        return self.told(context_BF, told_BA5, cells_BAK, self.is_compatible[action_BA])

    def told(
        self,
        context_BF: torch.Tensor,
        told_BA5: torch.Tensor,
        cells_BAK: torch.Tensor,
        is_compatible_BAC: torch.Tensor,
    ) -> torch.Tensor:
        """Features (B, A, G) of actions given by their rows of the catalogue's tables."""
        batch, actions = told_BA5.size(0), told_BA5.size(1)
        size_B11 = context_BF[:, self.log2_size].view(-1, 1, 1)
        lane_BA1 = (size_B11 - told_BA5[:, :, 2:3]) * told_BA5[:, :, 1:2]
        cost_BA4 = torch.zeros(batch, actions, 4, dtype=context_BF.dtype)
        if self.cost_start >= 0:
            log_BC = context_BF[:, self.cost_start : self.cost_start + self.num_cells]
            log_BC = torch.where(log_BC == 0.0, torch.full_like(log_BC, float("inf")), log_BC)
            open_BAC = torch.where(is_compatible_BAC, log_BC.unsqueeze(1), float("inf"))
            least_BA, cell_BA = open_BAC.min(dim=2)
            known_BA = torch.isfinite(least_BA)
            cheapest_B1 = log_BC.min(dim=1, keepdim=True)[0]
            over_BA = torch.where(known_BA, least_BA - cheapest_B1, torch.zeros_like(least_BA))
            rank_BA = (log_BC.unsqueeze(1) < least_BA.unsqueeze(2)).sum(dim=2)
            rank_BA = torch.where(known_BA, rank_BA, torch.zeros_like(rank_BA))
            log_BA = torch.where(known_BA, least_BA, torch.zeros_like(least_BA))
            parts = [known_BA.to(log_BA.dtype), log_BA, over_BA, rank_BA.to(log_BA.dtype)]
            cost_BA4 = torch.stack(parts, dim=2)
            # What is left to NCCL is the cell that it takes.
            algorithm_BA = torch.div(cell_BA, self.num_protocols, rounding_mode="floor")
            ran = [
                nn.functional.one_hot(algorithm_BA, self.num_algorithms),
                nn.functional.one_hot(cell_BA % self.num_protocols, self.num_protocols),
            ]
            ran_BAK = torch.cat(ran, dim=2).to(cells_BAK.dtype)
            cells_BAK = torch.where(known_BA.unsqueeze(2), ran_BAK, cells_BAK)
        parts_BA = [
            cells_BAK,
            told_BA5[:, :, :3],
            lane_BA1,
            told_BA5[:, :, 3:],
            cost_BA4,
        ]
        return torch.cat(parts_BA, dim=2)


def _knobs(config: Config) -> list[float]:
    """One-hot algorithm and protocol; zeros for a knob left to NCCL."""
    algorithm = [float(config.algorithm == number) for number in range(NUM_ALGORITHMS)]
    return algorithm + [float(config.protocol == number) for number in range(NUM_PROTOCOLS)]


#: Width of the layer in which task and action meet.
UNITS: Final = 64
#: ln of a time over that of NCCL's choice that is never the least.
_WORST: Final = 8.0
#: Sharpness of a head of times, from z to log odds: a config that is predicted to be 3 % slower is
#: taken 1 / e times as often. An actor's own head has log odds, and a sharpness of 1.
SHARPNESS: Final = 1.0 / 0.03


@dataclass(frozen=True, slots=True)
class ActionInputs:
    """A catalogue, and the context column where NCCL's costs begin (-1: none)."""

    configs: Sequence[Config]
    cost_start: int
    #: Whether the costs are what is expected of a time, or features alone.
    uses_cost: bool

    def to_json(self) -> list[Any]:
        """Plain data, stored in d3rlpy's files."""
        return [Catalogue(tuple(self.configs)).to_json(), self.cost_start, self.uses_cost]

    @classmethod
    def from_json(cls, told: Sequence[Any]) -> Self:
        """The inverse of `to_json`."""
        catalogue, cost_start, uses_cost = told
        return cls(Catalogue.from_json(catalogue).configs, int(cost_start), bool(uses_cost))


class ActionHead(nn.Module):
    """(hidden_BH, context_BF) -> z (B, A); see the module."""

    scale: torch.Tensor

    def __init__(self, hidden_size: int, inputs: ActionInputs) -> None:
        """Lay out the layers."""
        super().__init__()
        self.features = ActionFeatures(inputs.configs, inputs.cost_start)
        self.task = nn.Linear(hidden_size, UNITS)
        self.action = nn.Linear(len(ACTION_FEATURES), UNITS, bias=False)
        self.gate = nn.Linear(len(ACTION_FEATURES), UNITS)
        self.out = nn.Linear(UNITS, 1)
        self.value = nn.Linear(hidden_size, 1)
        self.uses_cost = inputs.uses_cost
        self.sharpness = SHARPNESS
        self.log_cost = LOG_COST
        self.cost_known = COST_KNOWN
        self.worst = _WORST
        # Logarithms and ranks become about 1; flags are.
        is_number = [("log2" in name or "ln " in name or "over" in name or "many" in name)
                     for name in ACTION_FEATURES]  # fmt: skip
        self.register_buffer("scale", torch.tensor([0.1 if each else 1.0 for each in is_number]))

    def forward(self, hidden_BH: torch.Tensor, context_BF: torch.Tensor) -> torch.Tensor:
        """Z (B, A)."""
        return self.of_features(hidden_BH, self.features(context_BF))

    def taken(
        self, hidden_BH: torch.Tensor, context_BF: torch.Tensor, action_B1: torch.Tensor
    ) -> torch.Tensor:
        """Z (B, 1) of one action each, cheaper than all actions of `forward`."""
        both_B2 = torch.cat([torch.zeros_like(action_B1), action_B1], dim=1)
        return self.of_features(hidden_BH, self.features.some(context_BF, both_B2))[:, 1:]

    def of_features(self, hidden_BH: torch.Tensor, found_BAG: torch.Tensor) -> torch.Tensor:
        """Z (B, A) of actions given by their features; the first is ABSTAIN."""
        scaled_BAG = found_BAG * self.scale
        # What a config makes of the task: each has a mixture of the same units, gated by its own.
        met_BAU = self.task(hidden_BH).unsqueeze(1) * (1.0 + self.gate(scaled_BAG))
        met_BAU = met_BAU + self.action(scaled_BAG)
        z_BA = self.out(nn.functional.silu(met_BAU)).squeeze(2)
        known_BA = found_BAG[:, :, self.cost_known] > 0.5
        if self.uses_cost:
            z_BA = z_BA + found_BAG[:, :, self.log_cost]
        z_BA = self.value(hidden_BH) + z_BA - z_BA[:, :1]
        return z_BA.masked_fill(known_BA[:, :1] & ~known_BA, self.worst)  # type: ignore[no-any-return]


#: Q of a masked action. Finite: a terminal row's mask is all zero, and inf * 0 would be NaN.
MASKED_Q: Final = -1e6
#: Bounds of z: time between 1/400 and 3000 times the reference.
Z_MIN: Final = -6.0
Z_MAX: Final = 8.0


class LogTimeHead(nn.Module):
    """Dueling head of value and advantages."""

    def __init__(self, hidden_size: int, action_size: int) -> None:
        """Lay out both heads."""
        super().__init__()
        self.value = nn.Linear(hidden_size, 1)
        self.advantage = nn.Linear(hidden_size, action_size)
        self.sharpness = SHARPNESS

    def forward(self, hidden_BH: torch.Tensor, context_BF: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Z (B, A): predicted log of time over reference."""
        advantage_BA = self.advantage(hidden_BH)
        return self.value(hidden_BH) + advantage_BA - advantage_BA[:, 0:1]  # type: ignore[no-any-return]


class PlainHead(nn.Module):
    """Z of every action, without dueling."""

    def __init__(self, hidden_size: int, action_size: int) -> None:
        """Lay out the layer."""
        super().__init__()
        self.layer = nn.Linear(hidden_size, action_size)
        self.sharpness = SHARPNESS

    def forward(self, hidden_BH: torch.Tensor, context_BF: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Z (B, A)."""
        return self.layer(hidden_BH)  # type: ignore[no-any-return]


#: What is put on an encoder.
Head = LogTimeHead | PlainHead | ActionHead


class LogTimeQFunction(DiscreteQFunction):
    """A Q function whose head predicts log time; see the module's docstring."""

    def __init__(self, encoder: Encoder, head: Head) -> None:
        """Put a head on `encoder`."""
        super().__init__()
        self._encoder = encoder
        self.head = head
        #: Weight beta of the entropy; the training loop lowers it.
        self.entropy_weight = 0.0

    def log_time(self, observation: Any) -> torch.Tensor:
        """Z (B, A): ln(time / reference), mask not applied."""
        return cast(torch.Tensor, self.head(self._encoder(observation), observation[1]))

    def log_time_of(self, observation: Any, action_B1: torch.Tensor) -> torch.Tensor:
        """Z (B, 1) of one action each."""
        if isinstance(self.head, ActionHead):
            return self.head.taken(self._encoder(observation), observation[1], action_B1)
        return self.log_time(observation).gather(1, action_B1)

    def forward(self, x: Any) -> QFunctionOutput:
        """Q values (B, A), masked actions at MASKED_Q."""
        if not bool(x[2].any()):  # nothing follows a batch of one-step episodes
            return QFunctionOutput(torch.full_like(x[2], MASKED_Q), quantiles=None, taus=None)
        q_BA = -torch.exp(self.log_time(x).clamp(Z_MIN, Z_MAX))
        q_BA = q_BA.masked_fill(x[2] < 0.5, MASKED_Q)
        return QFunctionOutput(q_value=q_BA, quantiles=None, taus=None)

    @property
    def encoder(self) -> Encoder:
        """The encoder under the head."""
        return self._encoder


class LogTimeForwarder(DiscreteQFunctionForwarder):
    """Q values, and the loss: Huber in z between prediction and target, minus entropy."""

    def __init__(self, q_func: LogTimeQFunction) -> None:
        """Wrap one Q function."""
        self._q_func = q_func

    def compute_expected_q(self, x: Any) -> torch.Tensor:
        """Q values (B, A)."""
        return cast(torch.Tensor, self._q_func(x).q_value)

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
        """Loss of the taken actions against the target r + gamma * Q'."""
        action_B1 = actions.long().view(-1, 1)
        if self._q_func.entropy_weight > 0.0:
            z_BA = self._q_func.log_time(observations)
            z_B1 = z_BA.gather(1, action_B1)
        else:
            z_B1 = self._q_func.log_time_of(observations, action_B1)
        y_B1 = rewards + gamma * target * (1 - terminals)
        wanted_B1 = torch.log((-y_B1).clamp_min(1e-3)).clamp(Z_MIN, Z_MAX)
        loss = functional.smooth_l1_loss(z_B1, wanted_B1, beta=0.1, reduction="none")
        if self._q_func.entropy_weight > 0.0:
            loss = loss - self._q_func.entropy_weight * entropy(z_BA, observations[2])
        return cast(torch.Tensor, compute_reduce(loss, reduction))

    def compute_target(self, x: Any, action: torch.Tensor | None = None) -> torch.Tensor:
        """Q of an action (B, 1), or of all actions (B, A) when none is given."""
        q_BA = cast(torch.Tensor, self._q_func(x).q_value)
        if action is None:
            return q_BA
        return q_BA.gather(1, action.long().view(-1, 1))

    def set_q_func(self, q_func: DiscreteQFunction) -> None:
        """Replace the Q function (d3rlpy wraps it for distributed training)."""
        self._q_func = cast(LogTimeQFunction, q_func)


def entropy(z_BA: torch.Tensor, mask_BA: torch.Tensor) -> torch.Tensor:
    """H (B, 1) in nats of softmax(-z) over the allowed actions; 0 where none is."""
    log_BA = torch.log_softmax((-z_BA).masked_fill(mask_BA < 0.5, MASKED_Q), dim=1)
    terms_BA = (log_BA.exp() * log_BA).masked_fill(mask_BA < 0.5, 0.0)
    return -terms_BA.sum(dim=1, keepdim=True)


@dataclass()
class LogTimeFactory(QFunctionFactory):
    """Makes the Q functions for d3rlpy."""

    share_encoder: bool = False
    dueling: bool = True
    #: `ActionInputs` as plain data, for a head with actions as its inputs; None: one output each.
    actions: list[Any] | None = None

    def create_discrete(
        self, encoder: Encoder, hidden_size: int, action_size: int
    ) -> tuple[LogTimeQFunction, LogTimeForwarder]:
        """A Q function over discrete actions and its forwarder."""
        head: Head
        if self.actions is not None:
            head = ActionHead(hidden_size, ActionInputs.from_json(self.actions))
        else:
            head = (LogTimeHead if self.dueling else PlainHead)(hidden_size, action_size)
        q_func = LogTimeQFunction(encoder, head)
        return q_func, LogTimeForwarder(q_func)

    def create_continuous(self, *_: Any) -> Any:
        """Not supported: our actions are indices of a catalogue."""
        raise TypeError("DynamICCL's actions are discrete")

    @staticmethod
    def get_type() -> str:
        """The type name in a saved d3rlpy file."""
        return "dynamiccl_log_time"


class Imitator(CategoricalPolicy):
    """Network of behaviour cloning, and actor: logits of the allowed actions."""

    def __init__(
        self,
        encoder: Encoder,
        hidden_size: int,
        action_size: int,
        actions: ActionInputs | None = None,
    ) -> None:
        """Put a head on `encoder`; `actions` is for a head with action features."""
        super().__init__(encoder, hidden_size, action_size)
        del self._fc
        self.head: Head
        if actions is not None:
            self.head = ActionHead(hidden_size, actions)
        else:
            self.head = PlainHead(hidden_size, action_size)
        self.head.sharpness = 1.0

    def forward(self, x: Any) -> Categorical:
        """The distribution over actions."""
        return Categorical(logits=self.logits(self._encoder(x), x[1], x[2]))

    def logits(
        self, hidden_BH: torch.Tensor, context_BF: torch.Tensor, mask_BA: torch.Tensor
    ) -> torch.Tensor:
        """Logits (B, A), those of masked actions at MASKED_Q."""
        z_BA = self.head.sharpness * self.head(hidden_BH, context_BF)
        return -z_BA.masked_fill(mask_BA < 0.5, -MASKED_Q)  # type: ignore[no-any-return]

    @property
    def encoder(self) -> Encoder:
        """The encoder under the head."""
        return self._encoder


#: A network that gives every action a z, the least being the best.
Member = LogTimeQFunction | Imitator

register_q_func_factory(LogTimeFactory)
