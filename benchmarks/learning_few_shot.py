"""A new system, probe by probe: how soon a Gaussian process over NCCL's costs has a good table.

Each of three systems is left out in turn; the kernel is fitted to whole tables of the other two,
and of the new one nothing is known but NCCL's own costs. A table is a (shape, collective) at
half-octave sizes from 1 KiB to 1 GiB. A probe is one noisy time (sd 2 %) of one config at one size;
NCCL's own choice at that size is probed as often, and counts. What is probed is what promises most
(expected improvement over what the table holds), or is drawn at random. After each probe the table
acts where the gain is beyond two spreads and 0.5 %; it is judged by true times at all sizes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from learning_figures import parallel, student
from learning_worlds import FIVE, WORLDS
from scipy.special import ndtr

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.nccl import ABSTAIN, NUM_PROTOCOLS, Algorithm, Collective, Config
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.system import Call
from dynamiccl.simulator.systems import find_system
from dynamiccl.train.gaussian.kernel import Kernel
from dynamiccl.train.gaussian.policy import MIN_GAIN
from dynamiccl.train.gaussian.posterior import Posterior, Rows, fit_kernel

SYSTEMS: Final = {"b300": "b300-nvlink", "gb10": "gb10-roce", "a100": "a100-nvswitch"}
SIZES: Final = [int(2 ** (octave / 2)) for octave in range(20, 61)]
NOISE: Final = 0.02
MOST_PROBES: Final = 200
#: After how many probes the table is judged.
LOOKS: Final = (0, 5, 10, 20, 40, 60, 80, 120, 160, 200)
WITHIN: Final = 0.02
CAUTION: Final = 2.0
SEEDS: Final = 3


@dataclass(frozen=True, slots=True)
class Table:
    """B sizes and A configs of one collective: what a kernel sees, and the truth."""

    numbers: torch.Tensor  # (B, A, 6)
    cells: torch.Tensor  # (B, A)
    log_cost: npt.NDArray[np.float64]  # (B, A)
    log_time: npt.NDArray[np.float64]  # (B, A) true; inf = there is no such config

    @property
    def is_open(self) -> npt.NDArray[np.bool_]:
        """(B, A) what can be chosen."""
        return np.isfinite(self.log_time)


def table_of(kind: str, collective: Collective) -> Table:
    """All configs of a system's first group."""
    system, world = find_system(SYSTEMS[kind]), WORLDS[kind]
    group = Group(*world.shapes[0])
    names = [Algorithm.parse(name) for name in world.algorithms]
    pairs = [pair for pair in system.cells(group, collective) if pair[0] in names]
    configs = [ABSTAIN, *(Config(*pair, n) for pair in pairs for n in (None, *world.channels))]
    shape = (len(SIZES), len(configs))
    numbers, cells = np.zeros((*shape, 6)), np.zeros(shape, dtype=np.int64)
    log_cost, log_time = np.zeros(shape), np.full(shape, np.inf)
    for row, size in enumerate(SIZES):
        call = Call(group, collective, size)
        costs = system.cost_table(call)
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
    return Table(torch.from_numpy(numbers), torch.from_numpy(cells), log_cost, log_time)


@cache
def kernel_without(kind: str) -> Kernel:
    """The kernel of the other systems' tables."""
    blocks = [
        rows_of(table, np.argwhere(table.is_open), np.random.default_rng(0))
        for other in SYSTEMS
        if other != kind
        for table in (table_of(other, Collective.AllReduce), table_of(other, Collective.AllGather))
    ]
    return fit_kernel(blocks, seed=0)


def rows_of(table: Table, places: npt.NDArray[np.int64], random: np.random.Generator) -> Rows:
    """Noisy times at some (size, config)."""
    at = places[:, 0], places[:, 1]
    y = table.log_time[at] - table.log_cost[at] + NOISE * random.standard_normal(len(places))
    ones = torch.ones(len(places), dtype=torch.float64)
    return Rows(table.numbers[at], table.cells[at], torch.from_numpy(y), ones)


def joined(parts: Sequence[Rows]) -> Rows:
    """All rows of some parts."""
    return Rows(*(torch.cat([getattr(p, n) for p in parts]) for n in Rows.__slots__))


