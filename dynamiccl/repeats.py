"""The belief about log times: for each task a posterior, and the decision that follows from it.

What was measured of a config at one size is a `Cell`: a median, without the drift of its rounds,
and its noise. Over the cells of a subspace, one (algorithm, protocol), lies a Gaussian process
(Rasmussen & Williams 2006, below R&W), in numpy: each cell has a noise of its own, and a login node
needs no further package. Statistics are medians: a single call is slow by a multiple now and then.

A *place* is log2 of size, channels and chunk bytes; a *row* is a place, and log time, variance and
repeats of its cell. There are n cells of a subspace, k configs of a task, m places.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.random import Generator, default_rng

Floats = npt.NDArray[np.float64]
#: By id of a config at one size, (round, log time_us) of each measurement, sorted.
Times = Mapping[Hashable, Sequence[tuple[int, float]]]
#: Of these log times the median, its variance from noise alone, and how many they are.
Cell = tuple[float, float, int]
_NO_CELL: Final = (math.nan, math.nan, 0)
#: Where AUTO is on a knob. NCCL's own number is not known: AUTO is far from all numbers.
AUTO: Final = -1e6
#: Standard deviation of normal noise = this times the median of its absolute values.
MAD_TO_SIGMA: Final = 1.4826
#: Variance of the median of n normal values = this / n times theirs (n large).
_MEDIAN_VARIANCE: Final = math.pi / 2
#: Joint draws from the posterior of a task.
_DRAWS: Final = 400
#: Values that each figure of the kernel may take.
_KERNELS: Final = {
    "curve": (0.1, 0.2, 0.4, 0.8),
    "knobs": (0.02, 0.06, 0.15, 0.3, 0.6),
    "size_octaves": (1.0, 2.0, 4.0, 8.0),
    "knob_octaves": (0.7, 1.5, 3.0, 6.0),
    "own": (0.002, 0.01, 0.03, 0.1),
}


class Task(NamedTuple):
    """The configs that compete at one message size, and NCCL's default beside them."""

    log2_size: float
    #: Place of each config by its id, for each subspace.
    subspaces: Mapping[Hashable, Mapping[Hashable, Floats]]
    #: The default's id; None where there is none.
    default: Hashable | None
    #: Of the draws.
    seed: int


class Belief(NamedTuple):
    """The posterior over the log times of one task, and the decision that follows from it.

    The decision is what a table would say now: the fastest config that was measured, if it beats
    NCCL's default with the wanted confidence, else ABSTAIN. In all arrays the default comes last;
    it is NaN without a time, or where it failed.
    """

    #: Ids of the k configs of which no attempt failed.
    configs: Sequence[Hashable]
    #: Log time_us and its standard deviation (k + 1,), and joint draws (draws, k + 1). That of a
    #: default which one round measured is infinite: all of a round may be slow, which is no proof.
    mean: Floats
    sigma: Floats
    draws: Floats
    #: Own median of each, NaN without a time (k + 1,).
    observed: Floats

    def decision(self, confidence: float) -> int | None:
        """Index of the config to take; None = ABSTAIN, which stands where nothing is sure.

        What neighbours say is not enough: the config's own times must beat the default too.
        """
        leader = self._fastest(self.observed < self.observed[-1])
        if leader is None:
            return None
        gain = float(self.mean[-1] - self.mean[leader])
        spread = math.hypot(self.sigma[-1], self.sigma[leader])
        error = 0.5 * math.erfc(gain / (spread * math.sqrt(2.0)))
        # The leader is the luckiest of many configs, and it is looked at after each round: a single
        # look gets a quarter of the error that is allowed in all.
        return leader if error <= (1.0 - confidence) * 0.25 else None

    def regret_draws(self, confidence: float) -> Floats:
        """(draws,) log time of the decision over that of the best, default included."""
        index = self.decision(confidence)
        best: Floats = self.draws.min(axis=1)
        return self.draws[:, -1 if index is None else index] - best

    def policy(self, confidence: float) -> Floats:
        """(k,) probabilities: a tenth for the leader, the rest by the regret that each causes."""
        count, leader = len(self.configs), self._fastest(np.isfinite(self.observed[:-1]))
        if leader is None or math.isnan(self.observed[-1]):
            return np.full(count, 1.0 / count)
        best, regret = self.draws.argmin(axis=1), self.regret_draws(confidence)
        shares = np.bincount(best, regret, minlength=count + 1)[:count] / len(regret)
        chosen: Floats = np.eye(count)[leader]
        if shares.sum() > 0:
            chosen = 0.1 * chosen + 0.9 * shares / shares.sum()
        return chosen

    def _fastest(self, among: npt.NDArray[np.bool_]) -> int | None:
        return min(np.flatnonzero(among).tolist(), key=lambda i: float(self.mean[i]), default=None)


