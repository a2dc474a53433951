"""From a data set to a policy of tables: beliefs, and how sure a gain must be to act.

A table's caution is calibrated on drawn worlds. The machine's own tasks, octaves left out of its
tables, only raise it until there are 1 / alpha of them, which then tell it alone.

The threshold on the score (gain over its spread) is the least at which, of the n tasks that act,
(slower + 1) / (n + 1) <= alpha: as conformal risk control (Angelopoulos et al. 2022, section 2),
but of tasks that act and not of all, of which most abstain. *Slower* is by more than SLOWER and the
noise, since NCCL's own config is measured as slower every other time.

T tasks, A actions, S machines, N collectives, C cells, O octaves of sizes, L rows of a table
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from dynamiccl.belief import LEAST_CAUTION, MIN_GAIN, SLOWER, Belief, Bools, doubted, prior_of
from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.cells import task_grid
from dynamiccl.datasets.costs import log_costs
from dynamiccl.datasets.features import TUNED, cold_observations
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.steps import with_noise
from dynamiccl.drawn_worlds import Floats, Grid, Ints
from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from dynamiccl.repeats import MAD_TO_SIGMA
from dynamiccl.sizes import bin_center_bytes, size_bin
from dynamiccl.train.cautious import (
    LEAST_DIFFERENCE,
    LEAST_SHAPES,
    NUM_ROW_CELLS,
    CautiousPolicy,
    RowMaker,
    ShapeTable,
    Tables,
    cell_of,
)
from dynamiccl.train.data import TrainingData

_OCTAVES: Final = 64
_NUMBER: Final = {collective: index for index, collective in enumerate(TUNED)}


def share_table(shares: pl.DataFrame | None, systems: Sequence[str]) -> torch.Tensor:
    """(S, N, C, O) of the shares that `level_shares_of` gives, by `systems`.

    A cell has the share of the nearest recorded octave, of its own collective before another's,
    else 1. NCCL's own choice, where its cell is unknown, counts as feeling nothing, and stands.
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
        found[machine, :, cell_of(len(Algorithm), len(Protocol))] = 0.0
    return torch.from_numpy(found)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one collective on one group shape of a machine."""

    machine: int
    collective: int
    shape: tuple[float, float]  # log2 of nodes and of ranks a node
    #: (S,) sizes of a table, and the n places (size, action of `actions`) measured.
    grid: Grid
    actions: Ints
    places: Ints
    log_us: Floats
    variance: Floats
    repeats: Floats
    #: (S, A) the gain that NCCL's costs foretell, or NaN.
    relative_cost: Floats

    def only(self, kept: Bools) -> "Measured":
        """With the measurements in `kept` (n,) only."""
        names = ("places", "log_us", "variance", "repeats")
        return replace(self, **{name: getattr(self, name)[kept] for name in names})


class Tasks:
    """T tasks of some parts of the data."""

    def __init__(self, data: TrainingData, parts: Sequence[Split] = tuple(Split)) -> None:
        self.data = data
        self.grid = task_grid(data.frame, data.catalogue, parts)
        configs, profiles = data.catalogue.configs, len(data.profiles)
        self.maker = RowMaker(configs, profiles, costs=data.costs is not None)
        self.maker.eval()
        told = self._contexts(self.grid.tasks)
        with torch.no_grad():
            machines, machine = torch.unique(self.maker.machines(told), dim=0, return_inverse=True)
        self.is_train = (self.grid.tasks["split"] == Split.TRAIN.value).to_numpy()
        #: (T,) the machine of each task, and features of machines.
        self.machine, self.machines = machine.numpy(), machines
        self.collective = self.maker.collectives(told).numpy()
        #: (T, 3) log2 of size, nodes and ranks a node.
        self.place = self.maker.places(told).numpy()
        first = np.unique(self.machine, return_index=True)[1]
        self.level_shares = share_table(
            data.level_shares, self.grid.tasks["system"].gather(first).to_list()
        )

    def _contexts(self, tasks: pl.DataFrame) -> torch.Tensor:
        data = self.data
        asked = with_noise(tasks, data.training.noise)
        return torch.from_numpy(cold_observations(asked, data.profiles, data.costs).context)

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
        at, first = np.searchsorted(asked, sizes), int(rows[0])
        grid, relative = self._grid(first, asked, actions)
        found = self.grid.cells(rows, at, actions, grid.log2_sizes)
        places, log_us, variance, repeats, task = found
        shape = float(self.place[first, 1]), float(self.place[first, 2])
        machine, collective = int(self.machine[first]), int(self.collective[first])
        told = (places, log_us, variance, repeats, relative)
        measured = Measured(machine, collective, shape, grid, actions, *told)
        return measured, self.is_train[task]

    def _grid(self, row: int, sizes: Ints, actions: Ints) -> tuple[Grid, Floats]:
        configs = tuple(self.data.catalogue.configs[action] for action in actions)
        grid = Grid(tuple(np.log2(sizes).tolist()), configs)
        relative = np.full((len(sizes), len(configs)), np.nan)
        if self.data.costs is None:
            return grid, relative
        like = self.grid.tasks[[row] * len(sizes)].with_columns(size_bytes=sizes)
        grid = grid.with_costs(log_costs(like, self.data.costs))
        if not grid.log_costs:
            return grid, relative
        cost = self.maker(self._contexts(like))[1].numpy()
        return grid, (cost[:, :1] - cost)[:, actions]


#: Standard deviations of a normal interval of 90 %.
_NINETY: Final = 1.6449


@dataclass(frozen=True, slots=True)
class Calibration:
    """Gains of the configs chosen for left-out tasks."""

    #: (N,) ln of NCCL's time over that of the chosen config.
    predicted: Floats
    measured: Floats
    spread: Floats
    noise: Floats

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All tasks of several calibrations, or of none."""
        names = ("predicted", "measured", "spread", "noise")
        return cls(*(np.concatenate([np.empty(0), *(getattr(p, n) for p in parts)]) for n in names))

    def __len__(self) -> int:
        return len(self.predicted)

    @property
    def score(self) -> Floats:
        """(N,) predicted gain / its spread; 0 where the policy abstains anyway."""
        found = self.predicted > MIN_GAIN
        score: Floats = np.zeros(len(self.predicted))
        np.divide(self.predicted, self.spread, out=score, where=found)
        return score

    @property
    def coverage(self) -> float:
        """Fraction of measured gains in predicted 90 % intervals."""
        reach = _NINETY * np.sqrt(self.spread**2 + self.noise**2)
        return float((np.abs(self.predicted - self.measured) <= reach + 1e-12).mean())

    def raised(self, drawn: float, alpha: float) -> float:
        """The threshold on the score: `drawn`, or more by these tasks, by them alone if enough."""
        score = self.score
        slower = score[self.measured < -math.log1p(SLOWER) - _NINETY * self.noise]
        for least in np.unique([LEAST_CAUTION, *slower[slower > LEAST_CAUTION]]):
            acts, wrong = (np.count_nonzero(each > least) for each in (score, slower))
            if wrong + 1 <= alpha * (acts + 1):
                return float(least)
        return float(max(drawn, slower.max(initial=0.0)))


