"""Tables of simulated systems for probing: observations, priors from other systems, and truth.

A table is one collective of a system's first group: B half-octave sizes from 1 KiB to 1 GiB, and A
configs, NCCL's own choice the first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from worlds import WORLDS

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.nccl import ABSTAIN, NUM_PROTOCOLS, Algorithm, Collective, Config
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.system import Call
from dynamiccl.simulator.systems import find_system
from dynamiccl.train.cautious.gaussian import Kernel, Posterior, fit_kernel
from dynamiccl.train.cautious.tasks import Rows

Floats = npt.NDArray[np.float64]

SYSTEMS: Final = {"b300": "b300-nvlink", "gb10": "gb10-roce", "a100": "a100-nvswitch"}
SIZES: Final = [int(2 ** (octave / 2)) for octave in range(20, 61)]
NOISE: Final = 0.02
#: What a time is expected to be before any probe: nothing is known; NCCL's cost; that, times the
#: residual that the other systems' tables have at the same place.
PRIORS: Final = ("flat", "costs", "policy")


@dataclass(frozen=True, slots=True)
class Table:
    """B sizes and A configs of one collective: kernel inputs, and true times."""

    configs: tuple[Config, ...]  # (A,)
    own: tuple[Config, ...]  # (B,) what NCCL's own choice comes to
    numbers: torch.Tensor  # (B, A, 6)
    cells: torch.Tensor  # (B, A)
    log_cost: Floats  # (B, A)
    log_time: Floats  # (B, A) true; inf = there is no such config

    @property
    def is_open(self) -> npt.NDArray[np.bool_]:
        """(B, A) allowed choices."""
        return np.isfinite(self.log_time)


@cache
def table_of(kind: str, collective: Collective) -> Table:
    """All configs of a system's first group."""
    system, world = find_system(SYSTEMS[kind]), WORLDS[kind]
    group = Group(*world.shapes[0])
    names = [Algorithm.parse(name) for name in world.algorithms]
    pairs = [pair for pair in system.cells(group, collective) if pair[0] in names]
    configs = (ABSTAIN, *(Config(*pair, n) for pair in pairs for n in (None, *world.channels)))
    shape = (len(SIZES), len(configs))
    numbers, cells = np.zeros((*shape, 6)), np.zeros(shape, dtype=np.int64)
    log_cost, log_time = np.zeros(shape), np.full(shape, np.inf)
    own = []
    for row, size in enumerate(SIZES):
        call = Call(group, collective, size)
        costs = system.cost_table(call)
        own.append(system.resolve(call, ABSTAIN))
        for column, config in enumerate(configs):
            ran = system.resolve(call, config)
            assert ran.algorithm is not None
            assert ran.protocol is not None
            asked = 0.0 if config.num_channels is None else math.log2(config.num_channels) + 1.0
            numbers[row, column] = [
                math.log2(size),
                math.log2(group.num_nodes),
                math.log2(group.ranks_per_node),
                asked,
                0.0,
                float(column == ABSTAIN_ACTION),
            ]
            cells[row, column] = ran.algorithm * (NUM_PROTOCOLS + 1) + ran.protocol
            log_cost[row, column] = np.log(costs[ran.algorithm, ran.protocol])
            log_time[row, column] = np.log(system.parts(call, config).quiet_us)
    seen = torch.from_numpy(numbers), torch.from_numpy(cells)
    return Table(configs, tuple(own), *seen, log_cost, log_time)


@cache
def expected(kind: str, collective: Collective, prior: str, told_by: tuple[str, ...]) -> Floats:
    """(B, A) ln of prior expected times of a table; `told_by`: the known systems.

    Raises ValueError for a prior that is none of PRIORS.
    """
    if prior not in PRIORS:
        raise ValueError(f"no prior '{prior}'; choose from {', '.join(PRIORS)}")
    table = table_of(kind, collective)
    if prior == "flat":
        return np.zeros(table.log_cost.shape)
    if prior == "costs" or not told_by:
        return table.log_cost
    others = [table_of(other, collective) for other in told_by]
    parts = [rows_of(other, other.log_cost, np.random.default_rng(0)) for other in others]
    rows = Rows(*(torch.cat([getattr(part, name) for part in parts]) for name in Rows.__slots__))
    mean, _ = Posterior(fit_kernel([rows], seed=0), rows)(table.numbers, table.cells)
    found: Floats = table.log_cost + mean.numpy()
    return found


@cache
def kernel_without(kind: str, prior: str) -> Kernel:
    """The kernel fitted to residuals of the other systems' tables from a prior."""
    others = [other for other in SYSTEMS if other != kind]
    blocks = []
    for other in others:
        told_by = tuple(each for each in others if each != other)
        for collective in (Collective.AllReduce, Collective.AllGather):
            before = expected(other, collective, prior, told_by)
            blocks.append(rows_of(table_of(other, collective), before, np.random.default_rng(0)))
    return fit_kernel(blocks, seed=0)


def rows_of(table: Table, before: Floats, random: np.random.Generator) -> Rows:
    """A whole table measured once: residuals from the prior, (B, A)."""
    places = np.argwhere(table.is_open)
    y = table.log_time[tuple(places.T)] + NOISE * random.standard_normal(len(places))
    return rows_at(table, places, y - before[tuple(places.T)])


def rows_at(table: Table, places: npt.NDArray[np.int64], y: Floats) -> Rows:
    """Rows of some (size, config) places (N, 2), with values y (N,)."""
    at = places[:, 0], places[:, 1]
    ones = torch.ones(len(places), dtype=torch.float64)
    return Rows(table.numbers[at], table.cells[at], torch.from_numpy(y), ones)


def judged(table: Table, chosen: Sequence[int] | npt.NDArray[np.int64]) -> dict[str, float]:
    """Scores of chosen configs (B,) by true times, over all sizes."""
    time, chosen = np.exp(table.log_time), np.asarray(chosen)
    mine, best = time[np.arange(len(chosen)), chosen], time.min(axis=1)
    default = time[:, ABSTAIN_ACTION]
    return {
        "regret": float((mine / best - 1.0).mean()),
        "default_regret": float((default / best - 1.0).mean()),
        "share_worse": float((mine > 1.01 * default).mean()),
        "acts": float((chosen != ABSTAIN_ACTION).mean()),
    }
