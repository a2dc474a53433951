"""The exported policy of networks that acts only where it is confident not to be slower.

E members of the ensemble, B batch, K calls in the window, W features of a call, F features of
the context, A actions, S places, P columns that tell a place
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from dynamiccl.datasets.costs import NUM_CELLS
from dynamiccl.datasets.features import WINDOW_LENGTH
from dynamiccl.datasets.history_columns import WINDOW_COLUMN, WINDOW_FEATURES
from dynamiccl.train.cautious.caution import MIN_GAIN
from dynamiccl.train.heads import MASKED_Q, Z_MAX, Z_MIN, Member
from dynamiccl.train.policy_module import PolicyMember

#: ln of time: members agree by chance, and are never surer than that.
LEAST_SPREAD: Final = 0.01
#: Features of two places that differ by less are one place's.
_SAME: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Places:
    """Measured machines and group shapes, and the confidence threshold for each."""

    columns: torch.Tensor  # (P,) of a context
    table: torch.Tensor  # (S, P)
    #: (S, 2) spreads that a gain must have: where NCCL's costs are known, and where they are not.
    caution: torch.Tensor
    #: Where NCCL's costs begin in a context, -1 = not there.
    cost_start: int


class SurePolicyModule(nn.Module):
    """(window_BKW, context_BF, mask_BA) -> (action_B int64, q_BA).

    The members' mean picks the best allowed action. Cold, it is taken where its gain over NCCL's
    own choice is more than MIN_GAIN, and more than so many spreads, on the machine and the group
    shape of the context; where these were not measured, nowhere. Warm, with calls in the window, it
    is taken where the gain is more than `warm_margin`, as by `PolicyModule`.
    """

    columns: torch.Tensor
    table: torch.Tensor
    caution: torch.Tensor

    def __init__(self, members: Iterable[Member], places: Places, warm_margin: float) -> None:
        """Make the policy of an ensemble of trained networks."""
        super().__init__()
        self.members = nn.ModuleList([PolicyMember(member) for member in members])
        self.register_buffer("columns", places.columns)
        self.register_buffer("table", places.table)
        self.register_buffer("caution", places.caution)
        self.cost_start = places.cost_start
        self.num_cells = NUM_CELLS
        self.warm_margin = float(warm_margin)
        self.min_gain = MIN_GAIN
        self.least_spread = LEAST_SPREAD
        self.same = _SAME
        self.valid = WINDOW_COLUMN["valid"]
        self.num_calls, self.num_features = WINDOW_LENGTH, len(WINDOW_FEATURES)
        self.masked_q = MASKED_Q
        self.z_min = Z_MIN
        self.z_max = Z_MAX

    def forward(
        self, window_BKW: torch.Tensor, context_BF: torch.Tensor, mask_BA: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(action_B, q_BA); see the class."""
        z_EBA = self.ask(window_BKW, context_BF)
        gain_BA, spread_BA = gains(z_EBA, self.least_spread)
        allowed_BA = mask_BA > 0.5
        best_B1 = gain_BA.masked_fill(~allowed_BA, -float("inf")).argmax(dim=1, keepdim=True)
        sure_B1 = self.caution_of(context_BF) * spread_BA.gather(1, best_B1)
        cold_B1 = window_BKW[:, -1, self.valid : self.valid + 1] < 0.5
        wanted_B1 = torch.where(
            cold_B1, sure_B1.clamp(min=self.min_gain), torch.full_like(sure_B1, self.warm_margin)
        )
        # Where ABSTAIN itself is not allowed there is nothing to fall back on.
        abstain_B1 = (gain_BA.gather(1, best_B1) <= wanted_B1) & allowed_BA[:, :1]
        action_B = torch.where(abstain_B1, torch.zeros_like(best_B1), best_B1).squeeze(1)
        q_BA = -torch.exp(z_EBA.mean(dim=0).clamp(self.z_min, self.z_max))
        return action_B, q_BA.masked_fill(~allowed_BA, self.masked_q)

    @torch.jit.export
    def ask(self, window_BKW: torch.Tensor, context_BF: torch.Tensor) -> torch.Tensor:
        """(E, B, A) ln(time / reference) by each member."""
        z_list = [member(window_BKW, context_BF) for member in self.members]
        return torch.stack(z_list)

    @torch.jit.export
    def predict(self, context_BF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, A) ln(time / NCCL's default), cold, and its spread."""
        window_BKW = context_BF.new_zeros([context_BF.size(0), self.num_calls, self.num_features])
        gain_BA, spread_BA = gains(self.ask(window_BKW, context_BF), self.least_spread)
        return -gain_BA, spread_BA

    @torch.jit.export
    def caution_of(self, context_BF: torch.Tensor) -> torch.Tensor:
        """(B, 1) threshold: spreads by which a gain must exceed 0; inf: unmeasured."""
        here_BP = context_BF.index_select(1, self.columns)
        off_BSP = (here_BP.unsqueeze(1) - self.table.unsqueeze(0)).abs()
        found_BS = off_BSP.amax(dim=2) < self.same
        without_BS = torch.where(found_BS, self.caution[:, 1].unsqueeze(0), float("inf"))
        wanted_B1 = without_BS.amin(dim=1, keepdim=True)
        if self.cost_start >= 0:
            with_BS = torch.where(found_BS, self.caution[:, 0].unsqueeze(0), float("inf"))
            costs_BC = context_BF[:, self.cost_start : self.cost_start + self.num_cells]
            known_B1 = (costs_BC != 0.0).any(dim=1, keepdim=True)
            wanted_B1 = torch.where(known_B1, with_BS.amin(dim=1, keepdim=True), wanted_B1)
        return wanted_B1


def gains(z_EBA: torch.Tensor, least: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, A) gain over NCCL's own choice in ln(time): the members' mean, and their spread.

    The spread includes `least` beside the members' standard deviation.
    """
    gain_EBA = z_EBA[:, :, :1] - z_EBA
    off_EBA = gain_EBA - gain_EBA.mean(dim=0, keepdim=True)
    variance_BA = (off_EBA * off_EBA).sum(dim=0) / float(max(z_EBA.size(0) - 1, 1))
    return gain_EBA.mean(dim=0), torch.sqrt(variance_BA + least * least)
