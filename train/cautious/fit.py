"""From a data set to a policy of tables: a belief for each, and how sure a gain must be to act.

A table's caution is that of its belief, calibrated on drawn worlds. The machine's own distinct
tasks, octaves left out of its tables, only raise it until there are 1 / alpha of them; from then on
they alone tell it. Of shapes that nobody measured, it is told by measured shapes that are left out.

How left-out tasks tell it is conformal risk control (Angelopoulos et al. 2022, section 2): on n
tasks that are exchangeable with those of deployment, the policy acts where its score (predicted
gain over the spread of it) is above a threshold; the least threshold at which
(slower + 1) / (n + 1) <= alpha keeps the expected share of tasks on which it acts and is slower at
alpha or below. *Slower* is by more than SLOWER and than the noise: a config that is the one that
NCCL runs anyway is measured as slower every other time.
"""

import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch

from dynamiccl.belief import LEAST_CAUTION, MIN_GAIN, SLOWER, Belief, Bools, doubted, prior_of
from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.drawn_worlds import Floats, Ints
from dynamiccl.repeats import MAD_TO_SIGMA
from dynamiccl.train import tracking
from dynamiccl.train.cautious.policy import (
    LEAST_DIFFERENCE,
    LEAST_SHAPES,
    Block,
    CautiousPolicy,
    ShapeTable,
    Tables,
)
from dynamiccl.train.cautious.tasks import Measured, Tasks
from dynamiccl.train.data import TrainingData
from dynamiccl.train.export import FitSummary, end_run
from dynamiccl.train.policy import forward
from dynamiccl.train.recipe import Recipe

#: Standard deviations of an interval that holds 90 % of normal values.
_NINETY: Final = 1.6449


