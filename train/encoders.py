"""The networks below the heads: window encoders, the trunk that adds the context, a state for jobs.

    B batch, K calls in the window, W features of a call, F features of the context, H hidden size,
    U units of the state

All of it is TorchScript: what is trained is what is exported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from d3rlpy.models import EncoderFactory, register_encoder_factory
from d3rlpy.models.torch import Encoder
from torch import nn

from dynamiccl.datasets.features import CONTEXT_COLUMN
from dynamiccl.datasets.history import WINDOW_COLUMN
from dynamiccl.errors import UnknownName, UserError

#: Wavelengths of `SizeWaves`, in octaves of message size.
WAVE_OCTAVES: Final = (8.0, 16.0, 32.0)
#: Width of a recurrent state, and number of filters of a convolution.
WINDOW_UNITS: Final = 64
#: Calls that a filter spans (Pensieve section 5.1 uses 4).
FILTER_CALLS: Final = 4


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
        self.log2_size = CONTEXT_COLUMN["log2_size"]

    def forward(self, context_BF: torch.Tensor) -> torch.Tensor:
        """Waves (B, 2 x len(WAVE_OCTAVES))."""
        angle_BN = context_BF[:, self.log2_size].unsqueeze(1) * self.angular
        return torch.cat([torch.sin(angle_BN), torch.cos(angle_BN)], dim=1)


class FlatWindow(nn.Module):
    """The window, flattened."""

    def __init__(self, window_shape: Sequence[int]) -> None:
        """No parameters."""
        super().__init__()
        self.width = int(window_shape[0] * window_shape[1])

    def forward(self, window_BKW: torch.Tensor) -> torch.Tensor:
        """(B, K x W)."""
        return window_BKW.flatten(1)


class ConvolvedWindow(nn.Module):
    """Convolutions over the calls, as in Pensieve (section 5.1)."""

    def __init__(self, window_shape: Sequence[int]) -> None:
        """Lay out the filters."""
        super().__init__()
        self.filters = nn.Conv1d(int(window_shape[1]), WINDOW_UNITS, FILTER_CALLS)
        self.width = WINDOW_UNITS * (int(window_shape[0]) - FILTER_CALLS + 1)

    def forward(self, window_BKW: torch.Tensor) -> torch.Tensor:
        """(B, filters x places)."""
        filtered = nn.functional.silu(self.filters(window_BKW.transpose(1, 2)))
        return filtered.flatten(1)


class RecurrentWindow(nn.Module):
    """The last hidden state of an LSTM or GRU over the calls, oldest first; zero if none.

    Windows are right-aligned: padding comes first and is marked by the feature `valid`. Cold rows,
    half of those of static data, do not run through it.
    """

    def __init__(self, layer: type[nn.LSTM | nn.GRU], window_shape: Sequence[int]) -> None:
        """Lay out the layer."""
        super().__init__()
        self.recurrent = layer(int(window_shape[1]), WINDOW_UNITS, batch_first=True)
        self.width = WINDOW_UNITS
        self.valid = WINDOW_COLUMN["valid"]

    def forward(self, window_BKW: torch.Tensor) -> torch.Tensor:
        """(B, WINDOW_UNITS)."""
        warm = torch.nonzero(window_BKW[:, -1, self.valid] > 0.5).flatten()
        state = window_BKW.new_zeros([window_BKW.size(0), self.width])
        if warm.numel() == 0:
            return state
        outputs, _ = self.recurrent(window_BKW.index_select(0, warm))
        return state.index_copy(0, warm, outputs[:, -1])


#: What a recipe may name: from the shape (K, W) to a module whose `width` is that of its output.
WINDOW_ENCODERS: Final[dict[str, Callable[[Sequence[int]], Any]]] = {
    "mlp": FlatWindow,
    "lstm": partial(RecurrentWindow, nn.LSTM),
    "gru": partial(RecurrentWindow, nn.GRU),
    "cnn": ConvolvedWindow,
}


def register_window_encoder(name: str, make: Callable[[Sequence[int]], nn.Module]) -> None:
    """Let recipes name a window encoder of one's own; registering a name anew replaces it.

    `make` gets the window's shape (K, W) and gives a TorchScript-able module from windows (B, K, W)
    to features (B, `width`), `width` being an attribute of it.
    """
    WINDOW_ENCODERS[name] = make


def _check_own(name: str, encoder: Any, window_shape: Sequence[int]) -> None:
    """Raise UserError for an encoder of somebody's own that cannot be trained and exported.

    Now, and not at the end of training: it runs, is TorchScript, and its output is of its `width`.
    """
    try:
        with torch.no_grad():
            windows = torch.zeros(2, *map(int, window_shape))
            encoder(windows)  # as Python first: TorchScript puts the cause below its own traceback
            made = torch.jit.script(encoder)(windows)
        found, said = list(made.shape), encoder.width
    except Exception as error:  # whatever somebody's module may raise is told with its name
        told = " ".join(str(error).split())[:300]
        raise UserError(
            f"window encoder '{name}': {type(error).__name__}: {told}; it was given windows "
            f"{(2, *map(int, window_shape))}: (windows, calls, features)"
        ) from error
    if found != [2, said]:
        raise UserError(
            f"window encoder '{name}' makes a tensor {found} of 2 windows, and its width is {said}:"
            " self.width must be the second number, and the tensor (windows, width)"
        )


class Trunk(nn.Module):
    """Standardise the context, encode the window, and apply one MLP to both.

    d3rlpy trains it inside `ObservationEncoder`; the exported policy holds it as it is.
    """

    context_mean: torch.Tensor
    context_scale: torch.Tensor
    window_mean: torch.Tensor
    window_scale: torch.Tensor

    def __init__(
        self,
        window_shape: Sequence[int],
        context_size: int,
        hidden_sizes: Sequence[int],
        window_encoder: str = "mlp",
    ) -> None:
        """Lay out the layers for a (K, W) window and F context features.

        Raises UnknownName for a window encoder that is not registered, and UserError for one
        that cannot be trained and exported.
        """
        super().__init__()
        if window_encoder not in WINDOW_ENCODERS:
            raise UnknownName("window encoder", window_encoder, WINDOW_ENCODERS)
        self.register_buffer("context_mean", torch.zeros(context_size))
        self.register_buffer("context_scale", torch.ones(context_size))
        self.register_buffer("window_mean", torch.zeros(int(window_shape[1])))
        self.register_buffer("window_scale", torch.ones(int(window_shape[1])))
        self.window = WINDOW_ENCODERS[window_encoder](window_shape)
        if type(self.window).__module__ != __name__:
            _check_own(window_encoder, self.window, window_shape)
        self.waves = SizeWaves()
        width = self.window.width + context_size + 2 * len(WAVE_OCTAVES)
        layers: list[nn.Module] = []
        for hidden in hidden_sizes:
            layers += [nn.Linear(width, hidden), nn.SiLU()]
            width = hidden
        self.layers = nn.Sequential(*layers)
        self.valid = WINDOW_COLUMN["valid"]

    def forward(self, window_BKW: torch.Tensor, context_BF: torch.Tensor) -> torch.Tensor:
        """Hidden features (B, H)."""
        scaled_BF = (context_BF - self.context_mean) / self.context_scale
        # Padding stays zero: its feature `valid` is.
        valid_BK1 = window_BKW[:, :, self.valid].unsqueeze(2)
        scaled_BKW = (window_BKW - self.window_mean) / self.window_scale * valid_BK1
        parts = [self.window(scaled_BKW), scaled_BF, self.waves(context_BF)]
        return self.layers(torch.cat(parts, dim=1))  # type: ignore[no-any-return]


class ObservationEncoder(Encoder):
    """A trunk with d3rlpy's interface: the tuple (window_BKW, context_BF, mask_BA)."""

    def __init__(self, trunk: Any) -> None:
        """Wrap a `Trunk`, or what has one and a state behind it."""
        super().__init__()
        self.trunk = trunk

    def set_scaling(
        self,
        *,
        window: tuple[torch.Tensor, torch.Tensor],
        context: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Set mean and spread of the features of calls (W,) and contexts (F,).

        They are saved with the weights.
        """
        trunk = self.trunk if isinstance(self.trunk, Trunk) else self.trunk.trunk
        for buffer, value in (
            (trunk.window_mean, window[0]),
            (trunk.window_scale, window[1]),
            (trunk.context_mean, context[0]),
            (trunk.context_scale, context[1]),
        ):
            buffer.copy_(value)

    def forward(self, observation: Any) -> torch.Tensor:
        """Features (B, H); the mask is ignored."""
        window_BKW, context_BF, _ = observation
        return cast(torch.Tensor, self.trunk(window_BKW, context_BF))


@dataclass()
class ObservationEncoderFactory(EncoderFactory):
    """Makes `ObservationEncoder`s for d3rlpy."""

    hidden_sizes: list[int]
    #: One of WINDOW_ENCODERS.
    window_encoder: str = "mlp"

    def create(self, observation_shape: Any) -> ObservationEncoder:
        """An encoder for the tuple observation [(K, W), (F,), (A,)]."""
        window_shape, context_shape, _ = observation_shape
        trunk = Trunk(window_shape, int(context_shape[0]), self.hidden_sizes, self.window_encoder)
        return ObservationEncoder(trunk)

    @staticmethod
    def get_type() -> str:
        """The type name in a saved d3rlpy file."""
        return "dynamiccl_observation"


register_encoder_factory(ObservationEncoderFactory)


#: Width of what the state is told of the last decision.
_DECISION_UNITS = 8


class StatefulTrunk(nn.Module):
    """A trunk with an LSTM over the decisions about all keys of a job.

    (window, context, decided, h, c) -> features (B, H + U), h, c.

    What a key's window cannot show, the job's other keys can: they are slowed down by the same
    network. The state steps once for each decision about a key that has new calls, with what is
    seen of it and what was decided about it last (mvfst-rl, Sivakumar et al. 2019, section 4.1;
    Mnih et al. 2016, section 5.6). The last reward is in the window, as the time of the last call.

    `decided` (B,) is the action that was decided last about each key, -1 = none; h and c (B, U) are
    of the LSTM, zeros where a job begins.
    """

    def __init__(self, trunk: Trunk, hidden_size: int, num_actions: int, units: int) -> None:
        """Put a state of so many units behind a trunk whose features are `hidden_size` wide."""
        super().__init__()
        self.trunk = trunk
        self.decided = nn.Embedding(num_actions + 1, _DECISION_UNITS)
        self.core = nn.LSTMCell(hidden_size + _DECISION_UNITS, units)
        self.units = units
        #: Decisions about keys of a job from one that is left to NCCL to the next; 0 = never.
        self.probe_every: torch.Tensor
        self.register_buffer("probe_every", torch.tensor(0))
        self.width = hidden_size + units

    def forward(self, window_BKW: torch.Tensor, context_BF: torch.Tensor) -> torch.Tensor:
        """Features of keys of jobs that have just begun."""
        none_B = torch.full([window_BKW.size(0)], -1, dtype=torch.int64)
        zero_BU = window_BKW.new_zeros([window_BKW.size(0), self.units])
        return self.step(window_BKW, context_BF, none_B, zero_BU, zero_BU)[0]

    @torch.jit.export
    def step(
        self,
        window_BKW: torch.Tensor,
        context_BF: torch.Tensor,
        decided_B: torch.Tensor,
        h_BU: torch.Tensor,
        c_BU: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features, and the state after one decision of B jobs."""
        seen_BH = self.trunk(window_BKW, context_BF)
        h_BU, c_BU = self.core(
            torch.cat([seen_BH, self.decided(decided_B + 1)], dim=1), (h_BU, c_BU)
        )
        return torch.cat([seen_BH, h_BU], dim=1), h_BU, c_BU

    def unroll(
        self,
        seen_TNKH: torch.Tensor,
        decided_TNK: torch.Tensor,
        is_new_TNK: torch.Tensor,
        h_NU: torch.Tensor,
        c_NU: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`step` over T rounds of N jobs with K keys each, from the trunk's features on.

        Key after key of a round; a key without new calls sees the state and leaves it alone.
        """
        rounds, jobs, keys, _ = seen_TNKH.shape
        told = torch.cat([seen_TNKH, self.decided(decided_TNK + 1)], dim=3)
        features = []
        for each in range(rounds):
            for key in range(keys):
                h_after, c_after = self.core(told[each, :, key], (h_NU, c_NU))
                features.append(h_after)
                is_new_N1 = is_new_TNK[each, :, key].unsqueeze(1)
                h_NU = torch.where(is_new_N1, h_after, h_NU)
                c_NU = torch.where(is_new_N1, c_after, c_NU)
        state_TNKU = torch.stack(features).view(rounds, keys, jobs, -1).transpose(1, 2)
        return torch.cat([seen_TNKH, state_TNKU], dim=3), h_NU, c_NU
