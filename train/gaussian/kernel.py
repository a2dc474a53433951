"""The kernel: prior covariance of two (task, action) rows of one system and collective.

What is modelled is y, the ln of a time over what was expected of it. The covariance of two rows is

    (wave + trend) x shapes x cells x knobs  +  own

    wave, trend   squared exponentials in log2 size, of one length and of five times that
    shapes        squared exponentials in log2 nodes and log2 ranks a node
    cells         1 for the same algorithm and protocol, else a constant
    knobs         of channels and chunk: squared exponentials where both rows ask for them, a
                  constant where one does
    own           NCCL's own choice has an offset of its own: what it is called is no proof

Rasmussen and Williams 2006, chapters 2, 4 and 5. N and M rows, R = 6 numbers of a row: log2 size,
log2 nodes, log2 ranks a node, log2 channels and log2 chunk bytes (each plus 1, and 0 where not
asked for), and whether it is NCCL's own choice.
"""

import math
from typing import Final

import torch
from torch import nn

#: Where a row says whether it is NCCL's own choice.
_OWN: Final = 5
#: What the parameters begin with, and are pulled towards: lengths in octaves, spreads in ln time.
_BEGIN: Final = {
    "size_length": math.log(2.0),
    "nodes_length": math.log(1.5),
    "ranks_length": math.log(1.5),
    "knob_length": math.log(1.5),
    "wave_spread": math.log(0.2),
    "trend_spread": math.log(0.3),
    "own_spread": math.log(0.01),
    "noise_spread": math.log(0.03),
    "other_cell": -1.0,  # of a sigmoid
    "other_knob": 1.0,  # of a sigmoid
}
#: The trend is so much longer than the wave.
_TREND: Final = 5.0
#: How far a parameter may stray, as the spread of a normal prior around where it begins.
_PRIOR: Final = 1.5


class Kernel(nn.Module):
    """The covariance of rows, with its parameters; scriptable."""

    values: torch.Tensor

    def __init__(self) -> None:
        """Start with parameters that are typical of systems."""
        super().__init__()
        self.values = nn.Parameter(torch.tensor(list(_BEGIN.values()), dtype=torch.float64))

    def forward(
        self,
        rows_NR: torch.Tensor,
        cells_N: torch.Tensor,
        others_MR: torch.Tensor,
        cells_M: torch.Tensor,
    ) -> torch.Tensor:
        """(..., N, M) of rows (..., N, R) and (..., M, R), and their cells (..., N), (..., M)."""
        task, task_own = self.tasks(rows_NR, others_MR)
        config, config_own = self.configs(rows_NR, cells_N, others_MR, cells_M)
        return task * config + task_own * config_own

    @torch.jit.export
    def tasks(
        self, rows_NR: torch.Tensor, others_MR: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(..., N, M) the task factor of the covariance, and of its part `own`."""
        v = self.values
        apart = rows_NR[..., :3].unsqueeze(-2) - others_MR[..., :3].unsqueeze(-3)
        size = torch.square(apart[..., 0] * torch.exp(-v[0]))
        shapes = torch.square(apart[..., 1] * torch.exp(-v[1]))
        shapes = shapes + torch.square(apart[..., 2] * torch.exp(-v[2]))
        waves = torch.exp(2.0 * v[4] - 0.5 * size)
        waves = waves + torch.exp(2.0 * v[5] - 0.5 * size / 25.0)
        return waves * torch.exp(-0.5 * shapes), torch.exp(2.0 * v[6] - 0.5 * (size + shapes))

    @torch.jit.export
    def configs(
        self,
        rows_NR: torch.Tensor,
        cells_N: torch.Tensor,
        others_MR: torch.Tensor,
        cells_M: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(..., N, M) the config factor of the covariance, and of its part `own`."""
        v = self.values
        other_cell, other_knob = torch.sigmoid(v[8]), torch.sigmoid(v[9])
        same = (cells_N.unsqueeze(-1) == cells_M.unsqueeze(-2)).to(rows_NR.dtype)
        found = other_cell + (1.0 - other_cell) * same
        for knob in (3, 4):
            mine, other = rows_NR[..., knob].unsqueeze(-1), others_MR[..., knob].unsqueeze(-2)
            apart = mine - other
            near = torch.exp(-0.5 * torch.square(apart * torch.exp(-v[3])))
            near = other_knob + (1.0 - other_knob) * near
            asked = mine * other > 0.0
            neither = (apart == 0.0) & ~asked
            one = torch.where(neither, torch.ones_like(near), other_knob)
            found = found * torch.where(asked, near, one)
        return found, rows_NR[..., 5].unsqueeze(-1) * others_MR[..., 5].unsqueeze(-2)

    @torch.jit.unused
    def diagonal(self, rows_NR: torch.Tensor) -> torch.Tensor:
        """(N,) prior variance of each row."""
        spread = torch.exp(2.0 * self.values[4]) + torch.exp(2.0 * self.values[5])
        return spread + torch.exp(2.0 * self.values[6]) * rows_NR[:, _OWN]

    def noise(self) -> torch.Tensor:
        """Variance of one repeat."""
        return torch.exp(2.0 * self.values[7])

    @torch.jit.unused
    def penalty(self) -> torch.Tensor:
        """Negative log prior of the parameters."""
        begin = torch.tensor(list(_BEGIN.values()), dtype=torch.float64)
        return (torch.square((self.values - begin) / _PRIOR)).sum() / 2.0
