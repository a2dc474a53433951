"""Random machines: the log times that a collective may take on a given grid, for a prior.

A world is one collective on one group shape of a machine. Every (algorithm, protocol) cell has a
latency and a bandwidth, drawn around those of Ring and of Simple; a time is their smooth maximum

    T = (latency^p + (bytes / bandwidth)^p)^(1/p)

times smooth random fields over size, channels and chunk. More channels bring bandwidth up to the
links' limit and cost latency; a call too small for all of them uses fewer (NCCL gives each channel
no less than a few KiB, `src/enqueue.cc`). NCCL's own cost is latency + bytes / bandwidth with
errors of its own. What NCCL does where it is left to is the cheapest cell by that cost, with a
number of channels that doubles with the size up to what it opened.

Ranges are those that one would allow a machine that nobody has seen, none is fitted to a table; an
algorithm that is not named here has the widest.

W worlds, S sizes, A configs, C cells, O options (a number of channels and a chunk)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Cell = tuple[Algorithm, Protocol]
#: All cells, in the order of NCCL's cost table.
CELLS: Final = tuple((algorithm, protocol) for algorithm in Algorithm for protocol in Protocol)
_Range = tuple[float, float]

#: Bandwidth of an algorithm over Ring's; of one that is not named.
_BANDWIDTH: Final[Mapping[Algorithm, _Range]] = {
    Algorithm.Ring: (1.0, 1.0),
    Algorithm.Tree: (0.4, 1.1),
    Algorithm.NVLS: (0.6, 1.8),
    Algorithm.PAT: (0.3, 1.0),
}
_ANY_BANDWIDTH: Final[_Range] = (0.4, 1.8)
#: Latency of an algorithm whose steps are not known to grow with the ranks, over a machine's own.
_ANY_LATENCY: Final[_Range] = (0.7, 3.0)
#: Latency and bandwidth of a protocol over Simple's.
_PROTOCOLS: Final[Mapping[Protocol, tuple[_Range, _Range]]] = {
    Protocol.LL: ((0.25, 1.0), (0.15, 0.6)),
    Protocol.LL128: ((0.35, 1.1), (0.6, 1.0)),
    Protocol.Simple: ((1.0, 1.0), (1.0, 1.0)),
}
#: Octaves over which fields change: of size, and of channels and chunk.
_SIZE_LENGTHS: Final = (1.5, 2.5, 4.0, 6.0)
_OPTION_LENGTHS: Final = (0.7, 1.5, 3.0)
#: The strongest fields, ln of time: what a cell's configs share, and what each has of its own.
_CELL_FIELD: Final = 0.3
_CONFIG_FIELD: Final = 0.15
#: Jumps an octave at most; the largest standard deviations, ln of time, of one that a cell's
#: configs share and of a config's own; and the chance that a config is off from the first size on.
_JUMPS: Final = 0.12
_CELL_JUMP: Final = 0.4
_CONFIG_JUMP: Final = 0.5
_APART: Final = 0.1
#: How the channels that NCCL opens compare with the most that the grid asks for.
_OPENED: Final = (0.5, 0.7, 1.0, 1.0, 1.0, 1.0, 1.4, 2.0)
#: Channels that are opened where the grid asks for none.
_CHANNELS: Final = 16


@dataclass(frozen=True, slots=True)
class Grid:
    """The places of a table: S sizes and A configs, NCCL's own choice (ABSTAIN) the first."""

    log2_sizes: tuple[float, ...]
    configs: tuple[Config, ...]
    #: For each size the cell that NCCL's own choice comes to; None, or nothing at all: not known.
    own: tuple[Cell | None, ...] = ()
    #: For each size NCCL's log costs of `cells`, NaN where it has none; nothing at all: not known.
    log_costs: tuple[tuple[float, ...], ...] = ()

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The C (algorithm, protocol) pairs that its configs may come to."""
        asked = [(config.algorithm, config.protocol) for config in self.configs]
        asked += [each for each in self.own if each is not None]
        known = dict.fromkeys((a, p) for a, p in asked if a is not None and p is not None)
        for algorithm, protocol in asked:
            if not any(fits(cell, algorithm, protocol) for cell in known):
                algorithms = (Algorithm.Ring, Algorithm.Tree) if algorithm is None else (algorithm,)
                protocols = tuple(Protocol) if protocol is None else (protocol,)
                known |= dict.fromkeys((a, p) for a in algorithms for p in protocols)
        return tuple(known)

    def with_costs(self, log_us: Floats) -> Self:
        """With what NCCL's model gives CELLS at each size, (S, 21), NaN where it gives nothing.

        What it comes to by itself is the cheapest. Without any at a size nothing is told.
        """
        if np.isnan(log_us).all(axis=1).any():
            return self
        own = tuple(CELLS[cell] for cell in np.nanargmin(log_us, axis=1))
        found = replace(self, own=own)
        costs = log_us[:, [CELLS.index(cell) for cell in found.cells]]
        return replace(found, log_costs=tuple(map(tuple, costs.tolist())))


def fits(cell: Cell, algorithm: Algorithm | None, protocol: Protocol | None) -> bool:
    """Whether a request comes to a cell, None being NCCL's to choose."""
    return algorithm in (None, cell[0]) and protocol in (None, cell[1])


