"""The networks: window encoders, the trunk that adds the context, a state for jobs, and heads.

    B batch, K calls in the window, W features of a call, F features of the context, H hidden size,
    A actions, C cells of NCCL's cost table, G action features, U units

All of it is TorchScript: what is trained is what is exported.

Rewards are -time/reference: a bad protocol is 50 times slower, and what has to be told apart is
2 %. So a head predicts z = log(-Q), and the loss is taken in z (Pohlen et al. 2018, section 3.2).

Dueling (Wang et al. 2016, section 3): z_a = V + A_a - A_0. Anchored at action 0 instead of at the
mean, V is the value of abstaining, and no Q value depends on what the mask allows.

With actions as inputs (`ActionHead`), configs share what is learned of them:

    z_a = V(task) + n(task, a) + c_a  -  (n(task, 0) + c_0)

with c the logarithm of NCCL's own cost where it is known, so that the network learns how far that
is off; or 0 (data.py). A cell that NCCL does not take, where its costs are known, is no choice.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.costs import NUM_CELLS
from dynamiccl.datasets.features import CONTEXT_COLUMN, Observations
from dynamiccl.datasets.history import WINDOW_COLUMN, Float32Array
from dynamiccl.datasets.steps import Steps
from dynamiccl.errors import UnknownName, UserError
from dynamiccl.nccl import NUM_ALGORITHMS, NUM_PROTOCOLS, Config

WAVE_OCTAVES: Final = (8.0, 16.0, 32.0)
WINDOW_UNITS: Final = 64
FILTER_CALLS: Final = 4


class SizeWaves(nn.Module):
    """Sines and cosines of log2 size: an MLP alone smooths jumps away (Tancik et al. 2020)."""

    angular: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angular", 2.0 * torch.pi / torch.tensor(WAVE_OCTAVES))
        self.log2_size = CONTEXT_COLUMN["log2_size"]

    def forward(self, context_BF: torch.Tensor) -> torch.Tensor:
        """Waves (B, 2 x len(WAVE_OCTAVES))."""
        angle_BN = context_BF[:, self.log2_size].unsqueeze(1) * self.angular
        return torch.cat([torch.sin(angle_BN), torch.cos(angle_BN)], dim=1)


class FlatWindow(nn.Flatten):
    """The window, flattened: (B, K x W)."""

    def __init__(self, window_shape: Sequence[int]) -> None:
        super().__init__()
        self.width = int(window_shape[0] * window_shape[1])


class ConvolvedWindow(nn.Module):
    """Convolutions over the calls, as in Pensieve (section 5.1)."""

    def __init__(self, window_shape: Sequence[int]) -> None:
        super().__init__()
        self.filters = nn.Conv1d(int(window_shape[1]), WINDOW_UNITS, FILTER_CALLS)
        self.width = WINDOW_UNITS * (int(window_shape[0]) - FILTER_CALLS + 1)

    def forward(self, window_BKW: torch.Tensor) -> torch.Tensor:
        """(B, filters x places)."""
        filtered = nn.functional.silu(self.filters(window_BKW.transpose(1, 2)))
        return filtered.flatten(1)


class RecurrentWindow(nn.Module):
    """Last hidden state of an LSTM over the calls, oldest first; zero for cold rows."""

    def __init__(self, window_shape: Sequence[int]) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(int(window_shape[1]), WINDOW_UNITS, batch_first=True)
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


#: From the shape (K, W) to a module with the attribute `width`, that of its output.
WINDOW_ENCODERS: Final[dict[str, Callable[[Sequence[int]], Any]]] = {
    "mlp": FlatWindow,
    "lstm": RecurrentWindow,
    "cnn": ConvolvedWindow,
}


def register_window_encoder(name: str, make: Callable[[Sequence[int]], nn.Module]) -> None:
    """Let recipes name an encoder: TorchScript, windows (B, K, W) to (B, its `width`)."""
    WINDOW_ENCODERS[name] = make


def _check_own(name: str, encoder: Any, window_shape: Sequence[int]) -> None:
    """Raise UserError before training for an encoder that cannot be exported."""
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
    """Standardises the context, encodes the window, and applies one MLP to both."""

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
        """Raises UnknownName, and UserError for an encoder that cannot be trained."""
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
        valid_BK1 = window_BKW[:, :, self.valid].unsqueeze(2)
        scaled_BKW = (window_BKW - self.window_mean) / self.window_scale * valid_BK1
        parts = [self.window(scaled_BKW), scaled_BF, self.waves(context_BF)]
        return self.layers(torch.cat(parts, dim=1))  # type: ignore[no-any-return]


_DECISION_UNITS: Final = 8


class StatefulTrunk(nn.Module):
    """A trunk with an LSTM that steps once for each decision about a key that has new calls.

    As mvfst-rl, Sivakumar et al. 2019, section 4.1, and Mnih et al. 2016, 5.6. `decided` (B,) is
    the last action about each key, -1 = none.
    """

    def __init__(self, trunk: Trunk, hidden_size: int, num_actions: int, units: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.decided = nn.Embedding(num_actions + 1, _DECISION_UNITS)
        self.core = nn.LSTMCell(hidden_size + _DECISION_UNITS, units)
        self.units = units
        #: Decisions of a job from one that is left to NCCL to the next; 0 = never.
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
        """`step` over T rounds of N jobs with K keys each; keys without new calls do not step."""
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
COST_KNOWN: Final = ACTION_FEATURES.index("cost is known")
LOG_COST: Final = ACTION_FEATURES.index("ln of NCCL's cost in us, 0 = unknown")


class ActionFeatures(nn.Module):
    """(context_BF) -> (B, A, G): ACTION_FEATURES of a catalogue's actions."""

    is_compatible: torch.Tensor  # (A, C)
    knobs: torch.Tensor  # (A, algorithms + protocols), one-hot; zeros for what is left to NCCL
    #: (A, 5): own choice, channels asked, log2 channels, chunk asked, log2 chunk.
    channels: torch.Tensor

    def __init__(self, configs: Sequence[Config], cost_start: int) -> None:
        super().__init__()
        self.cost_start = cost_start
        self.num_cells = NUM_CELLS
        self.num_protocols = NUM_PROTOCOLS
        self.num_algorithms = NUM_ALGORITHMS
        self.log2_size = CONTEXT_COLUMN["log2_size"]
        compatible, knobs, asked = [], [], []
        for config in configs:
            algorithms = [config.algorithm == number for number in range(NUM_ALGORITHMS)]
            protocols = [config.protocol == number for number in range(NUM_PROTOCOLS)]
            knobs.append([*algorithms, *protocols])
            compatible.append(
                [
                    config.algorithm in {None, cell // NUM_PROTOCOLS}
                    and config.protocol in {None, cell % NUM_PROTOCOLS}
                    for cell in range(NUM_CELLS)
                ]
            )
            asked.append([float(config.num_channels or 0), float(config.chunk_bytes or 0)])
        numbers = torch.tensor(asked)
        flags, log2_AN = (numbers > 0.0).float(), torch.log2(numbers.clamp(min=1.0))
        own_A1 = torch.zeros(len(configs), 1)
        own_A1[ABSTAIN_ACTION] = 1.0
        told = [own_A1, flags[:, :1], log2_AN[:, :1], flags[:, 1:], log2_AN[:, 1:]]
        self.register_buffer("is_compatible", torch.tensor(compatible))
        self.register_buffer("knobs", torch.tensor(knobs).float())
        self.register_buffer("channels", torch.cat(told, dim=1))

    def forward(self, context_BF: torch.Tensor) -> torch.Tensor:
        """The features of all actions."""
        every_A = torch.arange(self.knobs.size(0))
        return self.some(context_BF, every_A.expand(context_BF.size(0), -1))

    def some(self, context_BF: torch.Tensor, action_BA: torch.Tensor) -> torch.Tensor:
        """The features of chosen actions (B, A) for each context."""
        told_BA5, cells_BAK = self.channels[action_BA], self.knobs[action_BA]
        size_B11 = context_BF[:, self.log2_size].view(-1, 1, 1)
        lane_BA1 = (size_B11 - told_BA5[:, :, 2:3]) * told_BA5[:, :, 1:2]
        cost_BA4 = torch.zeros(action_BA.size(0), action_BA.size(1), 4, dtype=context_BF.dtype)
        if self.cost_start >= 0:
            log_BC = context_BF[:, self.cost_start : self.cost_start + self.num_cells]
            log_BC = torch.where(log_BC == 0.0, torch.full_like(log_BC, float("inf")), log_BC)
            is_open_BAC = self.is_compatible[action_BA]
            open_BAC = torch.where(is_open_BAC, log_BC.unsqueeze(1), float("inf"))
            least_BA, cell_BA = open_BAC.min(dim=2)
            known_BA = torch.isfinite(least_BA)
            over_BA = least_BA - log_BC.min(dim=1, keepdim=True)[0]
            rank_BA = (log_BC.unsqueeze(1) < least_BA.unsqueeze(2)).sum(dim=2)
            found = [known_BA.to(least_BA.dtype), least_BA, over_BA, rank_BA.to(least_BA.dtype)]
            cost_BA4 = torch.stack(found, dim=2).masked_fill(~known_BA.unsqueeze(2), 0.0)
            algorithm_BA = torch.div(cell_BA, self.num_protocols, rounding_mode="floor")
            ran = [
                nn.functional.one_hot(algorithm_BA, self.num_algorithms),
                nn.functional.one_hot(cell_BA % self.num_protocols, self.num_protocols),
            ]
            ran_BAK = torch.cat(ran, dim=2).to(cells_BAK.dtype)
            cells_BAK = torch.where(known_BA.unsqueeze(2), ran_BAK, cells_BAK)
        parts = [cells_BAK, told_BA5[:, :, :3], lane_BA1, told_BA5[:, :, 3:], cost_BA4]
        return torch.cat(parts, dim=2)


UNITS: Final = 64
#: ln of time over NCCL's, for a cell that NCCL does not take.
_WORST: Final = 8.0


@dataclass(frozen=True, slots=True)
class ActionInputs:
    """A catalogue, and the context column where NCCL's costs begin (-1: none)."""

    configs: Sequence[Config]
    cost_start: int
    #: Whether the costs are the base of times, or features alone (data.py).
    uses_cost: bool


class ActionHead(nn.Module):
    """(hidden_BH, context_BF) -> z (B, A); see the module."""

    scale: torch.Tensor

    def __init__(self, hidden_size: int, inputs: ActionInputs) -> None:
        super().__init__()
        self.features = ActionFeatures(inputs.configs, inputs.cost_start)
        self.task = nn.Linear(hidden_size, UNITS)
        self.action = nn.Linear(len(ACTION_FEATURES), UNITS, bias=False)
        self.gate = nn.Linear(len(ACTION_FEATURES), UNITS)
        self.out = nn.Linear(UNITS, 1)
        self.value = nn.Linear(hidden_size, 1)
        self.uses_cost = inputs.uses_cost
        self.log_cost = LOG_COST
        self.cost_known = COST_KNOWN
        self.worst = _WORST
        # Logarithms and ranks become about 1; flags are.
        numbers = ("log2", "ln ", "over", "many")
        is_number = [any(word in name for word in numbers) for name in ACTION_FEATURES]
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
        met_BAU = self.task(hidden_BH).unsqueeze(1) * (1.0 + self.gate(scaled_BAG))
        met_BAU = met_BAU + self.action(scaled_BAG)
        z_BA = self.out(nn.functional.silu(met_BAU)).squeeze(2)
        if self.uses_cost:
            z_BA = z_BA + found_BAG[:, :, self.log_cost]
        z_BA = self.value(hidden_BH) + z_BA - z_BA[:, :1]
        known_BA = found_BAG[:, :, self.cost_known] > 0.5
        return z_BA.masked_fill(known_BA[:, :1] & ~known_BA, self.worst)  # type: ignore[no-any-return]


#: Finite: a terminal row's mask is all zero, and inf * 0 would be NaN.
MASKED_Q: Final = -1e6
#: Times between 1/400 and 3000 times the reference.
Z_MIN: Final = -6.0
Z_MAX: Final = 8.0


class OutputHead(nn.Module):
    """An output each action: z itself or, dueling, of a value and advantages."""

    def __init__(self, hidden_size: int, action_size: int, *, dueling: bool) -> None:
        super().__init__()
        self.value = nn.Linear(hidden_size, 1) if dueling else None
        self.layer = nn.Linear(hidden_size, action_size)

    def forward(self, hidden_BH: torch.Tensor, context_BF: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Z (B, A)."""
        z_BA: torch.Tensor = self.layer(hidden_BH)
        if self.value is not None:
            z_BA = self.value(hidden_BH) + z_BA - z_BA[:, 0:1]
        return z_BA


def make_head(
    hidden_size: int, action_size: int, actions: ActionInputs | None, *, dueling: bool
) -> nn.Module:
    """A head with actions as inputs, or one output each."""
    if actions is not None:
        return ActionHead(hidden_size, actions)
    return OutputHead(hidden_size, action_size, dueling=dueling)


class Network(nn.Module):
    """(window_BKW, context_BF) -> z (B, A), the least being the best."""

    def __init__(self, trunk: Trunk | StatefulTrunk, head: nn.Module) -> None:
        super().__init__()
        self.trunk: Any = trunk
        self.head: Any = head

    def forward(self, window_BKW: torch.Tensor, context_BF: torch.Tensor) -> torch.Tensor:
        """Z (B, A), the mask not applied."""
        return self.head(self.trunk(window_BKW, context_BF), context_BF)  # type: ignore[no-any-return]

    def step(
        self,
        window_BKW: torch.Tensor,
        context_BF: torch.Tensor,
        decided_B: torch.Tensor,
        h_BU: torch.Tensor,
        c_BU: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`forward` with a stateful trunk, and the new state."""
        features_BH, h_BU, c_BU = self.trunk.step(window_BKW, context_BF, decided_B, h_BU, c_BU)
        return self.head(features_BH, context_BF), h_BU, c_BU


class Imitator(Network):
    """Behaviour cloning, and actor: its z are minus log odds of the actions."""

    def __init__(
        self,
        trunk: Trunk | StatefulTrunk,
        hidden_size: int,
        action_size: int,
        actions: ActionInputs | None = None,
    ) -> None:
        # Drawn and thrown away: without it seeds would give other weights.
        nn.Linear(hidden_size, action_size)
        super().__init__(trunk, make_head(hidden_size, action_size, actions, dueling=False))

    def logits(
        self, hidden_BH: torch.Tensor, context_BF: torch.Tensor, mask_BA: torch.Tensor
    ) -> torch.Tensor:
        """Logits (B, A), those of masked actions at MASKED_Q."""
        z_BA = self.head(hidden_BH, context_BF)
        return -z_BA.masked_fill(mask_BA < 0.5, -MASKED_Q)  # type: ignore[no-any-return]


_MAX_SCALED: Final = 200_000


def set_scaling(networks: Iterable[Network], sources: Sequence[Steps]) -> None:
    """Scale calls and contexts by mean and spread over `sources`."""
    seen = [_some_observations(steps) for steps in sources]
    context = _scaling(np.concatenate([each.context for each in seen]))
    valid = WINDOW_COLUMN["valid"]
    calls = np.concatenate([each.window[each.window[..., valid] > 0.0] for each in seen])
    mean, scale = _scaling(calls)
    mean[valid], scale[valid] = 0.0, 1.0  # it tells calls from padding and stays as it is
    for network in networks:
        trunk = network.trunk if isinstance(network.trunk, Trunk) else network.trunk.trunk
        trunk.window_mean.copy_(mean)
        trunk.window_scale.copy_(scale)
        trunk.context_mean.copy_(context[0])
        trunk.context_scale.copy_(context[1])


def _some_observations(steps: Steps) -> Observations:
    rows = np.arange(len(steps))
    if len(rows) > _MAX_SCALED:
        rows = np.sort(np.random.default_rng(0).choice(len(rows), _MAX_SCALED, replace=False))
    return steps.observe(rows, steps.episode_of(rows))[0]


def _scaling(rows: Float32Array) -> tuple[torch.Tensor, torch.Tensor]:
    if not len(rows):
        return torch.zeros(rows.shape[1]), torch.ones(rows.shape[1])
    spread = rows.std(axis=0)
    # A constant feature must not explode once it varies.
    scale = np.where(spread > 1e-6, spread, 1.0)
    return torch.from_numpy(rows.mean(axis=0)), torch.from_numpy(scale)