def best_of(gain: Floats, spread: Floats, known: Bools, caution: float) -> Ints:
    """(N,) the largest gain of each row (N, A), of sure ones if any."""
    gain = np.where(known, gain, -np.inf)
    sure = gain > np.maximum(caution * np.where(known, spread, 0.0), MIN_GAIN)
    any_sure = sure.any(axis=1, keepdims=True)
    best: Ints = np.where(sure | ~any_sure, gain, -np.inf).argmax(axis=1)
    return best


Progress = Callable[[int, int], None]
#: The least caution at shapes that nobody measured.
_ELSEWHERE: Final = 2.5
#: The least share of a difference that is unknown between neighbouring shapes.
_LEAST_LEFT: Final = 0.05


def fit_tables(
    data: TrainingData, *, alpha: float, progress: Progress = lambda _done, _count: None
) -> tuple[CautiousPolicy, CautiousPolicy, CautiousPolicy, dict[str, float]]:
    """Fit to all tasks, and calibrate on what is left out.

    The policy to deploy; one of training and validation bins, which test bins can judge; one of
    training bins alone, which validation bins can; and metrics of the first: the largest factors by
    which evidence widened a prior and left-out octaves a spread, and of these octaves how many
    calibrated it, and in how many the gain was in its interval of 90 %.
    """
    tasks, seen = Tasks(data), Tasks(data, [Split.TRAIN, Split.VALIDATION])
    found, known = list(tasks.tables()), list(seen.tables())
    told, judged, trained = list[_Told](), list[_Told](), list[_Told]()
    configs, count = data.catalogue.configs, len(found) + len(known)
    for measured, _ in found:
        told.append(_Told.of(measured, alpha, configs))
        progress(len(told), count)
    for measured, is_train in known:
        judged.append(_Told.of(measured, alpha, configs))
        trained.append(_Told.of(measured.only(is_train), alpha, configs))
        progress(len(told) + len(judged), count)
    left_out = Calibration.joined([each.left_out for each in told])
    metrics = {
        "prior_widened": max(each.widened for each in told),
        "spread_stretched": max(each.stretched for each in told),
        "calibration_tasks": float(len(left_out)),
    }
    if len(left_out):
        metrics["coverage_90"] = left_out.coverage
    of_training = _policy(seen, trained, alpha)
    return _policy(tasks, told, alpha), _policy(seen, judged, alpha), of_training, metrics


