"""The exported policy: tables by machine and collective, and how sure a gain must be to act.

B batch, K calls in the window, W features of a call, F features of the context, A actions,
S machines, E features of a machine, C cells, O octaves of sizes
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from dynamiccl.belief import MIN_GAIN
from dynamiccl.train.cautious.rows import RowMaker
from dynamiccl.train.heads import MASKED_Q, Z_MAX, Z_MIN

#: ln of a time over NCCL's own that is never the least.
_WORST: Final = 50.0
#: Two machines' features that differ by less are one machine's.
_SAME: Final = 1e-4
#: The level that a threshold takes for disturbed: calls take 1.5 times as long.
_DISTURBED: Final = 0.5


@dataclass(frozen=True, slots=True)
class Block:
    """The tables of one collective on one machine."""

    machine: int  # row of the machines' table
    collective: int
    #: A `Tables` module.
    tables: nn.Module


class CautiousPolicy(nn.Module):
    """(window_BKW, context_BF, mask_BA) -> (action_B int64, q_BA); the window is not looked at.

    Where a Trigger tells an interference level, each config's time is longer by the share of it
    that its cell feels (`level_shares`). Of the configs whose gain over NCCL's own choice is more
    than MIN_GAIN, and more than so many spreads of that gain (`predict`), that of the largest is
    taken. Of machines and collectives that were not measured nothing is known, and NCCL's own
    choice stands.
    """

    machine_table: torch.Tensor
    level_shares: torch.Tensor

    def __init__(
        self,
        rows: RowMaker,
        machines_SE: torch.Tensor,
        blocks: Sequence[Block],
        level_shares_SNCO: torch.Tensor,
    ) -> None:
        """Put the tables together.

        `level_shares_SNCO`: the share of an interference level that slows each cell.
        """
        super().__init__()
        self.rows = rows
        self.register_buffer("machine_table", machines_SE)
        self.tables = nn.ModuleList([block.tables for block in blocks])
        self.block_machines = [block.machine for block in blocks]
        self.block_collectives = [block.collective for block in blocks]
        self.register_buffer("level_shares", level_shares_SNCO)
        #: Above it a level is taken for _DISTURBED, else for none; 0: it is taken as it is.
        self.level_threshold = 0.0
        self.disturbed = _DISTURBED
        self.min_gain = MIN_GAIN
        self.worst = _WORST
        self.same = _SAME
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
        z_BA, spread_BA, caution_B = self.predict(context_BF)
        allowed_BA = mask_BA > 0.5
        # Infinite caution times a spread of 0 would be no number.
        bar_BA = caution_B.unsqueeze(1) * spread_BA.clamp(min=1e-9)
        sure_BA = allowed_BA & (-z_BA > bar_BA.clamp(min=self.min_gain))
        # Where ABSTAIN itself is not allowed there is nothing to fall back on.
        sure_BA = torch.where(allowed_BA[:, :1], sure_BA, allowed_BA)
        best_B = z_BA.masked_fill(~sure_BA, float("inf")).argmin(dim=1)
        action_B = torch.where(sure_BA.any(dim=1), best_B, torch.zeros_like(best_B))
        q_BA = -torch.exp(z_BA.clamp(self.z_min, self.z_max)).to(torch.float32)
        return action_B, q_BA.masked_fill(~allowed_BA, self.masked_q)

    @torch.jit.export
    def find_machines(self, context_BF: torch.Tensor) -> torch.Tensor:
        """(B, S) whether each context is of each machine."""
        off_BSE = self.rows.machines(context_BF).unsqueeze(1) - self.machine_table.unsqueeze(0)
        return off_BSE.abs().amax(dim=2) < self.same

    @torch.jit.export
    def predict(self, context_BF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, A) ln(time / NCCL's default), and its spread (inf: unknown); spreads to act (B,)."""
        cells_BA, cost_BA = self.rows(context_BF)
        place_B3 = self.rows.places(context_BF)
        z_BA = torch.full_like(cost_BA, self.worst)
        z_BA[:, 0] = 0.0
        spread_BA = torch.full_like(cost_BA, float("inf"))
        caution_B = torch.full_like(cost_BA[:, 0], float("inf"))
        found_BS = self.find_machines(context_BF)
        collective_B = self.rows.collectives(context_BF)
        for index, tables in enumerate(self.tables):
            is_mine = found_BS[:, self.block_machines[index]]
            is_mine = is_mine & (collective_B == self.block_collectives[index])
            mine = torch.nonzero(is_mine).flatten()
            cost = cost_BA[mine]
            gain, spread, near, caution = tables(place_B3[mine], cost[:, :1] - cost)
            octave = place_B3[mine, 0].to(torch.int64)
            slower = self.slowdown(
                self.rows.levels(context_BF[mine]), octave, cells_BA[mine], index
            )
            z = slower - slower[:, :1] - gain
            z_BA[mine] = torch.where(near, z, torch.full_like(z, self.worst))
            z_BA[mine, 0] = 0.0
            spread_BA[mine] = spread
            caution_B[mine] = caution
        return z_BA, spread_BA, caution_B

    @torch.jit.export
    def slowdown(
        self, level_B: torch.Tensor, octave_B: torch.Tensor, cells_BA: torch.Tensor, block: int
    ) -> torch.Tensor:
        """(B, A) ln(current / quiet time) of each config on a block's machine."""
        shares_CO = self.level_shares[self.block_machines[block], self.block_collectives[block]]
        octave_B = octave_B.clamp(0, shares_CO.size(1) - 1)
        share_BA = shares_CO[cells_BA, octave_B.unsqueeze(1)]
        if self.level_threshold > 0.0:
            level_B = (level_B > self.level_threshold).to(level_B.dtype) * self.disturbed
        return torch.log1p(share_BA * level_B.unsqueeze(1))
