"""The judge's worlds: tables that a belief is tried on, by other laws than those it is drawn from.

* `perturbed`: B300, GB10 and A100 with every time and bandwidth of the simulator's physics
  multiplied by a log-normal factor of its own (sd `log 1.5`: about +-50 %).
* `field`: H100 nodes, whose times are published curves and no formulas, every time multiplied by
  exp of a smooth random field over size, nodes, ranks a node and channels, one for each
  (collective, algorithm, protocol), sd 0.3 (random Fourier features of a Gaussian process, Rahimi
  and Recht 2007).
* `kinked`: one of these, and what no smooth law has: steps of a cell's time at a size and at a
  number of channels, single slow places, ripple, and sizes at which NCCL's own choice is far off.
* `shipped_table`: the three systems as their files describe them.

What was measured on real machines is `sweeps.public_tables`.

NCCL's decisions and costs stay those of the unperturbed machine, and equal seeds give equal tables.
Of the collectives only three are drawn: in the systems' files Broadcast is Reduce and AllGather is
ReduceScatter to the last digit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config
from dynamiccl.simulator.cost_model import CostModel
from dynamiccl.simulator.h100 import true_us
from dynamiccl.simulator.physics import CellValues, LinkValues, Work, times
from dynamiccl.simulator.system import Call, Group
from dynamiccl.simulator.systems import (
    CELL_NUMBERS,
    LINK_NUMBERS,
    Parameter,
    ParametricSystem,
    System,
    SystemFile,
    find_system,
    system_file,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: What is multiplied, of a cell; its shares and the overlap are no quantities of their own.
PERTURBED: Final = (
    "base_us",
    "hop_us",
    "net_hop_us",
    "slice_us",
    "turn_us",
    "proxy_us",
    "channel_gbytes_per_s",
    "crowd_penalty",
    "crowd_channels",
    "small_penalty",
    "small_bytes",
)
SIGMA: Final = math.log(1.5)
FIELD_SIGMA: Final = 0.3
_FEATURES: Final = 64
#: Over how many octaves of size, nodes, ranks a node and channels the field changes.
_LENGTHS: Final = np.array([4.0, 1.5, 1.5, 1.5])
#: Those that differ from one another.
DISTINCT: Final = (Collective.AllReduce, Collective.AllGather, Collective.Broadcast)
#: Half octaves from 1 KiB to 1 GiB, as exponents of 2 times two.
_FIRST, _LAST = 20, 60
_MIN_SIZES: Final = 18
#: What a drawn list of channels is made of.
_CHANNELS: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class _Machine:
    """A simulated system, the groups that are drawn of it, and the channels of its shipped table.

    The first group is the shipped table's.
    """

    system: str
    shapes: tuple[tuple[int, int], ...]
    channels: tuple[int, ...] = ()


_MACHINES: Final[Mapping[str, _Machine]] = {
    "b300": _Machine("b300-nvlink", ((1, 8), (1, 4), (1, 2)), (4, 8, 16, 24, 32)),
    "gb10": _Machine("gb10-roce", ((4, 1),), (1, 2, 4, 8)),
    "a100": _Machine("a100-nvswitch", ((1, 8), (1, 4), (1, 2)), (2, 4, 8, 16, 24)),
    "h100": _Machine("h100-ib", tuple((n, r) for n in (2, 4, 8, 16, 32) for r in (4, 8))),
}
#: Systems that have a shipped table.
SHIPPED: Final = ("b300", "gb10", "a100")
KINDS: Final = (
    *(f"perturbed {name}" for name in SHIPPED),
    "field h100",
    *(f"kinked {name}" for name in _MACHINES),
)


@dataclass(frozen=True, slots=True)
class Table:
    """One collective of one group shape on one machine: S sizes, A configs, NCCL's own first."""

    name: str
    kind: str
    collective: Collective
    #: Nodes, ranks a node.
    shape: tuple[int, int]
    #: (S,), ascending.
    sizes_bytes: tuple[int, ...]
    #: (A,), ABSTAIN first.
    configs: tuple[Config, ...]
    #: (S, A, 2) algorithm and protocol that run; of NCCL's own choice what it comes to.
    cells: Ints
    #: (S, A) ln of NCCL's own predicted cost, us; nan where it is not known.
    log_cost_us: Floats
    #: (S, A) ln of the true time, us; inf where there is no such config.
    log_time_us: Floats


@dataclass(frozen=True, slots=True)
class SmallSweep:
    """What a user's sweep measured of a table: some of its sizes and configs."""

    #: (B,) sizes and (C,) configs of the table, ascending; ABSTAIN is among them.
    rows: Ints
    columns: Ints
    #: (B, C, R) ln us; nan where there is no such config.
    log_times_us: Floats