@dataclass(frozen=True, slots=True)
class _Told:
    """What the belief of one table says: beliefs are large."""

    machine: int
    collective: int
    table: ShapeTable
    left_out: Calibration
    widened: float
    stretched: float

    @classmethod
    def of(cls, measured: Measured, alpha: float, configs: Sequence[Config]) -> Self:
        prior, told = prior_of(measured.grid), (measured.places, measured.log_us)
        variance = doubted(prior, *told, measured.variance, measured.repeats)
        belief = Belief(prior, *told, variance)
        sizes = np.array(measured.grid.log2_sizes)

        def of_all(values: npt.NDArray[Any], empty: float | bool) -> npt.NDArray[Any]:
            found = np.full((len(sizes), len(configs)), empty)
            found[:, measured.actions] = values
            return found

        table = ShapeTable(
            measured.shape,
            sizes,
            of_all(belief.gain, 0.0),
            of_all(belief.spread, np.inf),
            of_all(belief.is_near, empty=False),
            of_all(belief.may_act, empty=False),
            of_all(measured.relative_cost, np.nan),
            np.array([_asks_for_a_cell(each) for each in configs]),
            belief.caution(alpha),
        )
        widened = float(np.sqrt(belief.widened))
        left_out = _left_out_sizes(belief, len(measured.grid.configs))
        return cls(measured.machine, measured.collective, table, left_out, widened, belief.stretch)


def _asks_for_a_cell(config: Config) -> bool:
    """Whether it asks for an algorithm and a protocol, and leaves the rest to NCCL."""
    both = config.algorithm, config.protocol
    return None not in both and config == Config(*both)


def _left_out_sizes(belief: Belief, num_configs: int) -> Calibration:
    """For each size that was left out the config that the others would take."""
    found = belief.left_out()
    sizes, row = np.unique(found.size, return_inverse=True)
    parts = np.full((4, len(sizes), num_configs), np.nan)
    parts[:, row, found.action] = found.predicted, found.measured, found.spread, found.noise
    predicted, _, spread, _ = parts
    best = best_of(predicted, spread, ~np.isnan(predicted), LEAST_CAUTION)
    return Calibration(*parts[:, np.arange(len(sizes)), best])


def _policy(tasks: Tasks, told: Sequence[_Told], alpha: float) -> CautiousPolicy:
    blocks = []
    for machine in range(len(tasks.machines)):
        mine = [each for each in told if each.machine == machine]
        sizes = Calibration.joined([each.left_out for each in mine])
        groups = defaultdict[int, list[ShapeTable]](list)
        for each in mine:
            caution = sizes.raised(each.table.caution, alpha)
            groups[each.collective].append(replace(each.table, caution=caution))
        shapes = Calibration.joined([_left_out_shapes(each) for each in groups.values()])
        elsewhere = shapes.raised(_ELSEWHERE, alpha)
        for collective, tables in groups.items():
            blocks.append((machine, collective, _tables(tables, elsewhere)))
    return CautiousPolicy(tasks.maker, tasks.machines, blocks, tasks.level_shares).eval()


def _tables(tables: Sequence[ShapeTable], elsewhere: float) -> Tables:
    plain, by_cost = (_difference(tables, by_cost=way) for way in (False, True))
    return Tables(tables, differences=(plain, by_cost), elsewhere=elsewhere)


def _difference(tables: Sequence[ShapeTable], *, by_cost: bool) -> float:
    """Ln of time between gains of shapes far apart; 1 where nothing tells."""
    found = [np.empty(0)]
    for number, table in enumerate(tables):
        rest = [*tables[:number], *tables[number + 1 :]]
        if len(rest) < LEAST_SHAPES - 1:
            break
        of_rest = Tables(rest, differences=(float(by_cost), float(not by_cost)), elsewhere=0.0)
        of_rest.least_shapes = min(LEAST_SHAPES, len(rest))
        gain, _, known = _asked(of_rest, table)
        place = torch.tensor([table.shape], dtype=torch.float64)
        left = float(of_rest.weights(place)[1][0])
        found.append(np.abs(gain - table.gain)[known] / np.sqrt(max(left, _LEAST_LEFT)))
    each = np.concatenate(found)
    # A median: few configs differ by far more, and caution is calibrated with them.
    return max(MAD_TO_SIGMA * float(np.median(each)), LEAST_DIFFERENCE) if len(each) else 1.0


def _asked(tables: Tables, table: ShapeTable) -> tuple[Floats, Floats, Bools]:
    """(L, A) gains and spreads of a shape by those of others, and of which configs all know."""
    place = np.column_stack([table.log2_sizes, np.tile(table.shape, (len(table.log2_sizes), 1))])
    with torch.no_grad():
        told = tables(torch.from_numpy(place), torch.from_numpy(table.relative_cost))
    gain, spread, near, _ = (each.numpy() for each in told)
    known = near & table.is_near
    known[:, ABSTAIN_ACTION] = False
    return gain, spread, known


def _left_out_shapes(tables: Sequence[ShapeTable]) -> Calibration:
    """For each size of each shape the config that the other shapes would take."""
    parts = [Calibration.joined([])]
    for number, table in enumerate(tables if len(tables) > LEAST_SHAPES else []):
        of_rest = _tables([*tables[:number], *tables[number + 1 :]], elsewhere=0.0)
        gain, spread, known = _asked(of_rest, table)
        rows = np.flatnonzero(known.any(axis=1))
        best = best_of(gain[rows], spread[rows], known[rows], _ELSEWHERE)
        at = rows, best
        parts.append(Calibration(gain[at], table.gain[at], spread[at], table.spread[at]))
    return Calibration.joined(parts)
