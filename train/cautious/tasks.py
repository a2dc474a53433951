"""Measured tasks as the tables of a belief: by machine, collective and group shape.

T tasks, A actions, S machines, N collectives, C cells, O octaves of sizes
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
import polars as pl
import torch

from dynamiccl.belief import Bools
from dynamiccl.datasets.cells import TaskGrid, task_grid
from dynamiccl.datasets.features import TUNED, cold_observations, log_costs
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.steps import with_noise
from dynamiccl.drawn_worlds import Floats, Grid, Ints, fits
from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from dynamiccl.sizes import bin_center_bytes, size_bin
from dynamiccl.train.cautious.policy import NUM_ROW_CELLS, RowMaker, cell_of
from dynamiccl.train.data import TrainingData

#: Sizes from 1 byte to 2^63 of them.
_OCTAVES: Final = 64
_NUMBER: Final = {collective: index for index, collective in enumerate(TUNED)}


def share_table(shares: pl.DataFrame | None, systems: Sequence[str]) -> torch.Tensor:
    """(S, N, C, O) of the shares that `level_shares_of` gives; S as `systems` has them.

    A cell has the share of the nearest octave that was recorded, of its own collective before
    another's; 1 where there is none. Where all shares are 1 a level changes no choice. What
    NCCL's own choice runs is not always known: then it counts as feeling nothing, and stands.
    """
    found = np.ones((len(systems), len(TUNED), NUM_ROW_CELLS, _OCTAVES))
    if shares is None:
        return torch.from_numpy(found)
    octaves = np.arange(_OCTAVES)
    for machine, system in enumerate(systems):
        mine = shares.filter(pl.col("system") == system)
        if mine.is_empty():
            continue
        is_told = np.zeros((len(TUNED), NUM_ROW_CELLS), dtype=np.bool_)
        for (collective, algorithm, protocol), rows in mine.group_by(
            "collective", "algorithm", "protocol", maintain_order=True
        ):
            number = _NUMBER[Collective.parse(str(collective))]
            cell = cell_of(Algorithm.parse(str(algorithm)), Protocol.parse(str(protocol)))
            at, share = rows["octave"].to_numpy(), rows["share"].to_numpy()
            nearest = np.abs(octaves[:, None] - at[None, :]).argmin(axis=1)
            found[machine, number, cell] = share[nearest]
            is_told[number, cell] = True
        for one in np.flatnonzero(is_told.any(axis=0)):
            told = is_told[:, one]
            found[machine, ~told, one] = found[machine, told, one].mean(axis=0)
        # The last algorithm and the last protocol of a row's cells are the unknown ones.
        found[machine, :, cell_of(len(Algorithm), len(Protocol))] = 0.0
    return torch.from_numpy(found)


#: The (algorithm, protocol) pairs of NCCL's cost table, in the order of `log_costs`.
CELLS: Final = tuple((algorithm, protocol) for algorithm in Algorithm for protocol in Protocol)


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one collective on one group shape of a machine."""

    machine: int
    collective: int
    shape: tuple[float, float]  # log2 of nodes and of ranks a node
    #: (S,) sizes that a table is made for, and the n places (size, action of `actions`) measured.
    grid: Grid
    #: The catalogue's actions that are the grid's configs.
    actions: Ints
    places: Ints
    log_us: Floats
    variance: Floats
    repeats: Floats
    #: (S, A) the gain that NCCL's costs foretell; NaN: not known.
    relative_cost: Floats

    def only(self, kept: Bools) -> "Measured":
        """With the measurements marked in `kept` (n,)."""
        names = ("places", "log_us", "variance", "repeats")
        return replace(self, **{name: getattr(self, name)[kept] for name in names})