def beliefs(tasks: Sequence[Task], times: Times, failed: Set[Hashable]) -> Iterator[Belief]:
    """The belief about each of some tasks, which share rounds and noise.

    `times` are those of their configs, `failed` the ids that failed at any time.
    """
    cells = cells_of(tasks, times)
    seen: dict[Hashable, list[Sequence[float]]] = defaultdict(list)
    failures = Counter[Hashable]()
    for task in tasks:
        for subspace, places in task.subspaces.items():
            seen[subspace] += [(*places[c], *cells[c]) for c in places if c in cells]
            failures[subspace] += len(failed & places.keys())
    rows = {subspace: np.array(found).reshape(-1, 6) for subspace, found in seen.items()}
    kernel = choose_kernel(list(rows.values()))
    surfaces = {subspace: Surface(kernel, found) for subspace, found in rows.items()}
    # So many failures, and no success, rule a subspace out on this machine.
    ruled_out = {subspace for subspace in seen if failures[subspace] >= 3 and not seen[subspace]}
    for task in tasks:
        random, configs = default_rng(task.seed), list[Hashable]()
        parts: list[tuple[npt.ArrayLike, ...]] = []
        for subspace, places in task.subspaces.items():
            live = [c for c in places if c not in failed and subspace not in ruled_out]
            there = np.array([places[config] for config in live]).reshape(-1, 3)
            configs += live
            medians = [cells.get(config, _NO_CELL)[0] for config in live]
            parts.append((*surfaces[subspace].posterior(there, random), medians))
        log_us, variance, _ = cells.get(None if task.default in failed else task.default, _NO_CELL)
        own = math.sqrt(variance)
        draws = log_us + own * random.normal(size=(_DRAWS, 1))
        rounds = {number for number, _ in times.get(task.default, ())}
        parts.append((log_us, own if len(rounds) > 1 else math.inf, draws, log_us))
        yield Belief(configs, *(np.hstack(part) for part in zip(*parts, strict=True)))


def cells_of(tasks: Sequence[Task], times: Times) -> dict[Hashable, Cell]:
    """The cells of some tasks by id; only of what has a time."""
    drift = round_drift([times.get(task.default, ()) for task in tasks])
    level = {
        config: (task.log2_size, [value - drift.get(n, 0.0) for n, value in times[config]])
        for task in tasks
        for config in chain(*task.subspaces.values(), [task.default])
        if config in times
    }
    differences = [(size, b - a) for size, values in level.values() for a, b in pairwise(values)]
    sigma = {}
    for size in {size for size, _ in level.values()}:
        # The noise of sizes within 1.5 octaves, if there are twelve differences; else of all.
        near = [d for other, d in differences if abs(other - size) <= 1.5]
        taken = near if len(near) >= 12 else [d for _, d in differences]
        spread = MAD_TO_SIGMA * float(np.median(np.abs(taken))) / math.sqrt(2) if taken else 0.03
        sigma[size] = max(spread, 0.001)
    return {config: cell_of(values, sigma[size]) for config, (size, values) in level.items()}


