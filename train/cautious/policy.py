"""The exported policy: models by machine and collective, with confidence thresholds.

B batch, K calls in the window, W features of a call, F features of the context, A actions,
S machines, E features of a machine, C cells, O octaves of sizes
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from dynamiccl.train.cautious.caution import MIN_GAIN
from dynamiccl.train.cautious.rows import RowMaker
from dynamiccl.train.heads import MASKED_Q, Z_MAX, Z_MIN

#: ln of a time over NCCL's own that is never the least.
_WORST: Final = 50.0
#: Two machines' features that differ by less are one machine's.
_SAME: Final = 1e-4
#: The level that a threshold takes for disturbed: calls take 1.5 times as long.
_DISTURBED: Final = 0.5
#: Contexts that are worked on at a time: a kernel needs A x points x 6 numbers for each.
_PART: Final = 8


@dataclass(frozen=True, slots=True)
class Block:
    """The model of one collective on one machine."""

    machine: int  # row of the machines' table
    collective: int
    #: Whether y is the residual over NCCL's cost, else over its own choice.
    uses_cost: bool
    #: (numbers_BAR, cells_BA) -> means (B, A) of y, spreads (B, A) of what each is off action 0's.
    model: nn.Module


class CautiousPolicy(nn.Module):
    """(window_BKW, context_BF, mask_BA) -> (action_B int64, q_BA); the window is not looked at.

    Where a Trigger tells an interference level, each config's time is longer by the share of it
    that its cell feels (`level_shares`). The config of the least mean is taken where its
    gain over NCCL's own choice is more than MIN_GAIN, and more than so many spreads of that gain:
    one number for group shapes that were measured, one for others. Of machines and collectives that
    were not measured nothing is known, and NCCL's own choice stands.
    """

    machine_table: torch.Tensor
    shape_table: torch.Tensor
    caution: torch.Tensor
    level_shares: torch.Tensor

    def __init__(
        self,
        rows: RowMaker,
        machines_SE: torch.Tensor,
        shapes: torch.Tensor,
        blocks: Sequence[Block],
        caution_S2: torch.Tensor,
        level_shares_SNCO: torch.Tensor,
    ) -> None:
        """Put the models together.

        `shapes`: machine, log2 nodes and log2 ranks a node of each shape that was measured.
        `caution_S2`: spreads that a gain must have on each machine, at those shapes and elsewhere.
        `level_shares_SNCO`: the share of an interference level that slows each cell.
        """
        super().__init__()
        self.rows = rows
        self.register_buffer("machine_table", machines_SE)
        self.models = nn.ModuleList([block.model for block in blocks])
        self.block_machines = [block.machine for block in blocks]
        self.block_collectives = [block.collective for block in blocks]
        self.block_costs = [block.uses_cost for block in blocks]
        self.register_buffer("shape_table", shapes)
        self.register_buffer("caution", caution_S2)
        self.register_buffer("level_shares", level_shares_SNCO)
        #: Above it a level is taken for _DISTURBED, else for none; 0: it is taken as it is.
        self.level_threshold = 0.0
        self.disturbed = _DISTURBED
        self.min_gain = MIN_GAIN
        self.worst = _WORST
        self.same = _SAME
        self.part = _PART
        self.masked_q = MASKED_Q
        self.z_min = Z_MIN
        self.z_max = Z_MAX

    def forward(
        self,
        window_BKW: torch.Tensor,  # noqa: ARG002 - what every policy is given
        context_BF: torch.Tensor,
        mask_BA: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(action_B, q_BA); see the class."""
        z_BA, spread_BA = self.predict(context_BF)
        allowed_BA = mask_BA > 0.5
        best_B1 = z_BA.masked_fill(~allowed_BA, float("inf")).argmin(dim=1, keepdim=True)
        gain_B1 = -z_BA.gather(1, best_B1)
        # Infinite caution times a spread of 0 would be no number.
        spread_B1 = spread_BA.gather(1, best_B1).clamp(min=1e-9)
        wanted_B1 = (self.caution_of(context_BF) * spread_B1).clamp(min=self.min_gain)
        # Where ABSTAIN itself is not allowed there is nothing to fall back on.
        unsure_B1 = (gain_B1 <= wanted_B1) | torch.isinf(spread_B1)
        abstain_B1 = unsure_B1 & allowed_BA[:, :1]
        action_B = torch.where(abstain_B1, torch.zeros_like(best_B1), best_B1).squeeze(1)
        q_BA = -torch.exp(z_BA.clamp(self.z_min, self.z_max)).to(torch.float32)
        return action_B, q_BA.masked_fill(~allowed_BA, self.masked_q)

    @torch.jit.export
    def caution_of(self, context_BF: torch.Tensor) -> torch.Tensor:
        """(B, 1) threshold: spreads by which a gain must exceed 0."""
        found_BS = self.find_machines(context_BF)
        machine_B = found_BS.to(torch.int64).argmax(dim=1)
        measured_B = torch.zeros_like(machine_B).to(torch.bool)
        nodes_B, ranks_B = context_BF[:, self.rows.nodes], context_BF[:, self.rows.ranks]
        for shape in self.shape_table:
            same_B = (machine_B == int(shape[0])) & ((nodes_B - shape[1]).abs() < self.same)
            measured_B = measured_B | (same_B & ((ranks_B - shape[2]).abs() < self.same))
        wanted_B2 = self.caution[machine_B]
        return torch.where(measured_B, wanted_B2[:, 0], wanted_B2[:, 1]).unsqueeze(1)

    @torch.jit.export
    def find_machines(self, context_BF: torch.Tensor) -> torch.Tensor:
        """(B, S) whether each context is of each machine."""
        off_BSE = self.rows.machines(context_BF).unsqueeze(1) - self.machine_table.unsqueeze(0)
        return off_BSE.abs().amax(dim=2) < self.same

    @torch.jit.export
    def predict(self, context_BF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, A) ln(time / NCCL's default), and its spread (inf: unknown)."""
        numbers_BAR, cells_BA, cost_BA, known_BA = self.rows(context_BF)
        z_BA, spread_BA = torch.zeros_like(cost_BA), torch.full_like(cost_BA, float("inf"))
        found_BS = self.find_machines(context_BF)
        collective_B = self.rows.collectives(context_BF)
        for index, model in enumerate(self.models):
            is_mine = found_BS[:, self.block_machines[index]]
            is_mine = is_mine & (collective_B == self.block_collectives[index])
            mine = torch.nonzero(is_mine).flatten()
            for start in range(0, mine.numel(), self.part):
                part = mine[start : start + self.part]
                mean, spread = model(numbers_BAR[part], cells_BA[part])
                if self.block_costs[index]:
                    known = known_BA[part]
                    mean = (mean + cost_BA[part]).masked_fill(~known, self.worst)
                    # Without the cost of NCCL's own choice there is nothing to compare with.
                    spread = spread.masked_fill(~known[:, :1], float("inf"))
                mean = mean + self.slowdown(context_BF[part], cells_BA[part], index)
                z_BA[part] = mean - mean[:, :1]
                spread_BA[part] = spread
        return z_BA, spread_BA

    @torch.jit.export
    def slowdown(
        self, context_BF: torch.Tensor, cells_BA: torch.Tensor, block: int
    ) -> torch.Tensor:
        """(B, A) ln(current / quiet time) of each config on a block's machine."""
        shares_CO = self.level_shares[self.block_machines[block], self.block_collectives[block]]
        octave_B = context_BF[:, self.rows.size].to(torch.int64).clamp(0, shares_CO.size(1) - 1)
        share_BA = shares_CO[cells_BA, octave_B.unsqueeze(1)]
        level_B = self.rows.levels(context_BF)
        if self.level_threshold > 0.0:
            level_B = (level_B > self.level_threshold).to(level_B.dtype) * self.disturbed
        return torch.log1p(share_BA * level_B.unsqueeze(1))
