"""The judge's worlds: tables that a belief is tried on, by other laws than those it is drawn from.

* `perturbed`: B300, GB10 and A100 with every number of the simulator's physics multiplied by a
  log-normal factor of its own (sd `log 1.5`).
* `field`: H100 nodes, whose times are published curves, multiplied by exp of a smooth random field
  over size, nodes, ranks a node and channels, one for each (collective, algorithm, protocol), sd
  0.3 (random Fourier features of a Gaussian process, Rahimi and Recht 2007).
* `kinked`: one of these, and what no smooth law has: steps of a cell's time at a size and at a
  number of channels, single slow places, ripple, and sizes at which NCCL's own choice is far off.

NCCL's decisions and costs stay those of the unperturbed machine, and equal seeds give equal tables.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config
from dynamiccl.simulator import systems
from dynamiccl.simulator.system import Call, Group
from dynamiccl.simulator.systems import Parameter, ParametricSystem, System, find_system

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: What is multiplied, of a cell; its shares and the overlap are no quantities of their own.
PERTURBED: Final = (
    *("base_us", "hop_us", "net_hop_us", "slice_us", "turn_us", "proxy_us"),
    *("channel_gbytes_per_s", "crowd_penalty", "crowd_channels", "small_penalty", "small_bytes"),
)
SIGMA: Final = math.log(1.5)
FIELD_SIGMA: Final = 0.3
_FEATURES: Final = 64
#: Over how many octaves of size, nodes, ranks a node and channels the field changes.
_LENGTHS: Final = np.array([4.0, 1.5, 1.5, 1.5])
#: In the systems' files Broadcast is Reduce and AllGather is ReduceScatter to the last digit.
DISTINCT: Final = (Collective.AllReduce, Collective.AllGather, Collective.Broadcast)
#: Half octaves from 1 KiB to 1 GiB, as exponents of 2 times two.
_FIRST, _LAST = 20, 60
_MIN_SIZES: Final = 18
#: What a drawn list of channels is made of.
_CHANNELS: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
#: By name: the simulated system, the groups that are drawn of it, of which the first is the shipped
#: table's, and the channels of that table.
_Machine = tuple[str, tuple[tuple[int, int], ...], tuple[int, ...]]
_MACHINES: Final[Mapping[str, _Machine]] = {
    "b300": ("b300-nvlink", ((1, 8), (1, 4), (1, 2)), (4, 8, 16, 24, 32)),
    "gb10": ("gb10-roce", ((4, 1),), (1, 2, 4, 8)),
    "a100": ("a100-nvswitch", ((1, 8), (1, 4), (1, 2)), (2, 4, 8, 16, 24)),
    "h100": ("h100-ib", tuple((n, r) for n in (2, 4, 8, 16, 32) for r in (4, 8)), ()),
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
    system_name, shapes, _ = _MACHINES[name]
    group = Group(*shapes[random.integers(len(shapes))])
    collective = DISTINCT[random.integers(len(DISTINCT))]
    sizes = _drawn_sizes(random)
    known = find_system(system_name)
    # Three to six numbers of channels up to what a ring opens.
    most = known.max_channels(group, Algorithm.Ring)
    counts = [count for count in _CHANNELS if count <= most]
    some = min(int(random.integers(3, 7)), len(counts))
    channels = sorted(random.choice(counts, some, replace=False).tolist())
    configs = _configs(known, group, collective, channels)
    system = perturbed(system_name, seed) if name in SHIPPED else known
    calls = [Call(group, collective, size) for size in sizes]
    table, ran = table_of(f"{kind} {collective.wire} #{seed}", kind, system, calls, configs)
    if name not in SHIPPED:
        table.log_time_us[:] += _fields(table, ran, seed)
    if how == "kinked":
        table.log_time_us[:] += _kinks(random, ran)
    return table


def shipped_table(name: str, collective: Collective) -> Table:
    """The first group of a system as its file describes it, at half octaves from 1 KiB to 1 GiB."""
    system_name, shapes, channels = _MACHINES[name]
    system, group = find_system(system_name), Group(*shapes[0])
    halves = range(_FIRST, _LAST + 1)
    calls = [Call(group, collective, int(2 ** (half / 2))) for half in halves]
    configs = _configs(system, group, collective, channels)
    return table_of(f"shipped {name} {collective.wire}", "shipped", system, calls, configs)[0]


def small_sweep(
    table: Table, random: np.random.Generator, sizes: int = 18, configs: int = 30
) -> tuple[Ints, Ints, Floats]:
    """Measure a table as a small sweep does: even sizes, NCCL's own choice, some other configs.

    Returns (B,) sizes and (C,) configs of the table, ascending, ABSTAIN among them, and (B, C, 3)
    ln us, nan where there is no such config, with the noise of simulator/noise.py: log-normal 2 %,
    a drift of 0.5 % common to a repeat, one in fifty slow by a Pareto factor of shape 2.5.
    """
    num_sizes, num_configs = table.log_time_us.shape
    rows = np.linspace(0, num_sizes - 1, min(sizes, num_sizes)).round().astype(np.int64)
    others = 1 + random.permutation(num_configs - 1)[: configs - 1]
    columns = np.sort(np.concatenate([[0], others]))
    quiet = table.log_time_us[np.ix_(rows, columns)]
    shape = (*quiet.shape, 3)
    noise = random.normal(0.0, 0.02, shape) + random.normal(0.0, 0.005, 3)
    slow = np.log1p(random.pareto(2.5, shape))
    noise += np.where(random.random(shape) < 0.02, slow, 0.0)
    measured = quiet[..., None] + noise
    return rows, columns, np.where(np.isfinite(measured), measured, np.nan)


def _drawn_sizes(random: np.random.Generator) -> tuple[int, ...]:
    """At least _MIN_SIZES, at half or whole octaves, all between 1 KiB and 1 GiB."""
    step = int(random.integers(1, 3))
    most = (_LAST - _FIRST) // step + 1
    count = int(random.integers(_MIN_SIZES, most + 1))
    start = _FIRST + step * int(random.integers(0, most - count + 1))
    return tuple(int(2 ** (half / 2)) for half in range(start, start + step * count, step))


def _configs(
    system: System, group: Group, collective: Collective, channels: Sequence[int]
) -> tuple[Config, ...]:
    """NCCL's own choice, then each cell with its own number of channels and with each of these."""
    cells = system.cells(group, collective)
    return (ABSTAIN, *(Config(*cell, count) for cell in cells for count in (None, *channels)))


