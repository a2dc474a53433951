"""The exported policy of tables by machine and collective.

B batch, K calls in the window, W features of a call, F features of the context, A actions, S
machines, E features of a machine, C cells, O octaves of sizes, H group shapes, L rows of a table (a
size of a shape each)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn

from dynamiccl.belief import MIN_GAIN, Bools
from dynamiccl.datasets.features import CONTEXT_COLUMN, FEATURES, STATIC_FEATURES, TUNED
from dynamiccl.drawn_worlds import Floats
from dynamiccl.nccl import NUM_ALGORITHMS, NUM_PROTOCOLS, Config
from dynamiccl.train.networks import COST_KNOWN, LOG_COST, MASKED_Q, Z_MAX, Z_MIN, ActionFeatures

#: The last algorithm and the last protocol are *unknown*.
NUM_ROW_CELLS: Final = (NUM_ALGORITHMS + 1) * (NUM_PROTOCOLS + 1)
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
        """Cells (B, A), and ln of NCCL's costs (B, A), NaN where unknown."""
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
        """(B, E) features; a table is of the machine with equal ones."""
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
    """The index of a cell."""
    return algorithm * (NUM_PROTOCOLS + 1) + protocol


def index_of(one_hot: torch.Tensor) -> torch.Tensor:
    """(B, A) index of the one in one-hot (B, A, K); K where all are zero."""
    last = (one_hot.sum(dim=2, keepdim=True) == 0.0).to(one_hot.dtype)
    return torch.cat([one_hot, last], dim=2).argmax(dim=2)


#: A row answers for sizes within a bin's width, in octaves.
_ROW_REACH: Final = 0.26
#: Octaves over which gains change.
_SHAPE_LENGTH: Final = 3.0
#: Cells whose costs differ by less, ln of time: NCCL logs one decimal, and may choose either.
_TIE: Final = 0.002
#: Shapes that differ by less, in octaves, are one; and machines' features.
_SAME: Final = 1e-4
#: Shapes near which a config must be measured, to act at a new shape.
LEAST_SHAPES: Final = 3
#: The least difference between two shapes' gains, ln of time.
LEAST_DIFFERENCE: Final = 0.02


@dataclass(frozen=True, slots=True)
class ShapeTable:
    """What is believed of one group shape."""

    shape: tuple[float, float]
    log2_sizes: Floats  # (L,)
    #: (L, A) ln of NCCL's time over the config's, and its spread; infinite: unknown.
    gain: Floats
    spread: Floats
    is_near: Bools  # (L, A) measured near enough to tell of other shapes
    may_act: Bools  # (L, A) the same, and a gain at the sizes around
    relative_cost: Floats  # (L, A) the gain that NCCL's costs foretell; NaN: not known
    is_cell: Bools  # (A,) asks for an algorithm and a protocol, and nothing else
    caution: float


