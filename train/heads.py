"""Q heads over an encoder's features: predicted log time of every action.

    B batch, H hidden size, A actions

Rewards are -time/reference, always negative and spread over two orders of magnitude: a bad protocol
is 50 times slower, and what has to be told apart is 2 %. The head therefore predicts z = log(-Q),
the log of time over reference, and the loss is taken in z (a value rescaling as in Pohlen et al.
2018, "Observe and Look Further", section 3.2); Q = -exp(z) itself stays the plain reward.

Dueling (Wang et al. 2016, section 3): z_a = V + A_a - A_0. The advantage is anchored at action 0
instead of at the mean, so V is the value of abstaining, an advantage is relative to NCCL's own
choice, and no Q value depends on which other actions the mask allows.

Entropy (A3C, Mnih et al. 2016, section 4; Pensieve section 4.2): the loss is lowered by
beta x H(softmax(-z)) over the allowed actions, so that predictions do not part before the data says
so. An imitator has no times: its logits stand in for -z.
"""

from dataclasses import dataclass
from typing import Any, Final, cast

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

from dynamiccl.train.action_head import SHARPNESS, ActionHead, ActionInputs

#: Q of a masked action. Finite: a terminal row's mask is all zero, and inf * 0 would be NaN.
MASKED_Q: Final = -1e6
#: Bounds of z: time between 1/400 and 3000 times the reference.
Z_MIN: Final = -6.0
Z_MAX: Final = 8.0


class LogTimeHead(nn.Module):
    """Dueling head of value and advantages; see the module's docstring."""

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