def perturbed(name: str, seed: int) -> ParametricSystem:
    """A built-in parametric system with randomly scaled physics, and its own decisions."""
    file = systems.system_file(name)
    random = np.random.default_rng((seed, *name.encode()))

    def moved(told: Parameter) -> Parameter:
        factor = float(np.exp(random.normal(0.0, SIGMA)))
        return told.model_copy(update={"value": told.value * factor})

    def with_moved(table: Any, names: Sequence[str]) -> Any:
        return table.model_copy(update={each: moved(getattr(table, each)) for each in names})

    cells = tuple(with_moved(cell, PERTURBED) for cell in file.cells)
    links = with_moved(file.links, systems.LINK_NUMBERS)
    return ParametricSystem(file.model_copy(update={"cells": cells, "links": links}))


def table_of(
    name: str, kind: str, system: System, calls: Sequence[Call], configs: tuple[Config, ...]
) -> tuple[Table, Ints]:
    """What a system makes of calls, and what runs: (S, A, 3), channels the last."""
    choices = [[system.resolve(call, config) for config in configs] for call in calls]
    ran = np.array(
        [[(c.algorithm, c.protocol, c.num_channels) for c in row] for row in choices],
        dtype=np.int64,
    )
    cells = ran[..., :2]
    costs = np.stack([system.cost_table(call) for call in calls]).astype(np.float64)
    cost_us = costs[np.arange(len(calls))[:, None], cells[..., 0], cells[..., 1]]
    times_us = [[system.parts(call, config).quiet_us for config in configs] for call in calls]
    table = Table(
        name=name,
        kind=kind,
        collective=calls[0].collective,
        shape=(calls[0].group.num_nodes, calls[0].group.ranks_per_node),
        sizes_bytes=tuple(call.size_bytes for call in calls),
        configs=configs,
        cells=cells,
        log_cost_us=np.log(np.where(cost_us > 0.0, cost_us, np.nan)),
        log_time_us=np.log(times_us),
    )
    return table, ran