class Tables(nn.Module):
    """(places_B3, gain by costs_BA) -> gains, spreads, is_near (B, A) and caution (B,).

    A shape that nobody measured has the gains of others by ordinary kriging (Cressie 1993, section
    3.2) over log2 of nodes and ranks, around NCCL's costs where these make the better guess.
    NCCL's own choice is another at each shape: where its costs tell which, a gain is no larger than
    over that cell, or the best that costs nearly as little.
    """

    shapes: torch.Tensor  # (H, 2)
    sizes: torch.Tensor  # (L,)
    is_of: torch.Tensor  # (L, H)
    gains: torch.Tensor  # (L, A), as the next four
    spreads: torch.Tensor
    nearness: torch.Tensor
    acting: torch.Tensor
    costs: torch.Tensor
    is_cell: torch.Tensor  # (A,)
    cautions: torch.Tensor  # (H,)
    inverse: torch.Tensor  # (H + 1, H + 1) of the kriging system

    def __init__(
        self,
        tables: Sequence[ShapeTable],
        *,
        differences: tuple[float, float],
        elsewhere: float,
    ) -> None:
        """`differences`: ln of time between gains of far shapes, plain and less NCCL's costs."""
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
            "is_cell": tables[0].is_cell,
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
        self.tie = _TIE

    def forward(
        self, place_B3: torch.Tensor, cost_BA: torch.Tensor, acts: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As the class; with `acts` of a measured shape only what may act is near."""
        apart_BL = (place_B3[:, :1] - self.sizes.unsqueeze(0)).abs()
        of_BLH = apart_BL.unsqueeze(2).masked_fill(~self.is_of.unsqueeze(0), float("inf"))
        apart_BH, row_BH = of_BLH.min(dim=1)
        has_BH1 = (apart_BH < self.reach).unsqueeze(2)
        off_BH2 = place_B3[:, 1:].unsqueeze(1) - self.shapes.unsqueeze(0)
        same_BH = off_BH2.abs().amax(dim=2) < self.same
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
        own = self.acting if acts else self.nearness
        near_BHA = torch.where(new_B11, self.nearness[row_BH], own[row_BH]) & has_BH1
        count_BA = (near_BHA & (same_BH.unsqueeze(2) | new_B11)).sum(dim=1)
        near_BA = count_BA >= torch.where(known_B1, 1, self.least_shapes)
        cell_BA = near_BA & self.is_cell.unsqueeze(0) & ~known_B1
        is_told_B1 = (cell_BA & (cost_BA >= -self.same)).any(dim=1, keepdim=True)
        own_BA = gain_BA.masked_fill(~(cell_BA & (cost_BA >= -self.tie)), float("-inf"))
        own_B1 = own_BA.max(dim=1, keepdim=True)[0].clamp(min=0.0)
        gain_BA = torch.where(is_told_B1, gain_BA - own_B1, gain_BA)
        own_BH = self.cautions.unsqueeze(0).masked_fill(~same_BH, 0.0)
        caution_B = own_BH.sum(dim=1)
        elsewhere_B = torch.full_like(caution_B, self.elsewhere)
        caution_B = torch.where(known_B1.squeeze(1), caution_B, elsewhere_B)
        spread_BA = torch.sqrt(variance_BA).masked_fill(~near_BA, float("inf"))
        return gain_BA, spread_BA, near_BA, caution_B

    @torch.jit.export
    def alike(self, shape_B2: torch.Tensor) -> torch.Tensor:
        """(B, H) correlation with measured shapes."""
        apart_BH2 = shape_B2.unsqueeze(1) - self.shapes.unsqueeze(0)
        # Exponential: a smoother one would follow slopes beyond what was measured.
        return torch.exp(-torch.sqrt(torch.square(apart_BH2).sum(dim=2)) / self.length)

    @torch.jit.export
    def weights(self, shape_B2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (B, H) of measured shapes, with the sum 1, and what is left (B,) unknown."""
        alike_BH = self.alike(shape_B2)
        asked = torch.cat([alike_BH, torch.ones_like(alike_BH[:, :1])], dim=1)
        found = asked @ self.inverse
        left_B = (1.0 - (asked * found).sum(dim=1)).clamp(min=0.0)
        return found[:, :-1], left_B


_WORST: Final = 50.0
_DISTURBED: Final = 0.5


class CautiousPolicy(nn.Module):
    """(window_BKW, context_BF, mask_BA) -> (action_B int64, q_BA), whatever the window.

    Under interference each config's time grows by the share of the level that its cell feels
    (`level_shares`). The largest gain over NCCL's own choice that exceeds MIN_GAIN and so many of
    its spreads (`predict`) is taken. On unmeasured machines NCCL's own choice stands.
    """

    machine_table: torch.Tensor
    level_shares: torch.Tensor

    def __init__(
        self,
        rows: RowMaker,
        machines_SE: torch.Tensor,
        blocks: Sequence[tuple[int, int, Tables]],
        level_shares_SNCO: torch.Tensor,
    ) -> None:
        """`blocks`: a machine's row of `machines_SE`, a collective, and their tables."""
        super().__init__()
        self.rows = rows
        self.register_buffer("machine_table", machines_SE)
        self.tables = nn.ModuleList([tables for _, _, tables in blocks])
        self.block_machines = [machine for machine, _, _ in blocks]
        self.block_collectives = [collective for _, collective, _ in blocks]
        self.register_buffer("level_shares", level_shares_SNCO)
        #: A level above it is taken for _DISTURBED, else for none; 0: as it is.
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
        """(action_B, q_BA)."""
        z_BA, spread_BA, caution_B = self.predict(context_BF, acts=True)
        allowed_BA = mask_BA > 0.5
        # Infinite caution times a spread of 0 would be NaN.
        bar_BA = caution_B.unsqueeze(1) * spread_BA.clamp(min=1e-9)
        sure_BA = allowed_BA & (-z_BA > bar_BA.clamp(min=self.min_gain))
        # Where ABSTAIN is not allowed there is nothing to fall back on.
        sure_BA = torch.where(allowed_BA[:, :1], sure_BA, allowed_BA)
        best_B = z_BA.masked_fill(~sure_BA, float("inf")).argmin(dim=1)
        action_B = torch.where(sure_BA.any(dim=1), best_B, torch.zeros_like(best_B))
        q_BA = -torch.exp(z_BA.clamp(self.z_min, self.z_max)).to(torch.float32)
        return action_B, q_BA.masked_fill(~allowed_BA, self.masked_q)

    @torch.jit.export
    def believed(self, context_BF: torch.Tensor) -> torch.Tensor:
        """(B, A) ln(time / NCCL's default), of what may not act too; NaN: not near enough."""
        z_BA, spread_BA, _ = self.predict(context_BF, acts=False)
        return z_BA.masked_fill(torch.isinf(spread_BA), float("nan"))

    @torch.jit.export
    def predict(
        self, context_BF: torch.Tensor, acts: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, A) ln(time / NCCL's default), its spread (inf: unknown), and spreads to act (B,)."""
        cells_BA, cost_BA = self.rows(context_BF)
        place_B3 = self.rows.places(context_BF)
        z_BA = torch.full_like(cost_BA, self.worst)
        z_BA[:, 0] = 0.0
        spread_BA = torch.full_like(cost_BA, float("inf"))
        caution_B = torch.full_like(cost_BA[:, 0], float("inf"))
        off_BSE = self.rows.machines(context_BF).unsqueeze(1) - self.machine_table.unsqueeze(0)
        found_BS = off_BSE.abs().amax(dim=2) < self.same
        collective_B = self.rows.collectives(context_BF)
        for index, tables in enumerate(self.tables):
            is_mine = found_BS[:, self.block_machines[index]]
            is_mine = is_mine & (collective_B == self.block_collectives[index])
            mine = torch.nonzero(is_mine).flatten()
            cost = cost_BA[mine]
            gain, spread, near, caution = tables(place_B3[mine], cost[:, :1] - cost, acts)
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