def draw_worlds(grid: Grid, count: int, random: Generator) -> tuple[Floats, Floats]:
    """Log times in us (W, S, A), and NCCL's log costs (W, S, C), of `count` worlds."""
    machines = _Machines(grid, count, random)
    costs = machines.cost()
    times = np.stack([machines.time(channels) for channels, _ in machines.options], axis=3)
    kinds = len(grid.cells), len(machines.options)
    times += machines.fields() + machines.jumps(kinds[0], 1, most=_CELL_JUMP)
    times += machines.jumps(*kinds, most=_CONFIG_JUMP, at_first=_APART)
    jumps_of_own = machines.jumps(most=_CELL_JUMP)
    world, size = np.ogrid[:count, : len(grid.log2_sizes)]
    found = np.empty((count, len(grid.log2_sizes), len(grid.configs)))
    for action, config in enumerate(grid.configs):
        option = machines.options.index((config.num_channels, config.chunk_bytes))
        cell = _cell_of(grid, config, costs)
        found[:, :, action] = times[world, size, cell, option]
        if config == ABSTAIN:
            found[:, :, action] += jumps_of_own
    return found, costs


def _cell_of(grid: Grid, config: Config, costs: Floats) -> Ints:
    """(W, S) number of the cell that a config comes to: the cheapest of those that it allows."""
    cells = grid.cells
    allowed = np.array([fits(cell, config.algorithm, config.protocol) for cell in cells])
    found: Ints = np.where(allowed, costs, np.inf).argmin(axis=2)
    if config == ABSTAIN:
        for size, own in enumerate(grid.own):
            if own is not None:
                found[:, size] = cells.index(own)
    return found