def judge_tables(count: int, seed: int) -> list[Table]:
    """`count` worlds, of all kinds by turns; fewer are the first of more."""
    seeds = np.random.SeedSequence(seed).generate_state(count, np.uint64) >> np.uint64(1)
    return [judge_table(KINDS[i % len(KINDS)], int(each)) for i, each in enumerate(seeds)]


def judge_table(kind: str, seed: int) -> Table:
    """A world of one kind. Raises ValueError for a kind that is none of KINDS."""
    if kind not in KINDS:
        raise ValueError(f"no kind of worlds '{kind}'; choose from {', '.join(KINDS)}")
    how, name = kind.split()
    random = np.random.default_rng((seed, *kind.encode()))
    machine = _MACHINES[name]
    group = Group(*machine.shapes[random.integers(len(machine.shapes))])
    collective = DISTINCT[random.integers(len(DISTINCT))]
    sizes = _drawn_sizes(random)
    configs = _configs(name, group, collective, _drawn_channels(random, name, group))
    asked = _Asked(name, group, collective, sizes, configs)
    if name in SHIPPED:
        log_time = asked.parametric(perturbed(machine.system, seed))
    else:
        log_time = asked.with_fields(seed)
    if how == "kinked":
        log_time += _kinks(random, asked.ran)
    return asked.table(f"{kind} {collective.wire} #{seed}", kind, log_time)


def shipped_table(name: str, collective: Collective) -> Table:
    """The first group of a system as its file describes it, at half octaves from 1 KiB to 1 GiB.

    Raises ValueError for a name that is none of SHIPPED.
    """
    if name not in SHIPPED:
        raise ValueError(f"no shipped table '{name}'; choose from {', '.join(SHIPPED)}")
    machine = _MACHINES[name]
    group = Group(*machine.shapes[0])
    sizes = tuple(int(2 ** (half / 2)) for half in range(_FIRST, _LAST + 1))
    configs = _configs(name, group, collective, machine.channels)
    asked = _Asked(name, group, collective, sizes, configs)
    system = _system(name)
    assert isinstance(system, ParametricSystem)
    return asked.table(f"shipped {name} {collective.wire}", "shipped", asked.parametric(system))


def small_sweep(
    table: Table,
    random: np.random.Generator,
    repeats: int = 3,
    sizes: int = 18,
    configs: int = 30,
) -> SmallSweep:
    """Measure a table as a small sweep does: even sizes, NCCL's own choice, some other configs.

    The noise is that of simulator/noise.py, drawn at once: log-normal 2 %, a drift of 0.5 % common
    to a repeat, and one in fifty slow by a Pareto factor of shape 2.5.
    """
    num_sizes, num_configs = table.log_time_us.shape
    even = np.linspace(0, num_sizes - 1, min(sizes, num_sizes))
    rows = np.round(even).astype(np.int64)
    others = 1 + random.permutation(num_configs - 1)[: configs - 1]
    columns = np.sort(np.concatenate([[0], others]))
    quiet = table.log_time_us[np.ix_(rows, columns)]
    shape = (*quiet.shape, repeats)
    noise = random.normal(0.0, 0.02, shape) + random.normal(0.0, 0.005, repeats)
    slow = np.log1p(random.pareto(2.5, shape))
    noise += np.where(random.random(shape) < 0.02, slow, 0.0)
    measured = quiet[..., None] + noise
    return SmallSweep(rows, columns, np.where(np.isfinite(measured), measured, np.nan))


# --- drawing ---


def _drawn_sizes(random: np.random.Generator) -> tuple[int, ...]:
    """At least _MIN_SIZES, at half or whole octaves, all between 1 KiB and 1 GiB."""
    step = int(random.integers(1, 3))
    most = (_LAST - _FIRST) // step + 1
    count = int(random.integers(_MIN_SIZES, most + 1))
    start = _FIRST + step * int(random.integers(0, most - count + 1))
    return tuple(int(2 ** (half / 2)) for half in range(start, start + step * count, step))


def _drawn_channels(random: np.random.Generator, name: str, group: Group) -> tuple[int, ...]:
    """Three to six numbers of channels up to what a ring opens."""
    most = _system(name).max_channels(group, Algorithm.Ring)
    known = [count for count in _CHANNELS if count <= most]
    count = min(int(random.integers(3, 7)), len(known))
    return tuple(sorted(random.choice(known, count, replace=False).tolist()))


def _configs(
    name: str, group: Group, collective: Collective, channels: Sequence[int]
) -> tuple[Config, ...]:
    """NCCL's own choice, then each cell with its own number of channels and with each of these."""
    cells = _system(name).cells(group, collective)
    return (ABSTAIN, *(Config(*cell, count) for cell in cells for count in (None, *channels)))