def cell_of(log_us: Sequence[float], sigma: float) -> Cell:
    """The median of a config's log times and its variance, given the noise of a single one.

    Two further apart than four standard deviations of a difference are no pair: the faster one
    counts alone, since single calls are slow now and then and none is fast by chance. Three or more
    that scatter twice as far as the noise, as on a machine with two states, have their own scatter.
    """
    count, middle = len(log_us), float(np.median(log_us))
    if count == 2 and abs(log_us[0] - log_us[1]) > 4.0 * math.sqrt(2) * sigma:
        return min(log_us), sigma**2, 1
    if count <= 2:  # their median is their mean
        return middle, sigma**2 / count, count
    own = MAD_TO_SIGMA * float(np.median(np.abs(np.array(log_us) - middle)))
    wide = own if own > 2.0 * sigma else sigma
    return middle, _MEDIAN_VARIANCE * wide**2 / count, count


def round_drift(of_defaults: Iterable[Sequence[tuple[int, float]]]) -> dict[int, float]:
    """What each round adds to all log times, from NCCL's default in every round.

    A round is a run of its own, and all of it may be slow. Medians are polished over tasks and
    rounds (Tukey, Exploratory Data Analysis, 1977, chapter 11); what comes out is shrunk by how
    much of it the noise alone would make.
    """
    # Of a pair the faster one: that it is slow by chance takes two slow calls.
    tasks = [dict(reversed(times)) for times in of_defaults]
    seen_in = Counter(number for task in tasks for number in task)
    # Rounds of fewer tasks have no drift: their median is no protection against a slow call.
    rounds = sorted(number for number, count in seen_in.items() if count >= 4)
    if len(rounds) < 2:
        return {}
    tasks = [task for task in tasks if not task.keys().isdisjoint(rounds)]
    rest = table = np.array([[task.get(number, np.nan) for number in rounds] for task in tasks])
    drift = np.zeros(len(rounds))
    for _ in range(4):
        rest = table - drift
        rest = rest - np.nanmedian(rest, axis=1, keepdims=True)
        drift = drift + np.nanmedian(rest, axis=0)
    seen = np.isfinite(rest)
    sigma = MAD_TO_SIGMA * float(np.median(np.abs(rest[seen])))
    # The polish has taken its share of the scatter out of what is left.
    left = (1.0 - 1.0 / len(tasks)) * (1.0 - 1.0 / len(rounds))
    noise = _MEDIAN_VARIANCE * sigma**2 / left / seen.sum(axis=0)
    # Drift counts as far as its variance exceeds twice what noise alone would make of it.
    real = max(float(np.mean(drift**2 - 2.0 * noise)), 0.0)
    share = real / (real + noise) if real > 0 else np.zeros(len(rounds))
    return dict(zip(rounds, (drift * share).tolist(), strict=True))


class Kernel(NamedTuple):
    """The prior covariance of log times of two configs; the amplitudes are standard deviations.

    The configs of a subspace share a curve over the size; on it the knobs have an effect that is
    smooth in them and in the size (AutoCCL, Xu et al., NSDI 2025: near-unimodal in each subspace).
    """

    #: Reach over the message size and over a knob, in octaves.
    size_octaves: float = 3.0
    knob_octaves: float = 2.0
    #: How far the size curve leaves its straight line, and how far the knobs move a time.
    curve: float = 0.4
    knobs: float = 0.3
    #: What one cell has of its own, shared with no neighbour.
    own: float = 0.01

    def matrix(self, a: Floats, b: Floats) -> Floats:
        """Covariances, shape (len(a), len(b))."""
        apart = a[:, np.newaxis, :3] - b[:, :3]
        reach = (self.size_octaves, self.knob_octaves, self.knob_octaves)
        # Matern of smoothness 5/2 (R&W, equation 4.17).
        d = math.sqrt(5.0) * np.abs(apart / reach)
        near: Floats = (1.0 + d + d**2 / 3.0) * np.exp(-d)
        # Level and slope per octave: of log times of 1 us to 1 s, flat to proportional to the size.
        line = 3.0**2 + 0.5**2 * (a[:, :1] - 20.0) * (b[:, 0] - 20.0)
        moved = self.curve**2 + self.knobs**2 * (near[..., 1] * near[..., 2])
        own: Floats = self.own**2 * (apart == 0).all(axis=2)
        return line + near[..., 0] * moved + own