def _fields(table: Table, ran: Ints, seed: int) -> Floats:
    """(S, A) ln factors by what runs, of each cell a smooth random function; see the module."""
    places = np.empty((*ran.shape[:2], 4))
    places[..., 0] = np.log2(table.sizes_bytes)[:, None]
    places[..., 1:3] = np.log2(table.shape)
    places[..., 3] = np.log2(ran[..., 2])
    found = np.zeros(ran.shape[:2])
    for cell in np.unique(table.cells.reshape(-1, 2), axis=0).tolist():
        random = np.random.default_rng((seed, int(table.collective), *cell))
        waves = random.normal(size=(_FEATURES, len(_LENGTHS))) / _LENGTHS
        phases = random.uniform(0.0, 2.0 * math.pi, _FEATURES)
        weights = random.normal(size=_FEATURES) * FIELD_SIGMA * math.sqrt(2.0 / _FEATURES)
        here = (table.cells == cell).all(axis=-1)
        found[here] = np.cos(places[here] @ waves.T + phases) @ weights
    return found


def _kinks(random: np.random.Generator, ran: Ints) -> Floats:
    """(S, A) ln factors by what runs, (S, A, 3): configs that run the same stay equal.

    Each cell has up to two thresholds at sizes, of up to 20 % either way, and every other one a
    step of up to 10 % from some number of channels on. Up to 3 % of (size, cell) places, and as
    many of (size, cell, channels), are slow by 10 to 100 %; the rest ripples by up to 3 %. In two
    of three worlds NCCL's own choice takes 1.2 to 3 times as long over some sizes: either the cell
    that it picks there does, whoever asks for it, or nothing but NCCL's own choice.
    """
    num_sizes, num_configs, _ = ran.shape
    factors = np.zeros((num_sizes, num_configs))
    ripple, spiky = random.uniform(0.0, 0.03), random.uniform(0.0, 0.03)

    def places(of: Ints) -> Ints:
        """(S, A) what runs in each place, as a number."""
        index = np.unique(of.reshape(-1, of.shape[-1]), axis=0, return_inverse=True)[1]
        return index.reshape(num_sizes, num_configs)

    def spikes(count: int) -> Floats:
        is_slow = random.random((num_sizes, count)) < spiky
        return np.where(is_slow, np.log(random.uniform(1.1, 2.0, is_slow.shape)), 0.0)

    cell, launch, row = places(ran[..., :2]), places(ran), np.arange(num_sizes)[:, None]
    for number in range(cell.max() + 1):
        for _ in range(random.integers(0, 3)):
            start = random.integers(1, num_sizes)
            jump = math.log(random.uniform(0.8, 1.2))
            factors += np.where((cell == number) & (row >= start), jump, 0.0)
        counts = np.unique(ran[..., 2][cell == number])
        if len(counts) > 1 and random.random() < 0.5:
            least = random.choice(counts[1:])
            jump = math.log(random.uniform(0.9, 1.1))
            factors += np.where((cell == number) & (ran[..., 2] >= least), jump, 0.0)
    factors += spikes(cell.max() + 1)[row, cell]
    of_launch = spikes(launch.max() + 1)
    of_launch += np.log1p(random.uniform(-ripple, ripple, of_launch.shape))
    factors += of_launch[row, launch]
    if random.random() < 2 / 3:
        first = int(random.integers(0, num_sizes))
        stop = first + int(random.integers(2, num_sizes // 2 + 1))
        slow = math.log(random.uniform(1.2, 3.0))
        is_hit = (cell == cell[first, 0]) if random.random() < 0.5 else np.arange(num_configs) == 0
        factors += np.where((row >= first) & (row < stop) & is_hit, slow, 0.0)
    return factors
