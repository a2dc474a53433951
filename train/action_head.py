"""A Q head with action features as input, so that configs share what is learned.

    B batch, H hidden size, F features of the context, A actions, G action features, U units

    z_a = V(task) + n(task, a) + c_a  -  (n(task, 0) + c_0)

with c the logarithm of NCCL's own cost where it is known, so that the network learns how far that
is off; or 0 (cost_base.py). Anchored at NCCL's own choice like the dueling head of heads.py, whose
z this is. A cell that NCCL does not take, where its costs are known, is no choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import nn

from dynamiccl.nccl import Algorithm, Config, Protocol
from dynamiccl.train.action_features import ACTION_FEATURES, COST_KNOWN, LOG_COST, ActionFeatures

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
        knobs = [[c.algorithm, c.protocol, c.num_channels, c.chunk_bytes] for c in self.configs]
        plain = [[None if knob is None else int(knob) for knob in each] for each in knobs]
        return [plain, self.cost_start, self.uses_cost]

    @classmethod
    def from_json(cls, told: Sequence[Any]) -> Self:
        """The inverse of `to_json`."""
        plain, cost_start, uses_cost = told
        configs = [
            Config(
                None if algorithm is None else Algorithm(algorithm),
                None if protocol is None else Protocol(protocol),
                channels,
                chunk,
            )
            for algorithm, protocol, channels, chunk in plain
        ]
        return cls(configs, int(cost_start), bool(uses_cost))


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
