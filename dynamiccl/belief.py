"""What is believed of a table's times after some measurements, and where that is enough to act.

A table is one collective on one group shape: S sizes and A configs, NCCL's own choice the first.
The prior of its log times is a Gaussian whose mean and covariance are those of drawn worlds on its
own grid (`drawn_worlds`); NCCL's costs, where they are known, are conditioned on first.
Measurements give a posterior in closed form (Rasmussen and Williams 2006, section 2.1), in the
space of the covariance's R largest directions. What these leave out of a place is its own, and so
is what no drawn machine has: how large that is, config by config, the measurements tell.

It acts only where the gain over NCCL's own choice is more than `caution` spreads, the config was
measured within an octave, and NCCL's choice within an octave on either side, with a gain of more
than a spread at both of these sizes: NCCL changes its choice at sizes that nothing foretells. As
many spreads there as here made nothing safer, and took half as many probes again. The caution is
calibrated on further draws, measured at the very same places: in worlds like those at most `alpha`
of the sizes at which it acts are slower. A machine is not one of those:

* evidence that is less likely than that of 99 % of the draws widens the prior until it is not;
* the spread is multiplied by how far octaves that are left out are from what the others say of
  them (rms of z), where that is more than 1.

N = S x A places, place = size x A + action; R directions; n places measured; W worlds; C of them
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.polynomial.hermite_e import hermegauss
from numpy.random import Generator, default_rng

from dynamiccl.drawn_worlds import Floats, Grid, Ints, draw_worlds

Bools = npt.NDArray[np.bool_]
#: For the prior, and for caution: so many draws, and sizes to show that 1 % are slower.
_DRAWS: Final = 1000
_HELD_OUT: Final = 300
_HELD_OUT_SIZES: Final = 3000
_RANK: Final = 150
#: Ln of time: a place's own beforehand, and how far costs may be off the drawn machines.
OWN: Final = 0.03
_COST_SLACK: Final = 0.2
#: Ln of time: nothing is known better.
_LEAST_OWN: Final = 0.003
#: Degrees of freedom of places' own, the measurements that the initial guess counts as, and rounds
#: of expectation and maximization.
_TAIL: Final = 4.0
_BEFOREHAND: Final = 20.0
_ROUNDS: Final = 8
#: Where costs are conditioned on: nearly lines in between.
_COST_SIZES: Final = 6
#: Share of the sizes at which it acts that may be slower, and by how much is slower.
ALPHA: Final = 0.01
SLOWER: Final = 0.01
#: Ln of time: below, no change of NCCL's choice is worth it.
MIN_GAIN: Final = 0.005
#: Spreads: as many as for caution made nothing safer, and took half as many probes again.
AROUND: Final = 1.0
#: Octaves to measurements of NCCL's choice and the config.
_REACH: Final = 1.0
_EXACT: Final = 1e-6
#: A machine is no draw: fewer than the first is never enough.
LEAST_CAUTION: Final = 2.0
_CAUTIONS: Final = np.arange(LEAST_CAUTION, 8.01, 0.25)
_USUAL: Final = 0.99
#: Usual ones beside those found: a few say little of the spread.
_FEW: Final = 4.0
#: Of the places whose worth is looked at: the most promising, and random ones.
_PROMISING: Final = 25
_RANDOM: Final = 25
#: Gauss-Hermite steps of a standard normal, with weights; and what an expected gain is worth
#: beside a sure one.
_STEPS: Final = hermegauss(7)
_OF_EXPECTED: Final = 0.2


@dataclass(frozen=True, slots=True)
class Prior:
    """Of a grid's log times: mean (N,) and covariance factors factors' + diag(own)."""

    grid: Grid
    mean: Floats
    factors: Floats  # (N, R)
    own: Floats  # (N,)
    #: (N, W) times of held-out worlds, and what the prior expects of each by its costs.
    worlds: Floats
    expected: Floats


@lru_cache(maxsize=64)
def prior_of(grid: Grid, seed: int = 11) -> Prior:
    """Takes about a second; equal grids get it from memory."""
    more = _HELD_OUT_SIZES // len(grid.log2_sizes) - _HELD_OUT
    numbers = [_DRAWS + _HELD_OUT, *([more] if more > 0 else [])]
    drawn = [draw_worlds(grid, n, default_rng(seed + i)) for i, n in enumerate(numbers)]
    times, costs = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    count, told = times[0].size, _told_costs(grid)
    at = told[:, 0].astype(np.int64), told[:, 1].astype(np.int64)
    values = np.hstack([times.reshape(len(times), -1), costs[:, at[0], at[1]]]).T
    mean = values[:, :_DRAWS].mean(axis=1, keepdims=True)
    centered = values[:, :_DRAWS] - mean
    factors = _largest(centered)
    own = np.maximum(np.square(centered).mean(axis=1) - np.square(factors).sum(axis=1), 0.0)
    precision = 1.0 / (own[count:] + _COST_SLACK**2)
    root, of_costs = _root_of(factors[count:], precision), factors[count:].T
    factors, expects = factors[:count], mean[count:]
    gain = factors @ _solved(root, of_costs * precision)
    return Prior(
        grid,
        (mean[:count] + gain @ (told[:, 2:] - expects))[:, 0],
        np.asarray(np.linalg.solve(root, factors.T)).T,
        own[:count],
        values[:count, _DRAWS:],
        mean[:count] + gain @ (values[count:, _DRAWS:] - expects),
    )


def doubted(
    prior: Prior, places: Ints, log_us: Floats, variance: Floats, repeats: Floats
) -> Floats:
    """(n,) variances: larger where fewer than 3 repeats are slower than all others say.

    A single call is slow by a multiple now and then. What is more than 2.5 standard deviations late
    gets the variance that makes it so many. A fast one is believed: nothing makes a call faster
    than the machine is.
    """
    at, off, found = prior.factors[places], log_us - prior.mean[places], variance
    for _ in range(3):
        precision = 1.0 / (prior.own[places] + OWN**2 + found)
        root = _root_of(at, precision)
        late, expected = _left_out_one(root, at, precision, off)
        excess = np.square(np.maximum(late / 2.5, 0.0)) - (expected - found + variance)
        found = variance + np.where(repeats < 3, np.maximum(excess, 0.0), 0.0)
    return found


def _told_costs(grid: Grid) -> Floats:
    """(n, 3) size, cell and value of the costs to condition on."""
    if not grid.log_costs:
        return np.empty((0, 3))
    sizes = np.unique(np.linspace(0, len(grid.log2_sizes) - 1, _COST_SIZES).round().astype(int))
    values = np.array(grid.log_costs)[sizes]
    row, cell = np.nonzero(np.isfinite(values))
    return np.column_stack([sizes[row], cell, values[row, cell]])


def _largest(centered: Floats) -> Floats:
    """(N, R) covariance factors of centered worlds (N, W)."""
    places, worlds = centered.shape
    if places < worlds:
        values, vectors = np.linalg.eigh(centered @ centered.T / worlds)
        found = vectors * np.sqrt(np.maximum(values, 0.0))
    else:
        vectors = np.linalg.eigh(centered.T @ centered).eigenvectors
        found = centered @ vectors / math.sqrt(worlds)
    return np.asarray(found[:, ::-1][:, :_RANK])


def _root_of(factors: Floats, precision: Floats) -> Floats:
    """(R, R) lower root of the directions' posterior precision."""
    inner = np.eye(factors.shape[1]) + (factors.T * precision) @ factors
    return np.asarray(np.linalg.cholesky(inner))