@cache
def _file(name: str) -> SystemFile:
    return system_file(name)


def perturbed(name: str, seed: int) -> ParametricSystem:
    """A built-in parametric system with randomly scaled physics, and its own decisions."""
    file = _file(name)
    random = np.random.default_rng((seed, *name.encode()))

    def moved(told: Parameter) -> Parameter:
        factor = float(np.exp(random.normal(0.0, SIGMA)))
        return told.model_copy(update={"value": told.value * factor})

    def with_moved(table: Any, names: Sequence[str]) -> Any:
        return table.model_copy(update={each: moved(getattr(table, each)) for each in names})

    cells = tuple(with_moved(cell, PERTURBED) for cell in file.cells)
    links = with_moved(file.links, LINK_NUMBERS)
    made: SystemFile = file.model_copy(update={"cells": cells, "links": links})
    return ParametricSystem(made)


class Field:
    """A smooth random function of places (..., 4), sd FIELD_SIGMA; see the module."""

    def __init__(self, seed: Sequence[int]) -> None:
        """Draw it."""
        random = np.random.default_rng(seed)
        self._waves = random.normal(size=(_FEATURES, len(_LENGTHS))) / _LENGTHS
        self._phases = random.uniform(0.0, 2.0 * math.pi, _FEATURES)
        self._weights = random.normal(size=_FEATURES) * FIELD_SIGMA * math.sqrt(2.0 / _FEATURES)

    def __call__(self, places: Floats) -> Floats:
        """Values (...) at log2 of size, nodes, ranks a node and channels."""
        found: Floats = np.cos(places @ self._waves.T + self._phases) @ self._weights
        return found


