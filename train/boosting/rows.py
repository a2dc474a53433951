"""Input rows of the trees: features of a task and an action."""

from typing import Final

import torch

from dynamiccl.train.action_features import ACTION_FEATURES
from dynamiccl.train.cautious.rows import RowMaker, index_of

#: The last numbers of a row are its task's: log2 size, log2 nodes, log2 ranks a node.
OF_TASK: Final = 3
#: Where a row says whether it is NCCL's own choice.
OWN: Final = ACTION_FEATURES.index("is NCCL's own choice")


class TreeRows(RowMaker):
    """Contexts (B, F) to tree rows; scriptable."""

    def forward(
        self, context_BF: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features (B, A, R), cells (B, A), ln of NCCL's costs (B, A), whether these are known."""
        found_BAG = self.actions(context_BF).to(torch.float64)
        end = self.num_algorithms + self.num_protocols
        algorithm_BA = index_of(found_BAG[:, :, : self.num_algorithms])
        protocol_BA = index_of(found_BAG[:, :, self.num_algorithms : end])
        task_BA3 = torch.stack(
            [
                context_BF[:, column].unsqueeze(1).expand_as(algorithm_BA)
                for column in (self.size, self.nodes, self.ranks)
            ],
            dim=2,
        )
        return (
            torch.cat([found_BAG, task_BA3.to(torch.float64)], dim=2),
            algorithm_BA * (self.num_protocols + 1) + protocol_BA,
            found_BAG[:, :, self.log_cost],
            found_BAG[:, :, self.cost_known] > 0.5,
        )