@dataclass(frozen=True, slots=True)
class Calibration:
    """Tasks that were left out: predicted gain of the chosen config, and measured gain."""

    #: (N,) ln of NCCL's time over that of the chosen config, as predicted and as measured.
    predicted: Floats
    measured: Floats
    #: (N,) the spread of the prediction.
    spread: Floats
    #: (N,) the spread of the measurement.
    noise: Floats

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All tasks of several calibrations; empty without any."""
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
        """Fraction of measured gains inside the predicted 90 % intervals."""
        if not len(self):
            return math.nan
        inside = np.abs(self.predicted - self.measured) <= self.reach + 1e-12
        return float(inside.mean())

    @property
    def reach(self) -> Floats:
        """(N,) half of the width of the predicted 90 % intervals."""
        reach: Floats = _NINETY * np.sqrt(self.spread**2 + self.noise**2)
        return reach

    def least_alpha(self) -> float:
        """The smallest bound that this many tasks alone can support."""
        return 1.0 / (len(self) + 1)

    def raised(self, drawn: float, alpha: float) -> float:
        """The threshold on the score: what drawn worlds ask for, or more where these tasks do.

        That of these tasks alone where they are enough for `alpha`.
        """
        is_slower = self.measured < -math.log1p(SLOWER) - _NINETY * self.noise
        slower = np.sort(self.score[is_slower])[::-1]
        allowed = math.floor(alpha * (len(self) + 1) + 1e-9) - 1
        own = float(slower[max(allowed, 0)]) if max(allowed, 0) < len(slower) else 0.0
        return max(own, LEAST_CAUTION if allowed >= 0 else drawn)


def best_of(gain: Floats, spread: Floats, known: Bools, caution: float) -> Ints:
    """(N,) of each row the largest gain (N, A) among the sure ones; the largest where none is."""
    gain = np.where(known, gain, -np.inf)
    sure = gain > np.maximum(caution * np.where(known, spread, 0.0), MIN_GAIN)
    any_sure = sure.any(axis=1, keepdims=True)
    best: Ints = np.where(sure | ~any_sure, gain, -np.inf).argmax(axis=1)
    return best


#: Called with the tables that are done, and how many there are.
Progress = Callable[[int, int], None]
#: Caution at shapes that nobody measured, at least.
_ELSEWHERE: Final = 3.0
#: The least share of a difference that is taken to be unknown between shapes next to each other.
_LEAST_LEFT: Final = 0.05


@dataclass(frozen=True, slots=True)
class Fitted:
    """A fitted policy, with its calibrations."""

    policy: CautiousPolicy
    #: The same that has seen training bins alone: what the validation bins can judge.
    of_training: CautiousPolicy
    #: On octaves left out, and on whole group shapes, each by machine; the latter are empty for few
    #: shapes.
    of_sizes: Sequence[Calibration]
    of_shapes: Sequence[Calibration]
    #: The most that evidence widened a prior, as a factor on its standard deviation, and the most
    #: that left-out octaves stretched a spread.
    widened: float
    stretched: float


def fit_tables(
    data: TrainingData, *, alpha: float, progress: Progress = lambda _done, _count: None
) -> Fitted:
    """Fit to the training and validation bins, and calibrate on what is left out of them."""
    tasks = Tasks.of(data)
    found = list(tasks.tables())
    told, trained = list[_Told](), list[_Told]()
    for measured, is_train in found:
        told.append(_Told(measured, alpha))
        trained.append(_Told(measured.only(is_train), alpha))
        progress(len(told), len(found))
    policy, of_sizes, of_shapes = _policy(tasks, told, alpha)
    return Fitted(
        policy,
        _policy(tasks, trained, alpha)[0],
        of_sizes,
        of_shapes,
        max(float(np.sqrt(each.widened)) for each in told),
        max(each.stretch for each in told),
    )


class _Told:
    """What the belief of one table says; the belief itself is large, and there are many tables."""

    def __init__(self, measured: Measured, alpha: float) -> None:
        self.measured = measured
        prior, told = prior_of(measured.grid), (measured.places, measured.log_us)
        variance = doubted(prior, *told, measured.variance, measured.repeats)
        belief = Belief(prior, *told, variance)
        self.gain, self.spread = belief.gain, belief.spread
        self.is_near, self.may_act = belief.is_near, belief.may_act
        self.widened, self.stretch = belief.widened, belief.stretch
        self.caution = belief.caution(alpha)
        self._left_out = belief.left_out()

    def left_out(self) -> Calibration:
        """For each size that was measured the config that the other octaves would take."""
        found = self._left_out
        sizes, row = np.unique(found.size, return_inverse=True)
        at = row, found.action
        predicted, measured, spread, noise = np.full(
            (4, len(sizes), len(self.measured.grid.configs)), np.nan
        )
        predicted[at], measured[at] = found.predicted, found.measured
        spread[at], noise[at] = found.spread, found.noise
        best = best_of(predicted, spread, ~np.isnan(predicted), LEAST_CAUTION)
        mine = np.arange(len(sizes)), best
        return Calibration(predicted[mine], measured[mine], spread[mine], noise[mine])

    def shape_table(self, actions: int, caution: float) -> ShapeTable:
        """For all actions of the catalogue, what is not in the table is not known."""
        measured = self.measured
        shape = len(measured.grid.log2_sizes), actions

        def of_all(values: Floats, empty: float) -> Floats:
            found = np.full(shape, empty)
            found[:, measured.actions] = values
            return found

        is_near, may_act = np.zeros((2, *shape), dtype=np.bool_)
        is_near[:, measured.actions] = self.is_near
        may_act[:, measured.actions] = self.may_act
        return ShapeTable(
            measured.shape,
            np.array(measured.grid.log2_sizes),
            of_all(self.gain, 0.0),
            of_all(self.spread, np.inf),
            is_near,
            may_act,
            of_all(measured.relative_cost, np.nan),
            caution,
        )


def _policy(
    tasks: Tasks, told: Sequence[_Told], alpha: float
) -> tuple[CautiousPolicy, list[Calibration], list[Calibration]]:
    blocks, of_sizes, of_shapes = [], [], []
    for machine in range(len(tasks.machines)):
        groups = defaultdict[int, list[_Told]](list)
        for each in told:
            if each.measured.machine == machine:
                groups[each.measured.collective].append(each)
        mine = [each for group in groups.values() for each in group]
        sizes = Calibration.joined([each.left_out() for each in mine])
        tables = {
            collective: [
                each.shape_table(len(tasks.data.catalogue), sizes.raised(each.caution, alpha))
                for each in group
            ]
            for collective, group in groups.items()
        }
        shapes = Calibration.joined([_left_out_shapes(each) for each in tables.values()])
        elsewhere = shapes.raised(_ELSEWHERE, alpha)
        for collective, held in tables.items():
            blocks.append(Block(machine, collective, _tables(held, elsewhere)))
        of_sizes.append(sizes)
        of_shapes.append(shapes)
    parts = (tasks.maker, tasks.machines, blocks, tasks.level_shares)
    return CautiousPolicy(*parts).eval(), of_sizes, of_shapes


def _tables(tables: Sequence[ShapeTable], elsewhere: float) -> Tables:
    """With what shapes differ by, as shapes that are left out tell; one alone tells nothing."""
    plain, by_cost = (_difference(tables, by_cost=way) for way in (False, True))
    return Tables(tables, differences=(plain, by_cost), elsewhere=elsewhere)


def _difference(tables: Sequence[ShapeTable], *, by_cost: bool) -> float:
    """Ln of time: what the gains of shapes far apart differ by; 1 where nothing tells.

    Shapes that are left out tell, each over what the others leave unknown of it.
    """
    found = [np.empty(0)]
    for number, table in enumerate(tables):
        rest = [*tables[:number], *tables[number + 1 :]]
        if len(rest) < LEAST_SHAPES - 1:
            break
        of_rest = Tables(rest, differences=(float(by_cost), float(not by_cost)), elsewhere=0.0)
        of_rest.least_shapes = min(LEAST_SHAPES, len(rest))
        gain, _, near = _asked(of_rest, table)
        place = torch.tensor([table.shape], dtype=torch.float64)
        left = float(of_rest.weights(place)[1][0])
        known = near & table.is_near
        known[:, ABSTAIN_ACTION] = False
        found.append(np.abs(gain - table.gain)[known] / np.sqrt(max(left, _LEAST_LEFT)))
    each = np.concatenate(found)
    # A median: few configs differ by far more than most, and caution is calibrated with them.
    return max(MAD_TO_SIGMA * float(np.median(each)), LEAST_DIFFERENCE) if len(each) else 1.0


def _asked(tables: Tables, table: ShapeTable) -> tuple[Floats, Floats, Bools]:
    """(L, A) gains, spreads and nearness that tables tell of another one's places."""
    place = np.column_stack([table.log2_sizes, np.tile(table.shape, (len(table.log2_sizes), 1))])
    with torch.no_grad():
        told = tables(torch.from_numpy(place), torch.from_numpy(table.relative_cost))
    gain, spread, near, _ = (each.numpy() for each in told)
    return gain, spread, near


