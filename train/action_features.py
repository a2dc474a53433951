"""Features of each action: its knobs, and NCCL's predicted cost of its cell.

With actions as inputs, configs share what is learned of them: a channel count that was rarely tried
is near its neighbours, and a cell is what NCCL's own cost model says of it, give or take.

    B batch, F features of the context, A actions, C cells of NCCL's cost table, G action features
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from dynamiccl.datasets.actions import ABSTAIN_ACTION
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
