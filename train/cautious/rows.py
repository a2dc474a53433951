"""What a policy of tables reads from a context.

B batch, F features of the context, A actions, E features of a machine
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from dynamiccl.datasets.features import CONTEXT_COLUMN, FEATURES, STATIC_FEATURES, TUNED
from dynamiccl.nccl import NUM_ALGORITHMS, NUM_PROTOCOLS, Config
from dynamiccl.train.action_features import COST_KNOWN, LOG_COST, ActionFeatures

#: Cells as rows know them: the last algorithm and the last protocol are *unknown*.
NUM_ROW_CELLS: Final = (NUM_ALGORITHMS + 1) * (NUM_PROTOCOLS + 1)
#: What of a context is about the task and not about the machine, NCCL or the launch.
_OF_TASK: Final = frozenset(
    {
        "log2_size",
        "log2_bytes_per_rank",
        "log2_ranks",
        "log2_nodes",
        "log2_ranks_per_node",
        "noise_known",
        "noise_band",
        *(f"collective_{each.wire}" for each in TUNED),
    }
)


class RowMaker(nn.Module):
    """Contexts (B, F) to places, cells and costs; scriptable."""

    machine_columns: torch.Tensor
    collective_columns: torch.Tensor
    place_columns: torch.Tensor

    def __init__(self, configs: Sequence[Config], num_profiles: int, *, costs: bool) -> None:
        """`configs`: the catalogue; the other arguments tell how a context is laid out."""
        super().__init__()
        profiles = range(len(FEATURES), len(FEATURES) + num_profiles)
        own = [CONTEXT_COLUMN[f.name] for f in STATIC_FEATURES if f.name not in _OF_TASK]
        collectives = [CONTEXT_COLUMN[f"collective_{each.wire}"] for each in TUNED]
        place = [CONTEXT_COLUMN[n] for n in ("log2_size", "log2_nodes", "log2_ranks_per_node")]
        self.register_buffer("machine_columns", torch.tensor([*own, *profiles]))
        self.register_buffer("collective_columns", torch.tensor(collectives))
        self.register_buffer("place_columns", torch.tensor(place))
        self.actions = ActionFeatures(configs, profiles.stop if costs else -1)
        self.num_algorithms, self.num_protocols = NUM_ALGORITHMS, NUM_PROTOCOLS
        self.level_known = CONTEXT_COLUMN["interference_known"]
        self.level = CONTEXT_COLUMN["interference"]
        self.cost_known = COST_KNOWN
        self.log_cost = LOG_COST

    def forward(self, context_BF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cells (B, A), and ln of NCCL's costs (B, A), NaN where they are not known."""
        found_BAG = self.actions(context_BF).to(torch.float64)
        algorithm_BA = index_of(found_BAG[:, :, : self.num_algorithms])
        end = self.num_algorithms + self.num_protocols
        protocol_BA = index_of(found_BAG[:, :, self.num_algorithms : end])
        cost_BA = found_BAG[:, :, self.log_cost]
        unknown_BA = found_BAG[:, :, self.cost_known] < 0.5
        cost_BA = cost_BA.masked_fill(unknown_BA, float("nan"))
        return algorithm_BA * (self.num_protocols + 1) + protocol_BA, cost_BA

    @torch.jit.export
    def places(self, context_BF: torch.Tensor) -> torch.Tensor:
        """(B, 3) log2 of size, nodes and ranks a node."""
        return context_BF.index_select(1, self.place_columns).to(torch.float64)

    @torch.jit.export
    def machines(self, context_BF: torch.Tensor) -> torch.Tensor:
        """(B, E) machine features: tables are those of the machine with equal ones."""
        return context_BF.index_select(1, self.machine_columns)

    @torch.jit.export
    def levels(self, context_BF: torch.Tensor) -> torch.Tensor:
        """(B,) interference levels; 0 where unknown."""
        known_B = context_BF[:, self.level_known] > 0.5
        level_B = context_BF[:, self.level].to(torch.float64).clamp(min=0.0)
        return torch.where(known_B, level_B, torch.zeros_like(level_B))

    @torch.jit.export
    def collectives(self, context_BF: torch.Tensor) -> torch.Tensor:
        """(B,) collective index, 0 to 4."""
        return context_BF.index_select(1, self.collective_columns).argmax(dim=1)


def cell_of(algorithm: int, protocol: int) -> int:
    """Index of the (algorithm, protocol) cell."""
    return algorithm * (NUM_PROTOCOLS + 1) + protocol


def index_of(one_hot: torch.Tensor) -> torch.Tensor:
    """(B, A) index of the one in one-hot (B, A, K); K where all are zero."""
    last = (one_hot.sum(dim=2, keepdim=True) == 0.0).to(one_hot.dtype)
    return torch.cat([one_hot, last], dim=2).argmax(dim=2)