class _Machines:
    """W machines: the parameters of their cells, and the formulas."""

    def __init__(self, grid: Grid, count: int, random: Generator) -> None:
        self._random, self._count, self._cells = random, count, grid.cells
        self._log2_size_S = np.array(grid.log2_sizes)
        self.options = list(dict.fromkeys((c.num_channels, c.chunk_bytes) for c in grid.configs))
        asked = max((n for n, _ in self.options if n is not None), default=_CHANNELS)
        #: (W, 1) latency in us and bytes / us of a channel, of Ring and Simple; how sharp the
        #: corner between them is.
        latency, self._channel = self._log_normal(8.0, 0.9), self._log_normal(8e3, 1.0)
        self._sharpness = self._uniform(1.0, 4.0)
        #: Bytes that a channel gets at least; bytes a channel at which NCCL takes twice as many,
        #: and the most that it opened.
        self._least_bytes = self._log_normal(2e3, 1.0)
        self._doubles_at = self._log_normal(64e3, 1.0)
        self._opened = np.maximum(asked * random.choice(_OPENED, (count, 1)), 1.0)
        #: Bandwidth that a doubling of the channels above some number takes away.
        is_crowded = self._uniform(0.0, 1.0) < 0.5
        self._crowding = np.abs(self._normal(0.1)) * is_crowded
        self._crowd = asked * self._uniform(0.3, 1.0)
        by_latency, by_bandwidth = self._ratios()
        own = self._uniform(0.0, 0.4)
        #: (W, C) latency, share of the bandwidth, limit of all channels in bytes / us, and
        #: latency that a doubling of the channels adds, as a share.
        self._latency_WC = latency * by_latency * np.exp(own * self._normals())
        self._share_WC = by_bandwidth * np.exp(own * self._normals())
        limit = self._channel * self._log_normal(0.5 * asked, 1.1)
        self._limit_WC = limit * np.exp(0.2 * self._normals())
        self._doubling_WC = self._log_normal(0.04, 1.0) * np.exp(0.7 * self._normals())

    def time(self, channels: int | None) -> Floats:
        """(W, S, C) log times without fields, with a number of channels or NCCL's own."""
        size = 2.0**self._log2_size_S
        if channels is None:
            wanted = 2.0 ** np.floor(np.log2(np.maximum(size / self._doubles_at, 1.0)))
            used = np.round(np.minimum(wanted, self._opened))
        else:
            used = np.full((self._count, len(size)), float(channels))
        used = np.minimum(used, np.maximum(np.ceil(size / self._least_bytes), 1.0))
        crowd = 1.0 + self._crowding * np.maximum(np.log2(used / self._crowd), 0.0)
        of_all = np.minimum((used * self._channel)[:, :, None], self._limit_WC[:, None])
        bandwidth = of_all * self._share_WC[:, None] / crowd[:, :, None]
        slowed = 1.0 + self._doubling_WC[:, None] * np.log2(used)[:, :, None]
        waits = np.log(self._latency_WC[:, None] * slowed)
        moves = np.log(size)[:, None] - np.log(bandwidth)
        p = self._sharpness[:, :, None]
        found: Floats = np.logaddexp(p * waits, p * moves) / p
        return found

    def cost(self) -> Floats:
        """(W, S, C) NCCL's log costs: what is wrong is wrong for all cells, and for each."""
        full = np.minimum(self._opened * self._channel, self._limit_WC) * self._share_WC
        latency, rate = (
            values * np.exp(self._normal(0.5) + self._uniform(0.1, 0.7) * self._normals())
            for values in (self._latency_WC, full)
        )
        size = 2.0**self._log2_size_S
        found: Floats = np.log(latency[:, None] + size[:, None] / rate[:, None])
        return found

    def fields(self) -> Floats:
        """(W, S, C, O) smooth changes of log times over the size, and over the options."""
        count, sizes, options = self._count, self._log2_size_S, len(self.options)
        shape = (count, len(sizes), len(self._cells))
        size_root = [_root(sizes, length) for length in _SIZE_LENGTHS]
        option_root = [self._option_root(length) for length in _OPTION_LENGTHS]
        of_size = self._random.integers(len(size_root), size=count)
        of_option = self._random.integers(len(option_root), size=count)
        shared = self._random.standard_normal((*shape, 1))
        own = self._random.standard_normal((*shape, options))
        strength = self._uniform(0.0, _CELL_FIELD), self._uniform(0.0, _CONFIG_FIELD)
        found = np.empty((*shape, options))
        for i, along_sizes in enumerate(size_root):
            for j, along_options in enumerate(option_root):
                which = np.flatnonzero((of_size == i) & (of_option == j))
                both = strength[0][which, :, None, None] * shared[which]
                both = both + strength[1][which, :, None, None] * (own[which] @ along_options.T)
                found[which] = np.einsum("st,wtco->wsco", along_sizes, both)
        return found

    def jumps(self, *of: int, most: float, at_first: float = 0.0) -> Floats:
        """(W, S, *of) what no smooth law has: slower or faster from some size on.

        Standard deviations are up to `most`; `at_first` is the chance of one at the first size.
        """
        sizes = self._log2_size_S
        chance = self._uniform(0.0, _JUMPS) * np.diff(sizes, prepend=sizes[0])
        chance[:, 0] = at_first
        shape, ones = (*chance.shape, *of), (1,) * len(of)
        is_one = self._random.random(shape) < chance.reshape(*chance.shape, *ones)
        height = self._uniform(0.0, most).reshape(-1, 1, *ones)
        jump = height * self._random.standard_normal(shape)
        found: Floats = np.cumsum(is_one * jump, axis=1)
        return found

    def _ratios(self) -> tuple[Floats, Floats]:
        """(W, C) each: latency and bandwidth of the cells over those of Ring and Simple."""
        steps = np.exp(self._uniform(np.log(2.0), np.log(60.0)))
        latency = {
            Algorithm.Ring: 1.0 + 0.1 * steps * self._uniform(0.1, 1.0),
            Algorithm.Tree: 1.0 + 0.5 * np.log2(steps + 1.0) * self._uniform(0.2, 1.2),
            Algorithm.PAT: 1.0 + 0.5 * np.log2(steps + 1.0) * self._uniform(0.2, 1.2),
        }
        bandwidth = dict[Algorithm, Floats]()
        for algorithm in dict.fromkeys(algorithm for algorithm, _ in self._cells):
            latency.setdefault(algorithm, self._uniform(*_ANY_LATENCY))
            bandwidth[algorithm] = self._uniform(*_BANDWIDTH.get(algorithm, _ANY_BANDWIDTH))
        protocols = {
            protocol: [self._uniform(*ends) for ends in both]
            for protocol, both in _PROTOCOLS.items()
        }
        return (
            np.hstack([latency[a] * protocols[p][0] for a, p in self._cells]),
            np.hstack([bandwidth[a] * protocols[p][1] for a, p in self._cells]),
        )

    def _option_root(self, octaves: float) -> Floats:
        """(O, O) root of the correlation of options: by distance; NCCL's own is apart from all."""
        correlation = np.ones((len(self.options), len(self.options)))
        for knob in zip(*self.options, strict=True):
            place = np.array([np.nan if each is None else np.log2(each) for each in knob])
            near = np.exp(-0.5 * ((place[:, None] - place) / octaves) ** 2)
            neither = np.isnan(place)[:, None] & np.isnan(place)
            correlation *= np.where(neither, 1.0, np.nan_to_num(near))
        return np.asarray(np.linalg.cholesky(correlation + 1e-6 * np.eye(len(correlation))))

    def _normal(self, sigma: float) -> Floats:
        return sigma * self._random.standard_normal((self._count, 1))

    def _normals(self) -> Floats:
        return self._random.standard_normal((self._count, len(self._cells)))

    def _log_normal(self, median: float, sigma: float) -> Floats:
        found: Floats = median * np.exp(self._normal(sigma))
        return found

    def _uniform(self, low: float, high: float) -> Floats:
        return self._random.uniform(low, high, (self._count, 1))


def _root(places: Floats, length: float) -> Floats:
    """Lower root of a squared-exponential covariance of places."""
    apart = (places[:, None] - places) / length
    return np.asarray(np.linalg.cholesky(np.exp(-0.5 * apart**2) + 1e-6 * np.eye(len(places))))