@dataclass(frozen=True, slots=True)
class Tasks:
    """T tasks of the training and validation bins, and where they belong."""

    data: TrainingData
    grid: TaskGrid
    maker: RowMaker
    is_train: Bools
    #: The machine of each task, and the features of each machine.
    machine: Ints
    machines: torch.Tensor
    collective: Ints
    #: (T, 3) log2 of size, nodes and ranks a node.
    place: Floats
    #: How much of an interference level each cell feels.
    level_shares: torch.Tensor

    @classmethod
    def of(cls, data: TrainingData) -> Self:
        """The tasks of a data set."""
        grid = task_grid(data.frame, data.catalogue, [Split.TRAIN, Split.VALIDATION])
        maker = RowMaker(data.catalogue.configs, len(data.profiles), costs=data.costs is not None)
        maker.eval()
        asked = with_noise(grid.tasks, data.training.noise)
        told = torch.from_numpy(cold_observations(asked, data.profiles, data.costs).context)
        with torch.no_grad():
            machines, machine = torch.unique(maker.machines(told), dim=0, return_inverse=True)
        first = np.unique(machine.numpy(), return_index=True)[1]
        return cls(
            data,
            grid,
            maker,
            (grid.tasks["split"] == Split.TRAIN.value).to_numpy(),
            machine.numpy(),
            machines,
            maker.collectives(told).numpy(),
            maker.places(told).numpy(),
            share_table(data.level_shares, grid.tasks["system"].gather(first).to_list()),
        )

    def tables(self) -> Iterator[tuple[Measured, Bools]]:
        """Each collective and shape of each machine, and which measurements are of training."""
        key = np.column_stack([self.machine, self.collective, self.place[:, 1:]])
        for found in np.unique(key, axis=0):
            yield self._table(np.flatnonzero((key == found).all(axis=1)))

    def _table(self, rows: Ints) -> tuple[Measured, Bools]:
        sizes = self.grid.tasks["size_bytes"].to_numpy()[rows]
        bins = [size_bin(int(size)) for size in sizes]
        between = set(range(min(bins), max(bins) + 1)) - set(bins)
        asked = np.unique([*sizes, *map(bin_center_bytes, sorted(between))])
        actions = np.flatnonzero(self.grid.mask[rows].any(axis=0))
        configs = tuple(self.data.catalogue.configs[action] for action in actions)
        at, log2_sizes = np.searchsorted(asked, sizes), np.log2(asked).tolist()
        places, log_us, variance, repeats, task = self.grid.cells(rows, at, actions, log2_sizes)
        grid, relative = self._grid(int(rows[0]), asked, configs)
        first = self.place[rows[0]]
        measured = Measured(
            int(self.machine[rows[0]]),
            int(self.collective[rows[0]]),
            (float(first[1]), float(first[2])),
            grid,
            actions,
            places,
            log_us,
            variance,
            repeats,
            relative,
        )
        return measured, self.is_train[task]

    def _grid(self, row: int, sizes: Ints, configs: Sequence[Config]) -> tuple[Grid, Floats]:
        """The grid of a table, and the gains that NCCL's costs foretell."""
        log2_sizes, relative = np.log2(sizes), np.full((len(sizes), len(configs)), np.nan)
        plain = Grid(tuple(log2_sizes.tolist()), tuple(configs))
        if self.data.costs is None:
            return plain, relative
        like = self.grid.tasks[[row] * len(sizes)].with_columns(size_bytes=sizes)
        costs = log_costs(like, self.data.costs).astype(np.float64)
        costs[costs == 0.0] = np.nan
        if np.isnan(costs).all(axis=1).any():
            return plain, relative
        cheapest = np.nanargmin(costs, axis=1)
        grid = replace(plain, own=tuple(CELLS[cell] for cell in cheapest))
        columns = [CELLS.index(cell) for cell in grid.cells]
        told = tuple(map(tuple, costs[:, columns].tolist()))
        for number, config in enumerate(configs):
            fitting = [
                number
                for number, each in enumerate(CELLS)
                if fits(each, config.algorithm, config.protocol)
            ]
            known = np.isfinite(costs[:, fitting]).any(axis=1)
            least = np.nanmin(costs[known][:, fitting], axis=1) if known.any() else np.empty(0)
            relative[known, number] = np.nanmin(costs[known], axis=1) - least
        return replace(grid, log_costs=told), relative
