"""The networks: an encoder of (window, context, mask), and a dueling head in log time.

    B batch, K calls in the window, W features of a call, F features of the context, A actions

Rewards are -time/reference, always negative and spread over two orders of magnitude: a bad protocol
is 50 times slower, and what has to be told apart is 2 %. The head therefore predicts z = log(-Q),
the log of time over reference, and the loss is taken in z (a value rescaling as in Pohlen et al.
2018, "Observe and Look Further", section 3.2); Q = -exp(z) itself stays the plain reward.

Dueling (Wang et al. 2016, section 3): z_a = V + A_a - A_0. The advantage is anchored at action 0
instead of at the mean, so V is the value of abstaining, an advantage is relative to NCCL's own
choice, and no Q value depends on which other actions the mask allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from d3rlpy.models import EncoderFactory, QFunctionFactory, register_encoder_factory
from d3rlpy.models.q_functions import register_q_func_factory
from d3rlpy.models.torch import DiscreteQFunction, DiscreteQFunctionForwarder, Encoder
from d3rlpy.models.torch.q_functions.base import QFunctionOutput
from d3rlpy.models.torch.q_functions.utility import compute_reduce
from torch import nn
from torch.nn import functional

#: Wavelengths of `SizeWaves`, in octaves of message size.
WAVE_OCTAVES: Final = (8.0, 16.0, 32.0)
#: Q of a masked action. Finite: a terminal row's mask is all zero, and inf * 0 would be NaN.
MASKED_Q: Final = -1e6
#: Bounds of z: time between 1/400 and 3000 times the reference.
Z_MIN: Final = -6.0
Z_MAX: Final = 8.0


class SizeWaves(nn.Module):
    """Sines and cosines of log2 size, so that the network can bend where NCCL's choice jumps.

    NCCL's default switches configs from one size to the next; the time over it jumps there, and an
    MLP over log2 size alone smooths the jump away (Tancik et al. 2020, "Fourier Features"). The
    shortest wave spans held-out octaves, so that it interpolates between training sizes.
    """

    angular: torch.Tensor

    def __init__(self) -> None:
        """Make the frequencies; they are constants, not weights."""
        super().__init__()
        self.register_buffer("angular", 2.0 * torch.pi / torch.tensor(WAVE_OCTAVES))

    def forward(self, context_BF: torch.Tensor) -> torch.Tensor:
        """Waves (B, 2 x len(WAVE_OCTAVES)) of the first context feature."""
        angle_BN = context_BF[:, 0:1] * self.angular
        return torch.cat([torch.sin(angle_BN), torch.cos(angle_BN)], dim=1)


class Trunk(nn.Module):
    """Standardise the context, flatten the window, and run both through one MLP.

    d3rlpy trains it inside `ObservationEncoder`; the exported policy holds it as it is.
    """

    context_mean: torch.Tensor
    context_scale: torch.Tensor

    def __init__(
        self, window_shape: Sequence[int], context_size: int, hidden_sizes: Sequence[int]
    ) -> None:
        """Lay out the layers for a (K, W) window and F context features."""
        super().__init__()
        self.register_buffer("context_mean", torch.zeros(context_size))
        self.register_buffer("context_scale", torch.ones(context_size))
        self.waves = SizeWaves()
        width = int(window_shape[0] * window_shape[1]) + context_size + 2 * len(WAVE_OCTAVES)
        layers: list[nn.Module] = []
        for hidden in hidden_sizes:
            layers += [nn.Linear(width, hidden), nn.SiLU()]
            width = hidden
        self.layers = nn.Sequential(*layers)

    def forward(self, window_BKW: torch.Tensor, context_BF: torch.Tensor) -> torch.Tensor:
        """Hidden features (B, H)."""
        scaled_BF = (context_BF - self.context_mean) / self.context_scale
        parts = [window_BKW.flatten(1), scaled_BF, self.waves(context_BF)]
        return self.layers(torch.cat(parts, dim=1))  # type: ignore[no-any-return]


class ObservationEncoder(Encoder):
    """A trunk as d3rlpy wants it: one argument, the tuple (window_BKW, context_BF, mask_BA)."""

    def __init__(self, trunk: Trunk) -> None:
        """Wrap a trunk."""
        super().__init__()
        self.trunk = trunk

    def set_scaling(self, mean: torch.Tensor, scale: torch.Tensor) -> None:
        """Set the statistics (F,) of the training contexts; they travel with the weights."""
        self.trunk.context_mean.copy_(mean)
        self.trunk.context_scale.copy_(scale)

    def forward(self, observation: Any) -> torch.Tensor:
        """Features (B, H); the mask is not looked at."""
        window_BKW, context_BF, _ = observation
        return cast(torch.Tensor, self.trunk(window_BKW, context_BF))


@dataclass()
class ObservationEncoderFactory(EncoderFactory):
    """Makes `ObservationEncoder`s for d3rlpy."""

    hidden_sizes: list[int]

    def create(self, observation_shape: Any) -> ObservationEncoder:
        """An encoder for the tuple observation [(K, W), (F,), (A,)]."""
        window_shape, context_shape, _ = observation_shape
        return ObservationEncoder(Trunk(window_shape, int(context_shape[0]), self.hidden_sizes))

    @staticmethod
    def get_type() -> str:
        """Name in a saved d3rlpy file."""
        return "dynamiccl_observation"


class LogTimeHead(nn.Module):
    """Value and advantage heads; see the module's docstring."""

    def __init__(self, hidden_size: int, action_size: int) -> None:
        """Lay out both heads."""
        super().__init__()
        self.value = nn.Linear(hidden_size, 1)
        self.advantage = nn.Linear(hidden_size, action_size)

    def forward(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """Z (B, A): predicted log of time over reference."""
        advantage_BA = self.advantage(hidden_BH)
        return self.value(hidden_BH) + advantage_BA - advantage_BA[:, 0:1]  # type: ignore[no-any-return]


class LogTimeDuelingQFunction(DiscreteQFunction):
    """Dueling Q function whose heads predict log time; see the module's docstring."""

    def __init__(self, encoder: Encoder, hidden_size: int, action_size: int) -> None:
        """Put a head on `encoder`."""
        super().__init__()
        self._encoder = encoder
        self.head = LogTimeHead(hidden_size, action_size)

    def log_time(self, observation: Any) -> torch.Tensor:
        """Z (B, A): predicted log of time over reference, mask not applied."""
        return cast(torch.Tensor, self.head(self._encoder(observation)))

    def forward(self, x: Any) -> QFunctionOutput:
        """Q values (B, A), masked actions at MASKED_Q."""
        q_BA = -torch.exp(self.log_time(x).clamp(Z_MIN, Z_MAX))
        q_BA = q_BA.masked_fill(x[2] < 0.5, MASKED_Q)
        return QFunctionOutput(q_value=q_BA, quantiles=None, taus=None)

    @property
    def encoder(self) -> Encoder:
        """The encoder under the heads."""
        return self._encoder


class LogTimeForwarder(DiscreteQFunctionForwarder):
    """Expected values and the loss: Huber in z between prediction and target."""

    def __init__(self, q_func: LogTimeDuelingQFunction, action_size: int) -> None:
        """Wrap one Q function."""
        self._q_func = q_func
        self._action_size = action_size

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
        """Loss of the taken actions against r + gamma * target."""
        z_BA = self._q_func.log_time(observations)
        z_B1 = z_BA.gather(1, actions.long().view(-1, 1))
        y_B1 = rewards + gamma * target * (1 - terminals)
        wanted_B1 = torch.log((-y_B1).clamp_min(1e-3)).clamp(Z_MIN, Z_MAX)
        loss = functional.smooth_l1_loss(z_B1, wanted_B1, beta=0.1, reduction="none")
        return cast(torch.Tensor, compute_reduce(loss, reduction))

    def compute_target(self, x: Any, action: torch.Tensor | None = None) -> torch.Tensor:
        """Q of an action (B, 1), or of all actions (B, A) when none is given."""
        q_BA = cast(torch.Tensor, self._q_func(x).q_value)
        if action is None:
            return q_BA
        return q_BA.gather(1, action.long().view(-1, 1))

    def set_q_func(self, q_func: DiscreteQFunction) -> None:
        """Replace the Q function (d3rlpy wraps it for distributed training)."""
        self._q_func = cast(LogTimeDuelingQFunction, q_func)


@dataclass()
class LogTimeDuelingFactory(QFunctionFactory):
    """Makes the dueling Q functions for d3rlpy."""

    share_encoder: bool = False

    def create_discrete(
        self, encoder: Encoder, hidden_size: int, action_size: int
    ) -> tuple[LogTimeDuelingQFunction, LogTimeForwarder]:
        """A Q function over discrete actions and its forwarder."""
        q_func = LogTimeDuelingQFunction(encoder, hidden_size, action_size)
        return q_func, LogTimeForwarder(q_func, action_size)

    def create_continuous(self, *_: Any) -> Any:
        """Not for us: our actions are indices of a catalogue."""
        raise TypeError("DynamICCL's actions are discrete")

    @staticmethod
    def get_type() -> str:
        """Name in a saved d3rlpy file."""
        return "dynamiccl_log_time_dueling"


register_encoder_factory(ObservationEncoderFactory)
register_q_func_factory(LogTimeDuelingFactory)
