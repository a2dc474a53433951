"""The tables of one collective on one machine, and what they say of shapes that nobody measured.

H group shapes, L rows (a size of a shape each), B batch, A actions
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
#: How far in octaves a row answers for a size: the width of a size bin.
_ROW_REACH: Final = 0.26
#: Octaves of nodes and ranks a node over which gains change.
_SHAPE_LENGTH: Final = 1.5
#: Shapes that differ by less, in octaves, are one.
_SAME: Final = 1e-4
#: Shapes in which a config must be near what was measured for a shape that nobody measured.
LEAST_SHAPES: Final = 3
#: Two shapes' gains differ by this at least, ln of time, however alike those measured are.
LEAST_DIFFERENCE: Final = 0.02


@dataclass(frozen=True, slots=True)
class ShapeTable:
    """What is believed of one group shape: L rows, A actions of the catalogue."""

    #: Log2 of nodes and of ranks a node.
    shape: tuple[float, float]
    log2_sizes: Float64Array  # (L,)
    #: (L, A) ln of NCCL's own time over the config's, and the spread of it; infinite: not known.
    gain: Float64Array
    spread: Float64Array
    is_near: BoolArray  # (L, A) measured near enough to act
    relative_cost: Float64Array  # (L, A) the gain that NCCL's costs foretell; NaN: not known
    caution: float


class Tables(nn.Module):
    """(places_B3, gain by costs_BA) -> gains, spreads, is_near (B, A) and caution (B,); scriptable.

    A shape that nobody measured has the gains of the others, weighted by ordinary kriging (Cressie
    1993, section 3.2) over log2 of nodes and ranks, around what NCCL's costs foretell if that is
    the better guess; its spread is that of theirs and of what shapes differ by.
    """

    shape_H2: torch.Tensor
    size_L: torch.Tensor
    of_LH: torch.Tensor
    gain_LA: torch.Tensor
    spread_LA: torch.Tensor
    near_LA: torch.Tensor
    cost_LA: torch.Tensor
    caution_H: torch.Tensor
    inverse: torch.Tensor

    def __init__(
        self,
        tables: Sequence[ShapeTable],
        *,
        uses_cost: bool,
        difference: float,
        elsewhere: float,
    ) -> None:
        """`difference`: ln of time between shapes far apart; `elsewhere`: caution at new shapes."""
        super().__init__()
        of = np.concatenate([np.full(len(t.log2_sizes), h) for h, t in enumerate(tables)])
        cost = np.concatenate([each.relative_cost for each in tables])
        parts = {
            "shape_H2": np.array([each.shape for each in tables]),
            "size_L": np.concatenate([each.log2_sizes for each in tables]),
            "of_LH": of[:, None] == np.arange(len(tables)),
            "gain_LA": np.concatenate([each.gain for each in tables]),
            "spread_LA": np.concatenate([each.spread for each in tables]),
            "near_LA": np.concatenate([each.is_near for each in tables]),
            "cost_LA": cost if uses_cost else np.zeros_like(cost),
            "caution_H": np.array([each.caution for each in tables]),
        }
        for name, values in parts.items():
            self.register_buffer(name, torch.from_numpy(values))
        count = len(tables)
        system = torch.ones(count + 1, count + 1, dtype=torch.float64)
        system[:count, :count] = self.alike(self.shape_H2)
        system[count, count] = 0.0
        self.register_buffer("inverse", torch.linalg.pinv(system))
        self.uses_cost, self.difference, self.elsewhere = uses_cost, difference, elsewhere
        self.reach, self.same, self.least_shapes = _ROW_REACH, _SAME, LEAST_SHAPES
        self.length = _SHAPE_LENGTH

    def forward(
        self, place_B3: torch.Tensor, cost_BA: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """See the class."""
        apart_BL = (place_B3[:, :1] - self.size_L.unsqueeze(0)).abs()
        of_BLH = apart_BL.unsqueeze(2).masked_fill(~self.of_LH.unsqueeze(0), float("inf"))
        apart_BH, row_BH = of_BLH.min(dim=1)
        has_BH1 = (apart_BH < self.reach).unsqueeze(2)
        same_BH = self.is_same(place_B3)
        known_B1 = same_BH.any(dim=1, keepdim=True)
        weight_BH, left_B = self.weights(place_B3[:, 1:])
        weight_BH = torch.where(known_B1, same_BH.to(weight_BH.dtype), weight_BH)
        left_B = left_B.masked_fill(known_B1.squeeze(1), 0.0)
        new_B11 = (~known_B1).unsqueeze(2)
        if not self.uses_cost:
            cost_BA = torch.zeros_like(cost_BA)
        shift_BHA = torch.where(new_B11, cost_BA.unsqueeze(1) - self.cost_LA[row_BH], 0.0)
        used_BH1 = (weight_BH != 0.0).unsqueeze(2)
        gain_BHA = torch.where(used_BH1, self.gain_LA[row_BH] + shift_BHA, 0.0)
        spread_BHA = torch.where(used_BH1, self.spread_LA[row_BH], 0.0)
        gain_BA = (weight_BH.unsqueeze(2) * gain_BHA).sum(dim=1)
        variance_BA = torch.square(weight_BH.unsqueeze(2) * spread_BHA).sum(dim=1)
        variance_BA = variance_BA + (self.difference**2 * left_B).unsqueeze(1)
        near_BHA = self.near_LA[row_BH] & has_BH1
        count_BA = (near_BHA & (same_BH.unsqueeze(2) | new_B11)).sum(dim=1)
        near_BA = count_BA >= torch.where(known_B1, 1, self.least_shapes)
        # NCCL's costs of a new shape may not be known.
        near_BA = near_BA & ~torch.isnan(gain_BA)
        own_BH = self.caution_H.unsqueeze(0).masked_fill(~same_BH, 0.0)
        caution_B = own_BH.sum(dim=1)
        elsewhere_B = torch.full_like(caution_B, self.elsewhere)
        caution_B = torch.where(known_B1.squeeze(1), caution_B, elsewhere_B)
        spread_BA = torch.sqrt(variance_BA).masked_fill(~near_BA, float("inf"))
        return torch.nan_to_num(gain_BA), spread_BA, near_BA, caution_B

    @torch.jit.export
    def is_same(self, place_B3: torch.Tensor) -> torch.Tensor:
        """(B, H) which measured shape a place is of."""
        off_BH2 = place_B3[:, 1:].unsqueeze(1) - self.shape_H2.unsqueeze(0)
        return off_BH2.abs().amax(dim=2) < self.same

    @torch.jit.export
    def alike(self, shape_B2: torch.Tensor) -> torch.Tensor:
        """(B, H) correlation of shapes with those measured."""
        apart_BH2 = (shape_B2.unsqueeze(1) - self.shape_H2.unsqueeze(0)) / self.length
        return torch.exp(-0.5 * torch.square(apart_BH2).sum(dim=2))

    @torch.jit.export
    def weights(self, shape_B2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (B, H) of the measured shapes, which sum to 1, and what is left (B,) unknown."""
        alike_BH = self.alike(shape_B2)
        asked = torch.cat([alike_BH, torch.ones_like(alike_BH[:, :1])], dim=1)
        found = asked @ self.inverse
        left_B = (1.0 - (asked * found).sum(dim=1)).clamp(min=0.0)
        return found[:, :-1], left_B