def _kinks(random: np.random.Generator, ran: Ints) -> Floats:
    """(S, A) ln factors by what runs, (S, A, 3).

    Each cell has up to two thresholds at sizes, of up to 20 % either way, and every other one a
    step of up to 10 % from some number of channels on. Up to 3 % of (size, cell) places, and as
    many of (size, cell, channels), are slow by 10 to 100 %; the rest ripples by up to 3 %. In two
    of three worlds NCCL's own choice takes 1.2 to 3 times as long over some sizes: either the cell
    that it picks there does, whoever asks for it, or nothing but NCCL's own choice. But for that,
    two configs that run the same stay equal.
    """
    num_sizes, num_configs, _ = ran.shape
    factors = np.zeros((num_sizes, num_configs))
    ripple, spiky = random.uniform(0.0, 0.03), random.uniform(0.0, 0.03)

    def places(of: Ints) -> tuple[Ints, Ints]:
        """What runs in each place as a number (S, A), and what there is, one each row."""
        every, index = np.unique(of.reshape(-1, of.shape[-1]), axis=0, return_inverse=True)
        return index.reshape(num_sizes, num_configs), every

    def spikes(count: int) -> Floats:
        is_slow = random.random((num_sizes, count)) < spiky
        return np.where(is_slow, np.log(random.uniform(1.1, 2.0, is_slow.shape)), 0.0)

    cell, every_cell = places(ran[..., :2])
    launch, every_launch = places(ran)
    row = np.arange(num_sizes)[:, None]
    for number in range(len(every_cell)):
        for _ in range(random.integers(0, 3)):
            start = random.integers(1, num_sizes)
            jump = math.log(random.uniform(0.8, 1.2))
            factors += np.where((cell == number) & (row >= start), jump, 0.0)
        counts = np.unique(ran[..., 2][cell == number])
        if len(counts) > 1 and random.random() < 0.5:
            least = random.choice(counts[1:])
            jump = math.log(random.uniform(0.9, 1.1))
            factors += np.where((cell == number) & (ran[..., 2] >= least), jump, 0.0)
    factors += spikes(len(every_cell))[row, cell]
    of_launch = spikes(len(every_launch))
    of_launch += np.log1p(random.uniform(-ripple, ripple, of_launch.shape))
    factors += of_launch[row, launch]
    if random.random() < 2 / 3:
        first = int(random.integers(0, num_sizes))
        stop = first + int(random.integers(2, num_sizes // 2 + 1))
        slow = math.log(random.uniform(1.2, 3.0))
        is_hit = (cell == cell[first, 0]) if random.random() < 0.5 else np.arange(num_configs) == 0
        factors += np.where((row >= first) & (row < stop) & is_hit, slow, 0.0)
    return factors


# --- tables of a simulated system ---
#
# What NCCL decides is the same in all worlds of a machine: a pure function of the shipped files,
# computed once for each call and config.


@cache
def _system(name: str) -> System:
    return find_system(_MACHINES[name].system)


@cache
def _own(name: str, call: Call) -> tuple[Config, Floats]:
    """What NCCL's own choice comes to, and ln of its cost table (7, 3); nan = no such cell."""
    system = _system(name)
    costs = system.cost_table(call).astype(np.float64)
    return system.resolve(call, ABSTAIN), np.log(np.where(costs > 0.0, costs, np.nan))


@cache
def _ran(name: str, call: Call, config: Config) -> Config:
    """What runs: as `resolve`, but without the cost table where a cell is asked for."""
    if config.algorithm is None or config.protocol is None:
        return _own(name, call)[0]
    system = _system(name)
    assert isinstance(system, CostModel)
    cell = config.algorithm, config.protocol
    return Config(*cell, system.num_channels(call, *cell, config.num_channels))


@cache
def _work(name: str, call: Call, ran: Config) -> Work:
    """What the formulas take; no number of them is perturbed."""
    system = _system(name)
    assert isinstance(system, ParametricSystem)
    return system.work(call, ran)


@cache
def _published_log_us(call: Call, ran: Config, asked: int | None) -> float:
    """Ln of the time of the H100 nodes."""
    assert ran.algorithm is not None
    assert ran.protocol is not None
    return math.log(true_us(call, (ran.algorithm, ran.protocol), asked))


class _Asked:
    """The calls (S) and configs (A) of a table, and what runs: (S, A, 3)."""

    def __init__(
        self,
        name: str,
        group: Group,
        collective: Collective,
        sizes: tuple[int, ...],
        configs: tuple[Config, ...],
    ) -> None:
        """Ask NCCL's model of a machine."""
        self._name, self._configs = name, configs
        self._calls = [Call(group, collective, size) for size in sizes]
        self._runs = [[_ran(name, call, config) for config in configs] for call in self._calls]
        #: Algorithm, protocol and channels.
        self.ran: Ints = np.array(
            [
                [(ran.algorithm, ran.protocol, ran.num_channels) for ran in runs]
                for runs in self._runs
            ]
        )

    def parametric(self, system: ParametricSystem) -> Floats:
        """(S, A) ln us by a system's formulas, as its `parts` gives them."""
        links = LinkValues(**{n: getattr(system.file.links, n).value for n in LINK_NUMBERS})
        first, values = self._calls[0], {}
        for pair in system.cells(first.group, first.collective):
            cell = system.parameters(first.collective, *pair)
            values[pair] = CellValues(**{n: getattr(cell, n).value for n in CELL_NUMBERS})
        log_time = np.empty(self.ran.shape[:2])
        for row, (call, runs) in enumerate(zip(self._calls, self._runs, strict=True)):
            known: dict[tuple[Any, ...], float] = {}
            for column, ran in enumerate(runs):
                assert ran.algorithm is not None
                assert ran.protocol is not None
                pair = ran.algorithm, ran.protocol
                key = *pair, ran.num_channels
                if key not in known:
                    work = _work(self._name, call, ran)
                    known[key] = math.log(times(work, values[pair], links).total_us)
                log_time[row, column] = known[key]
        return log_time

    def with_fields(self, seed: int) -> Floats:
        """(S, A) ln us of the H100 nodes times the fields of a seed."""
        places = np.empty((*self.ran.shape[:2], 4))
        log_time = np.empty(places.shape[:2])
        for row, (call, runs) in enumerate(zip(self._calls, self._runs, strict=True)):
            for column, (ran, config) in enumerate(zip(runs, self._configs, strict=True)):
                log_time[row, column] = _published_log_us(call, ran, config.num_channels)
            group = call.group
            places[row, :, :3] = np.log2([call.size_bytes, group.num_nodes, group.ranks_per_node])
        places[..., 3] = np.log2(self.ran[..., 2])
        for cell in np.unique(self.ran[..., :2].reshape(-1, 2), axis=0).tolist():
            here = (self.ran[..., :2] == cell).all(axis=-1)
            field = Field((seed, int(self._calls[0].collective), *cell))
            log_time[here] += field(places[here])
        return log_time

    def table(self, name: str, kind: str, log_time: Floats) -> Table:
        """With NCCL's own costs, which no world changes."""
        cells = self.ran[..., :2]
        costs = np.stack([_own(self._name, call)[1] for call in self._calls])
        rows = np.arange(len(costs))[:, None]
        group, collective = self._calls[0].group, self._calls[0].collective
        return Table(
            name=name,
            kind=kind,
            collective=collective,
            shape=(group.num_nodes, group.ranks_per_node),
            sizes_bytes=tuple(call.size_bytes for call in self._calls),
            configs=self._configs,
            cells=cells,
            log_cost_us=costs[rows, cells[..., 0], cells[..., 1]],
            log_time_us=log_time,
        )