def play(kind: str, collective: int, seed: int, way: str) -> list[dict[str, Any]]:
    """Probe one table; how good it is at each look."""
    torch.set_num_threads(1)
    table, kernel = table_of(kind, Collective(collective)), kernel_without(kind)
    random = np.random.default_rng((seed, collective))
    told: list[Rows] = []
    times_probed = np.zeros(table.log_cost.shape, dtype=np.int64)
    found: list[dict[str, Any]] = []
    probes = 0
    while True:
        gain, spread = predicted(table, kernel, told)
        best = np.where(table.is_open, gain, -np.inf).argmax(axis=1)
        place = np.arange(len(best)), best
        acts = gain[place] > np.maximum(CAUTION * spread[place], MIN_GAIN)
        chosen = np.where(acts, best, ABSTAIN_ACTION)
        if probes >= LOOKS[len(found)]:
            found.append(judged(table, chosen) | {"probes": LOOKS[len(found)]})
            if len(found) == len(LOOKS):
                return [{**each, "kind": kind, "way": way, "seed": seed} for each in found]
        size, config = pick(table, gain, spread, chosen, random, way)
        asked = [[size, config]]
        # A gain is no surer than the time that it is compared with.
        if times_probed[size, ABSTAIN_ACTION] <= times_probed[size, config]:
            asked.append([size, ABSTAIN_ACTION])
        for each in asked:
            times_probed[tuple(each)] += 1
        told.append(rows_of(table, np.array(asked), random))
        probes += len(asked)


def predicted(
    table: Table, kernel: Kernel, told: Sequence[Rows]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(B, A) gains over NCCL's own choice in ln time, and their spreads."""
    if not told:
        # Nothing but costs: NCCL's own choice is the best of them.
        return np.zeros(table.log_cost.shape), np.full(table.log_cost.shape, np.inf)
    mean, spread = Posterior(kernel, joined(told))(table.numbers, table.cells)
    z = mean.numpy() + table.log_cost
    return z[:, :1] - z, spread.numpy()


def pick(
    table: Table,
    gain: npt.NDArray[np.float64],
    spread: npt.NDArray[np.float64],
    chosen: npt.NDArray[np.int64],
    random: np.random.Generator,
    way: str,
) -> tuple[int, int]:
    """The size and config to probe next."""
    open_now = table.is_open & (np.arange(gain.shape[1]) != ABSTAIN_ACTION)
    if way == "random" or not np.isfinite(spread).all():
        places = np.argwhere(open_now)
        size, config = places[random.integers(len(places))]
        return int(size), int(config)
    more = gain - gain[np.arange(len(chosen)), chosen][:, None]
    sure = np.maximum(spread, 1e-6)
    t = more / sure
    improvement = more * ndtr(t) + sure * np.exp(-0.5 * t * t) / math.sqrt(2.0 * math.pi)
    size, config = divmod(int(np.where(open_now, improvement, -np.inf).argmax()), gain.shape[1])
    return size, config


def judged(table: Table, chosen: npt.NDArray[np.int64]) -> dict[str, float]:
    """By true times, over all sizes."""
    time = np.exp(table.log_time)
    mine, best = time[np.arange(len(chosen)), chosen], time.min(axis=1)
    default = time[:, ABSTAIN_ACTION]
    return {
        "regret": float((mine / best - 1.0).mean()),
        "default_regret": float((default / best - 1.0).mean()),
        "share_worse": float((mine > 1.01 * default).mean()),
        "acts": float((chosen != ABSTAIN_ACTION).mean()),
    }


def few_shot_figures() -> dict[str, Any]:
    """Curves by system and way, and after how many probes the mean is within 2 % for good."""
    jobs = [
        (kind, int(Collective.parse(collective)), seed, way)
        for seed in range(SEEDS)
        for kind in SYSTEMS
        for collective in FIVE
        for way in ("expected improvement", "random")
    ]
    rows: list[dict[str, Any]] = []
    for _, found in parallel(play, jobs):
        rows += found
    figures: dict[str, Any] = {"few_shot": {}}
    for kind in SYSTEMS:
        for way in ("expected improvement", "random"):
            mine = [r for r in rows if r["kind"] == kind and r["way"] == way]
            curve = {
                look: {
                    name: float(np.mean([r[name] for r in mine if r["probes"] == look]))
                    for name in ("regret", "default_regret", "share_worse", "acts")
                }
                for look in LOOKS
            }
            figures["few_shot"][f"{kind}, {way}"] = curve
        ours = figures["few_shot"][f"{kind}, expected improvement"]
        late = [look for look in LOOKS if ours[look]["regret"] > WITHIN]
        after = [look for look in LOOKS if not late or look > max(late)]
        figures[f"probes_to_2pct_{kind}"] = float(after[0]) if after else None
    worse = [r for r in rows if r["way"] == "expected improvement" and r["probes"] >= 20]
    by_seed = [
        float(np.mean([r["share_worse"] for r in worse if r["seed"] == seed]))
        for seed in range(SEEDS)
    ]
    return figures | student(by_seed, "few_shot_share_worse")