def _solved(root: Floats, right: Floats) -> Floats:
    return np.asarray(np.linalg.solve(root.T, np.linalg.solve(root, right)))


def _left_out_one(
    root: Floats, factors: Floats, precision: Floats, off: Floats
) -> tuple[Floats, Floats]:
    """(n,) less what all others say, and its variance (Rasmussen and Williams, 5.10 to 5.12)."""
    half = np.linalg.solve(root, factors.T * precision)
    expected = 1.0 / (precision - np.square(half).sum(axis=0))
    return expected * (precision * off - half.T @ (half @ off)), expected


class Belief:
    """The posterior of a table."""

    #: (S, A) expected gain over NCCL's own choice, ln of time, and its spread.
    gain: Floats
    spread: Floats
    #: (N,) variance of places' own, before widening.
    own: Floats
    #: Factor on the prior's variance, and on the spread.
    widened: float
    stretch: float

    def __init__(
        self,
        prior: Prior,
        places: Ints,
        log_us: Floats,
        variance: Floats,
        *,
        allowed: Bools | None = None,
    ) -> None:
        """`places` (n,) are distinct, each with a mean ln us and its noise; `allowed` (S, A)."""
        self._prior, self._places, self._noise = prior, places, variance
        self._log_us = log_us
        self._cautions = dict[float, float]()
        self._shape = len(prior.grid.log2_sizes), len(prior.grid.configs)
        self._log2_sizes = np.array(prior.grid.log2_sizes)
        self._default = np.arange(len(prior.mean)) // self._shape[1] * self._shape[1]
        self._allowed = np.ones(self._shape, dtype=np.bool_) if allowed is None else allowed.copy()
        self._allowed[:, 0] = False
        noise = default_rng(len(places)).standard_normal((len(places), prior.worlds.shape[1]))
        self._held = (prior.worlds - prior.expected)[places] + np.sqrt(variance)[:, None] * noise
        off = (log_us - prior.mean[places])[:, None]
        self._widen(off)
        self.gain = self._gains(off, prior.mean[:, None]).reshape(self._shape)
        kept = (1.0 - self._told)[:, None] * self._factors
        #: (R, N) how the directions move the gains.
        self._moves = np.linalg.solve(self._root, (kept[self._default] - kept).T)
        self._variance = np.square(self._moves).sum(axis=0) + self._left + self._left[self._default]
        self._left_out = self._octaves(off)
        self.stretch = float(self._stretches(self._left_out)[0])
        self.spread = self.stretch * np.sqrt(self._variance).reshape(self._shape)

    def decide(self, alpha: float = ALPHA) -> Ints:
        """(S,) configs; 0 where NCCL's own choice stands."""
        return self._best(self.gain, self.spread, self.may_act, self.caution(alpha))

    def caution(self, alpha: float = ALPHA) -> float:
        """Spreads that a gain must exceed; infinite where no number is enough."""
        if alpha not in self._cautions:
            self._cautions[alpha] = self._calibrated(alpha)
        return self._cautions[alpha]

    def _calibrated(self, alpha: float) -> float:
        gains = self._gains(self._held, self._prior.expected).T.reshape(-1, *self._shape)
        worlds = self._prior.worlds
        true = (worlds[self._default] - worlds).T.reshape(gains.shape)
        stretches = self._stretches(self._octaves(self._held))[:, None, None]
        spread = stretches * np.sqrt(self._variance).reshape(self._shape)
        may = self._may(gains, spread)
        for caution in _CAUTIONS:
            best = self._best(gains, spread, may, caution)
            got = np.take_along_axis(true, best[..., None], axis=2)[..., 0]
            slower = np.count_nonzero((best > 0) & (got < -math.log1p(SLOWER)))
            if slower + 1 <= alpha * (np.count_nonzero(best) + 1):
                return float(caution)
        return math.inf

    def _may(self, gain: Floats, spread: Floats) -> Bools:
        """(..., S, A) as `may_act`, of other gains."""
        gains = gain > AROUND * spread
        below, above = self._neighbours
        around = gains[..., below, :] & gains[..., above, :]
        return np.asarray(self._allowed & self.is_near & around)

    def _best(self, gain: Floats, spread: Floats, may: Bools, caution: float) -> Ints:
        """(..., S) largest sure gain (..., S, A); 0 without one."""
        # Infinite caution times a spread of 0 would be no number.
        bar = np.maximum(caution * np.maximum(spread, 1e-12), MIN_GAIN)
        sure = np.where(may & (gain > bar), gain, 0.0)
        best: Ints = np.where(sure.max(axis=-1) > 0.0, sure.argmax(axis=-1), 0)
        return best

    def draws(self, count: int, random: Generator) -> Floats:
        """(count, S, A) draws of the gains."""
        moved = random.standard_normal((count, len(self._moves))) @ self._moves
        own = np.sqrt(self._left) * random.standard_normal((count, len(self._left)))
        off = (moved + own[:, self._default] - own).reshape(count, *self._shape)
        return np.asarray(self.gain + self.stretch * off)

    def most_worth(
        self, count: int, noise: float, random: Generator, beside: int | Ints = 1
    ) -> list[tuple[int, float]]:
        """(place, worth) of `count` next measurements: what is worth most for what it takes.

        The worth is what a measurement of the config and NCCL's choice brings: the knowledge
        gradient (Frazier, Powell and Dayanik 2009) of two sums over the sizes, of the gains that
        are sure after it, and, for a share, of those that are expected, since it may take several
        measurements to be sure. Each counts as if those before it had brought what is expected.
        `noise` is the variance of a log time; `random` draws some of the places that are looked at.
        The first at a size takes `beside` measurements of NCCL's choice, (S, A) or all the same.
        """
        places = self._candidates(random)
        size, action = np.divmod(places, self._shape[1])
        is_config = (action[:, None] == np.arange(self._shape[1]))[:, None]
        below, above = sides((self._log2_sizes[size] - self._log2_sizes[:, None]).T[..., None])
        row, column = np.divmod(self._places, self._shape[1])
        told, (side_below, side_above) = row[column == 0], self.default_sides
        near, covariance, variance = self.config_near, self._covariance(places), self._variance
        cost = 1.0 + np.broadcast_to(beside, self._shape).ravel()[places]
        found, sizes = list[tuple[int, float]](), range(self._shape[0])
        for _ in range(count if len(places) else 0):
            both = (side_below | below) & (side_above | above)
            may = both[..., None] & (near | (is_config & (below | above)[..., None]))
            around = np.stack([neighbours(np.append(told, each), len(sizes)) for each in sizes])
            total = variance[places] + 2.0 * noise
            value = self._value(covariance / np.sqrt(total)[:, None], variance, may, around[size])
            may = ((side_below & side_above)[:, None] & near)[None]
            now = neighbours(told, len(sizes))[None]
            before = self._value(np.zeros((1, len(variance))), variance, may, now)
            worth = (value - before) / cost
            best = int(worth.argmax())
            found.append((int(places[best]), float(worth[best])))
            moved = covariance[best]
            variance = np.maximum(variance - np.square(moved) / total[best], 0.0)
            covariance = covariance - covariance[:, places[best], None] * (moved / total[best])
            told = np.append(told, size[best])
            side_below, side_above = side_below | below[best], side_above | above[best]
            near = near | (is_config[best] & (below | above)[best, :, None])
            cost = np.where(size == size[best], 1.0, cost)
        return found

    def _candidates(self, random: Generator) -> Ints:
        """(C,) each config where it promises most, the most promising places, and random ones."""
        there = np.flatnonzero(self._allowed)
        hoped = np.where(self._allowed, self.gain + self.spread, -np.inf)
        of_each = hoped.argmax(axis=0) * self._shape[1] + np.arange(self._shape[1])
        more = hoped - np.maximum(self.gain.max(axis=1), 0.0)[:, None]
        promising = np.argsort(more.ravel())[::-1][:_PROMISING]
        others = random.choice(there, min(_RANDOM, len(there)), replace=False)
        places = np.unique(np.concatenate([of_each, promising, others]))
        return places[self._allowed.flat[places]]

    def _covariance(self, places: Ints) -> Floats:
        """(C, N) covariances of some places' gains with all, before the stretch."""
        found = self._moves[:, places].T @ self._moves
        default, columns = self._default, np.arange(len(self._default))
        found += self._left[default[places], None] * (default[places, None] == default)
        found += self._left[places, None] * (places[:, None] == columns)
        return np.asarray(found)

    def _value(self, moves: Floats, variance: Floats, may: Bools, around: Ints) -> Floats:
        """(C,) the sums after measurements that move the gains by `moves` (C, N).

        `may` (C, S, A): where one may act then; `around` (C, 2, S): measured sizes beside each.
        """
        left = self.stretch * np.sqrt(np.maximum(variance - np.square(moves), 0.0))
        moves, left = self.stretch * moves.reshape(may.shape), left.reshape(may.shape)
        bar = np.maximum(LEAST_CAUTION * left, MIN_GAIN)
        below, above = around[:, 0], around[:, 1]
        number, found = np.arange(len(moves))[:, None], np.zeros(len(moves))
        for step, weight in zip(*_STEPS, strict=True):
            gain = np.where(self._allowed, self.gain + step * moves, 0.0)
            gains = gain > AROUND * left
            acts = may & gains[number, below] & gains[number, above] & (gain > bar)
            sure = np.where(acts, gain, 0.0).max(axis=2).sum(axis=1)
            expected = np.maximum(gain, 0.0).max(axis=2).sum(axis=1)
            found += weight / math.sqrt(2.0 * math.pi) * (sure + _OF_EXPECTED * expected)
        return found

    @property
    def may_act(self) -> Bools:
        """(S, A) where a config acts as soon as its gain is sure."""
        return self._may(self.gain, self.spread)

    @property
    def is_near(self) -> Bools:
        """(S, A) where NCCL's choice was measured on either side, and the config near."""
        below, above = self.default_sides
        return np.asarray(self.config_near & (below & above)[:, None])

    @cached_property
    def default_sides(self) -> tuple[Bools, Bools]:
        """(S,) whether NCCL's choice was measured within an octave below, and above."""
        size, action = np.divmod(self._places, self._shape[1])
        return sides(self._log2_sizes[size[action == 0]] - self._log2_sizes[:, None])

    @cached_property
    def _neighbours(self) -> Ints:
        size, action = np.divmod(self._places, self._shape[1])
        return neighbours(size[action == 0], self._shape[0])

    @cached_property
    def config_near(self) -> Bools:
        """(S, A) whether the config was measured within an octave."""
        size, action = np.divmod(self._places, self._shape[1])
        near = np.abs(self._log2_sizes[:, None] - self._log2_sizes[size]) <= _REACH + _EXACT
        return np.asarray(near @ (np.arange(self._shape[1]) == action[:, None]))

    def _widen(self, off: Floats) -> None:
        self.widened = 1.0
        self.own = self._find_own(off[:, 0])
        self._condition()
        if not len(off):
            return
        usual = float(np.quantile(self._surprises(self._held), _USUAL))
        # Noise is not widened, so a step may fall short.
        for _ in range(3):
            found = float(self._surprises(off)[0])
            if found <= usual:
                break
            self.widened *= found / usual
            self._condition()

    def _find_own(self, off: Floats) -> Floats:
        """(N,) variance of places' own.

        Student's t with a scale for each config (Lange, Little and Taylor 1989): a place far off is
        odd by itself. Scales are drawn to their geometric mean, and that to OWN.
        """
        config, count = self._places % self._shape[1], self._shape[1]
        number = np.bincount(config, minlength=count)
        scale, weight = np.full(count, OWN**2), np.ones(len(off))
        at, left = self._prior.factors[self._places], self._prior.own[self._places]
        for _ in range(_ROUNDS):
            own = scale[config] / weight
            precision = 1.0 / (left + own + self._noise)
            root = _root_of(at, precision)
            fitted = at @ _solved(root, at.T @ (precision * off))
            doubt = np.square(np.linalg.solve(root, at.T)).sum(axis=0)
            share = own * precision
            square = np.square(share) * (np.square(off - fitted) + doubt) + own * (1.0 - share)
            weight = (_TAIL + 1.0) / (_TAIL + square / scale[config])
            total = np.bincount(config, weight * square, count)
            logs = _BEFOREHAND * math.log(OWN**2)
            logs += (number * np.log(np.maximum(total, _EXACT**2) / np.maximum(number, 1))).sum()
            common = math.exp(logs / (_BEFOREHAND + len(off)))
            scale = np.maximum((_FEW * common + total) / (_FEW + number), _LEAST_OWN**2)
        variance = np.tile(scale * _TAIL / (_TAIL - 2.0), self._shape[0])
        variance[self._places] = scale[config] / weight
        return np.asarray(self._prior.own + variance)

    def _condition(self) -> None:
        self._factors = math.sqrt(self.widened) * self._prior.factors
        own = self.widened * self.own
        self._precision = 1.0 / (own[self._places] + self._noise)
        self._root = _root_of(self._factors[self._places], self._precision)
        #: (N,) share of a measurement that is the place's own, and the variance left.
        self._told = np.zeros(len(own))
        self._told[self._places] = own[self._places] * self._precision
        self._left = own * (1.0 - self._told)

    def _surprises(self, off: Floats) -> Floats:
        """(W,) squared Mahalanobis lengths of deviations (n, W)."""
        weighted = self._precision[:, None] * off
        inner = np.linalg.solve(self._root, self._factors[self._places].T @ weighted)
        return np.asarray((off * weighted).sum(axis=0) - np.square(inner).sum(axis=0))

    def _gains(self, off: Floats, before: Floats) -> Floats:
        """(N, W) posterior gains; `off` (n, W) is what was measured less `before` (N, W)."""
        inner = self._factors[self._places].T @ (self._precision[:, None] * off)
        weights = _solved(self._root, inner)
        times = before + (1.0 - self._told)[:, None] * (self._factors @ weights)
        times[self._places] += self._told[self._places][:, None] * off
        return np.asarray(times[self._default] - times)

    def left_out(self) -> "LeftOut":
        """The measured gains, each by what the other octaves say of it."""
        found, none = self._left_out, np.empty(0, dtype=np.int64)
        default = np.concatenate([none, *(each.default for each in found)])
        config = np.concatenate([none, *(each.config for each in found)])
        errors = np.concatenate([np.empty(0), *(each.errors[:, 0] for each in found)])
        variance = np.concatenate([np.empty(0), *(each.variance for each in found)])
        size, action = np.divmod(self._places[config], self._shape[1])
        measured = self._log_us[default] - self._log_us[config]
        return LeftOut(
            size,
            action,
            measured - errors,
            measured,
            self.stretch * np.sqrt(variance),
            np.sqrt(self._noise[default] + self._noise[config]),
        )

    def _stretches(self, octaves: Sequence["_Octave"]) -> Floats:
        total, count = np.array([_FEW]), _FEW
        for each in octaves:
            noise = self._noise[each.default] + self._noise[each.config]
            total = total + (np.square(each.errors) / (each.variance + noise)[:, None]).sum(axis=0)
            count += len(each.default)
        stretches: Floats = np.sqrt(np.maximum(total / count, 1.0))
        return stretches

    def _octaves(self, off: Floats) -> list["_Octave"]:
        at, weight = self._factors[self._places], self._precision[:, None] * off
        number = np.full(len(self._default), -1)
        number[self._places] = np.arange(len(self._places))
        default = number[self._default[self._places]]
        is_pair = (default >= 0) & (default != np.arange(len(self._places)))
        octave = np.floor(self._log2_sizes[self._places // self._shape[1]] + _EXACT)
        found = []
        for each in np.unique(octave[is_pair]):
            kept = octave != each
            root = _root_of(at[kept], self._precision[kept])
            weights = _solved(root, at[kept].T @ weight[kept])
            config = np.flatnonzero(is_pair & ~kept)
            own = default[config]
            moves = at[own] - at[config]
            variance = np.square(np.linalg.solve(root, moves.T)).sum(axis=0)
            of_places = 1.0 / self._precision - self._noise
            variance += of_places[own] + of_places[config]
            found.append(_Octave(own, config, off[own] - off[config] - moves @ weights, variance))
        return found


class _Octave(NamedTuple):
    """Pairs of NCCL's choice and a config at one size of an octave, as numbers of measurements."""

    default: Ints
    config: Ints
    #: (pairs, W) gains less what the other octaves say, and (pairs,) variance without noise.
    errors: Floats
    variance: Floats


class LeftOut(NamedTuple):
    """(pairs,) gains over NCCL's choice at one size, by the other octaves."""

    size: Ints
    action: Ints
    predicted: Floats
    measured: Floats
    #: Of the prediction, and of the measurement.
    spread: Floats
    noise: Floats


def neighbours(measured: Ints, count: int) -> Ints:
    """(2, count) nearest measured sizes below and above; else the size itself."""
    number, size = np.arange(count), np.unique(measured)
    if not len(size):
        return np.stack([number, number])
    place = np.searchsorted(size, number, side="right")
    below = np.where(place > 0, size[np.maximum(place - 1, 0)], number)
    place = np.searchsorted(size, number)
    above = np.where(place < len(size), size[np.minimum(place, len(size) - 1)], number)
    return np.stack([below, above])


def sides(apart: Floats) -> tuple[Bools, Bools]:
    """Whether any of the last axis is within an octave below, and above; 0 is both."""
    below = ((apart <= _EXACT) & (apart >= -_REACH - _EXACT)).any(axis=-1)
    above = ((apart >= -_EXACT) & (apart <= _REACH + _EXACT)).any(axis=-1)
    return np.asarray(below), np.asarray(above)