def _left_out_shapes(tables: Sequence[ShapeTable]) -> Calibration:
    """For each size of each shape the config that the other shapes would take there."""
    parts = [Calibration.joined([])]
    for number, table in enumerate(tables if len(tables) > LEAST_SHAPES else []):
        of_rest = _tables([*tables[:number], *tables[number + 1 :]], elsewhere=0.0)
        gain, spread, near = _asked(of_rest, table)
        known = near & table.is_near
        known[:, ABSTAIN_ACTION] = False
        rows = np.flatnonzero(known.any(axis=1))
        best = best_of(gain[rows], spread[rows], known[rows], _ELSEWHERE)
        at = rows, best
        parts.append(Calibration(gain[at], table.gain[at], spread[at], table.spread[at]))
    return Calibration.joined(parts)


def fit_and_export(
    data: TrainingData, recipe: Recipe, run: tracking.Run, progress: Progress
) -> FitSummary:
    """Fit, calibrate, export, and track; raises what these raise."""
    started = time.monotonic()
    fitted = fit_tables(data, alpha=recipe.alpha, progress=progress)
    fitted.policy.level_threshold = recipe.level_threshold
    actions, _ = forward(fitted.of_training, data.observations, data.validation.mask)
    seconds = time.monotonic() - started
    figures = {"prior_widened": fitted.widened, "spread_stretched": fitted.stretched}
    for name, of in (("sizes", fitted.of_sizes), ("shapes", fitted.of_shapes)):
        every = Calibration.joined(of)
        keep = sum(each.least_alpha() <= recipe.alpha for each in of)
        figures[f"calibration_tasks_{name}"] = float(len(every))
        figures[f"machines_that_keep_alpha_{name}"] = float(keep)
        if len(every):
            figures[f"coverage_90_{name}"] = every.coverage
    from dynamiccl.train.plots import calibration_plot  # Matplotlib takes a second to import

    with tempfile.TemporaryDirectory() as folder:
        plots = Path(folder) / "plots"
        plots.mkdir()
        every = Calibration.joined(fitted.of_sizes)
        figure = calibration_plot(every.predicted, every.measured, every.reach)
        figure.savefig(plots / "calibration.png", dpi=120)
        return end_run(
            run,
            Path(folder),
            fitted.policy,
            data,
            recipe,
            figures,
            abstain_margin=MIN_GAIN,
            steps=0,
            seconds=seconds,
            best_step=0,
            validation_regret=data.mean_over_groups(actions),
            alpha=recipe.alpha,
            widened=fitted.widened,
            stretched=fitted.stretched,
        )
