"""The table of a policy with the share of an interference level that slows each cell.

S machines, N collectives, C cells, O octaves of sizes
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import polars as pl
import torch

from dynamiccl.datasets.features import TUNED
from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.train.cautious.rows import NUM_ROW_CELLS, cell_of

#: Sizes from 1 byte to 2^63 of them.
_OCTAVES: Final = 64
_NUMBER: Final = {collective: index for index, collective in enumerate(TUNED)}


def share_table(shares: pl.DataFrame | None, systems: Sequence[str]) -> torch.Tensor:
    """(S, N, C, O) of the shares that `train.trigger.level_shares` gives; S as `systems` has them.

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