class Surface:
    """The posterior of one subspace; no rows leave the prior.

    A cell of one or two repeats that is slower than all others say (R&W, equations 5.10 to 5.12) by
    more than 2.5 standard deviations gets the variance that makes it so many. A fast one is
    believed: nothing makes a call faster than the machine is.
    """

    def __init__(self, kernel: Kernel, rows: Floats) -> None:
        log_us, measured, doubtful = rows[:, 3], rows[:, 4], rows[:, 5] < 3
        self._kernel, self._rows = kernel, rows
        self._mean = float(np.median(log_us)) if len(rows) else 0.0
        #: (n,) of the cells, with the doubt.
        self.variance: Floats = measured
        self._inverse = self._inverted()
        for _ in range(3 if len(rows) > 2 and doubtful.any() else 0):
            spread = 1.0 / np.diag(self._inverse)
            residual = (self._inverse @ (log_us - self._mean)) * spread
            # What it was expected to vary by before it was doubted.
            expected = np.maximum(spread - self.variance, 0.0) + measured
            excess = np.maximum(np.maximum(residual / 2.5, 0.0) ** 2 - expected, 0.0)
            self.variance = np.where(doubtful, measured + excess, measured)
            self._inverse = self._inverted()
        self._weights = self._inverse @ (log_us - self._mean)

    def _inverted(self) -> Floats:
        prior = self._kernel.matrix(self._rows, self._rows)
        inverse = np.linalg.inv(prior + np.diag(self.variance + 1e-9))
        symmetric: Floats = (inverse + inverse.T) / 2.0
        return symmetric

    def posterior(self, places: Floats, random: Generator) -> tuple[Floats, Floats, Floats]:
        """Mean log times (m,), their standard deviations without noise, joint draws (draws, m)."""
        cross = self._kernel.matrix(places, self._rows)
        mean = self._mean + cross @ self._weights
        covariance = self._kernel.matrix(places, places) - cross @ self._inverse @ cross.T
        values, vectors = np.linalg.eigh((covariance + covariance.T) / 2.0)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        sigma = np.sqrt(np.maximum(np.diag(covariance), 0.0))
        return mean, sigma, mean + random.normal(size=(_DRAWS, len(mean))) @ root.T


def choose_kernel(subspaces: Sequence[Floats]) -> Kernel:
    """The kernel of the largest likelihood of at most 120 rows of each, by coordinate search."""
    kernel, kept = Kernel(), []
    for rows in subspaces:
        if len(rows) > 1:
            few = rows[np.linspace(0, len(rows) - 1, min(len(rows), 120)).astype(np.intp)]
            few[:, 4] = Surface(kernel, few).variance
            kept.append(few)
    best = sum(_log_likelihood(kernel, rows) for rows in kept)
    for name, values in 2 * list(_KERNELS.items()):
        for value in values:
            other = kernel._replace(**{name: value})
            found = sum(_log_likelihood(other, rows) for rows in kept)
            if found > best + 1e-9:
                kernel, best = other, found
    return kernel


def _log_likelihood(kernel: Kernel, rows: Floats) -> float:
    """Log marginal likelihood without its constant (R&W, equation 2.30)."""
    factor = np.linalg.cholesky(kernel.matrix(rows, rows) + np.diag(rows[:, 4] + 1e-9))
    half = np.linalg.solve(factor, rows[:, 3] - np.median(rows[:, 3]))
    return float(-0.5 * half @ half - np.log(np.diag(factor)).sum())
