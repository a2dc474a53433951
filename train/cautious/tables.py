"""The tables of one collective on one machine, and what they say of shapes that nobody measured.

H group shapes, L rows (a size of a shape each), B batch, A actions
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn

from dynamiccl.belief import Bools
from dynamiccl.drawn_worlds import Floats

#: How far in octaves a row answers for a size: the width of a size bin.
_ROW_REACH: Final = 0.26
#: Octaves of nodes and ranks a node over which gains change.
_SHAPE_LENGTH: Final = 3.0
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
    log2_sizes: Floats  # (L,)
    #: (L, A) ln of NCCL's own time over the config's, and the spread of it; infinite: not known.
    gain: Floats
    spread: Floats
    is_near: Bools  # (L, A) measured near enough to tell of other shapes
    may_act: Bools  # (L, A) the same, and a gain at the sizes around
    relative_cost: Floats  # (L, A) the gain that NCCL's costs foretell; NaN: not known
    caution: float


class Tables(nn.Module):
    """(places_B3, gain by costs_BA) -> gains, spreads, is_near (B, A) and caution (B,); scriptable.

    A shape that nobody measured has the gains of the others, weighted by ordinary kriging (Cressie
    1993, section 3.2) over log2 of nodes and ranks, around what NCCL's costs foretell where these
    are known and make the better guess; its spread is that of theirs and of what shapes differ by.
    """

    shapes: torch.Tensor  # (H, 2)
    sizes: torch.Tensor  # (L,)
    is_of: torch.Tensor  # (L, H)
    gains: torch.Tensor  # (L, A), as the next four
    spreads: torch.Tensor
    nearness: torch.Tensor
    acting: torch.Tensor
    costs: torch.Tensor
    cautions: torch.Tensor  # (H,)
    inverse: torch.Tensor  # (H + 1, H + 1) of the kriging system

    def __init__(
        self,
        tables: Sequence[ShapeTable],
        *,
        differences: tuple[float, float],
        elsewhere: float,
    ) -> None:
        """Put tables together.

        `differences`: ln of time between the gains of shapes far apart, and between what these are
        off NCCL's costs; `elsewhere`: caution at new shapes.
        """
        super().__init__()
        of = np.concatenate([np.full(len(t.log2_sizes), h) for h, t in enumerate(tables)])
        parts = {
            "shapes": np.array([each.shape for each in tables]),
            "sizes": np.concatenate([each.log2_sizes for each in tables]),
            "is_of": of[:, None] == np.arange(len(tables)),
            "gains": np.concatenate([each.gain for each in tables]),
            "spreads": np.concatenate([each.spread for each in tables]),
            "nearness": np.concatenate([each.is_near for each in tables]),
            "acting": np.concatenate([each.may_act for each in tables]),
            # Infinite, since NaN is not equal to itself and equal fits have equal files.
            "costs": np.nan_to_num(
                np.concatenate([each.relative_cost for each in tables]), nan=np.inf
            ),
            "cautions": np.array([each.caution for each in tables]),
        }
        for name, values in parts.items():
            self.register_buffer(name, torch.from_numpy(values))
        self.length = _SHAPE_LENGTH
        count = len(tables)
        system = torch.ones(count + 1, count + 1, dtype=torch.float64)
        system[:count, :count] = self.alike(self.shapes)
        system[count, count] = 0.0
        self.register_buffer("inverse", torch.linalg.pinv(system))
        self.plain, self.by_cost = differences
        self.elsewhere = elsewhere
        self.reach, self.same, self.least_shapes = _ROW_REACH, _SAME, LEAST_SHAPES

    def forward(
        self, place_B3: torch.Tensor, cost_BA: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """See the class."""
        apart_BL = (place_B3[:, :1] - self.sizes.unsqueeze(0)).abs()
        of_BLH = apart_BL.unsqueeze(2).masked_fill(~self.is_of.unsqueeze(0), float("inf"))
        apart_BH, row_BH = of_BLH.min(dim=1)
        has_BH1 = (apart_BH < self.reach).unsqueeze(2)
        same_BH = self.is_same(place_B3)
        known_B1 = same_BH.any(dim=1, keepdim=True)
        weight_BH, left_B = self.weights(place_B3[:, 1:])
        weight_BH = torch.where(known_B1, same_BH.to(weight_BH.dtype), weight_BH)
        left_B = left_B.masked_fill(known_B1.squeeze(1), 0.0)
        new_B11 = (~known_B1).unsqueeze(2)
        shift_BHA = cost_BA.unsqueeze(1) - self.costs[row_BH]
        used_BH1 = (weight_BH != 0.0).unsqueeze(2)
        by_cost_BA = torch.isfinite(shift_BHA).logical_or(~used_BH1).all(dim=1) & ~known_B1
        if self.by_cost >= self.plain:
            by_cost_BA = torch.zeros_like(by_cost_BA)
        shift_BHA = torch.where(by_cost_BA.unsqueeze(1), shift_BHA, 0.0)
        gain_BHA = torch.where(used_BH1, self.gains[row_BH] + shift_BHA, 0.0)
        spread_BHA = torch.where(used_BH1, self.spreads[row_BH], 0.0)
        gain_BA = (weight_BH.unsqueeze(2) * gain_BHA).sum(dim=1)
        variance_BA = torch.square(weight_BH.unsqueeze(2) * spread_BHA).sum(dim=1)
        differs_BA = torch.where(by_cost_BA, self.by_cost, self.plain)
        variance_BA = variance_BA + torch.square(differs_BA) * left_B.unsqueeze(1)
        near_BHA = torch.where(new_B11, self.nearness[row_BH], self.acting[row_BH]) & has_BH1
        count_BA = (near_BHA & (same_BH.unsqueeze(2) | new_B11)).sum(dim=1)
        near_BA = count_BA >= torch.where(known_B1, 1, self.least_shapes)
        own_BH = self.cautions.unsqueeze(0).masked_fill(~same_BH, 0.0)
        caution_B = own_BH.sum(dim=1)
        elsewhere_B = torch.full_like(caution_B, self.elsewhere)
        caution_B = torch.where(known_B1.squeeze(1), caution_B, elsewhere_B)
        spread_BA = torch.sqrt(variance_BA).masked_fill(~near_BA, float("inf"))
        return gain_BA, spread_BA, near_BA, caution_B

    @torch.jit.export
    def is_same(self, place_B3: torch.Tensor) -> torch.Tensor:
        """(B, H) which measured shape a place is of."""
        off_BH2 = place_B3[:, 1:].unsqueeze(1) - self.shapes.unsqueeze(0)
        return off_BH2.abs().amax(dim=2) < self.same

    @torch.jit.export
    def alike(self, shape_B2: torch.Tensor) -> torch.Tensor:
        """(B, H) correlation of shapes with those measured."""
        apart_BH2 = shape_B2.unsqueeze(1) - self.shapes.unsqueeze(0)
        # Exponential: a smoother one would follow slopes beyond the shapes that were measured.
        return torch.exp(-torch.sqrt(torch.square(apart_BH2).sum(dim=2)) / self.length)

    @torch.jit.export
    def weights(self, shape_B2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (B, H) of the measured shapes, which sum to 1, and what is left (B,) unknown."""
        alike_BH = self.alike(shape_B2)
        asked = torch.cat([alike_BH, torch.ones_like(alike_BH[:, :1])], dim=1)
        found = asked @ self.inverse
        left_B = (1.0 - (asked * found).sum(dim=1)).clamp(min=0.0)
        return found[:, :-1], left_B
