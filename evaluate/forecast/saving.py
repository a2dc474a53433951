"""The share of communication and step time that a job saves, from the gains of its calls.

A gain is of a call alone on its machine, in a benchmark. Of a job's call it saves the same share
of the call's time; where the call took longer in the job than in the benchmark (it waited for
another rank, or shared its links), at least the share of the benchmark's time.

Of a step, a call saves at most what no compute hid of it. The *central* figure counts the whole
saving up to that, since as a rule compute waits for the end of a call. The interval allows for
overlap that shifts: at least what the hidden part of the call cannot take up, and at most all of
its process group's savings up to all that is exposed of that group in the step, since the calls of
a group follow one another on one stream.

A hidden call slows the compute beside it: a longer one takes more from it, a shorter one gives some
back, which widens the interval of a step and does not move its middle.

The interval, 90 %, has Student's t over the runs of the sweep, summed over the kinds that share
runs (so that what a run has in common counts), and over the blocks of the trace; the distance to
measured sizes; how far the job is from the benchmark, in which calls were alone; and a model's own
error. It does not have that another config may take more channels, and so more from compute.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from dynamiccl.evaluate.forecast.job import Job, Kind
from dynamiccl.evaluate.forecast.picks import Pick
from dynamiccl.nccl import ABSTAIN

Floats = npt.NDArray[np.float64]
Of = Literal["communication", "step"]
End = Literal["least", "central", "most"]
_CONFIDENCE: Final = 0.90
_Z: Final = float(stats.norm.ppf(0.5 + _CONFIDENCE / 2.0))
#: Standard deviation of a gain for each factor of e between a call's time in the job and in the
#: benchmark, counted up to a factor of 2. Set on simulated congested networks
#: (benchmarks/bench_forecast.py; other seeds than it judges by).
_APART: Final = 0.08
_MOST_APART: Final = float(np.log(2.0))
#: The most that a call takes of the speed of compute beside it: a channel holds a multiprocessor,
#: and 32 channels are a quarter of the 132 of an H100 (simulator/contention.py has more of it).
_TAKEN: Final = 0.25
#: How many runs the usual spread of gains counts as.
_PRIOR_RUNS: Final = 4.0
#: Degrees of freedom of what is known without sampling.
_SURE: Final = 1e9
#: Blocks of a trace from which on they say how it varies.
LEAST_BLOCKS: Final = 3


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share saved (> 0: faster) with its 90 % interval."""

    mean: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """The estimate as text."""
        return f"{self.mean:.1%} ({self.low:.1%} to {self.high:.1%})"


@dataclass(frozen=True, slots=True)
class Weighed:
    """A job with a time for each call in us, and benchmark times of its kinds."""

    job: Job
    kinds: Sequence[Kind]
    time_us: Floats
    exposed_us: Floats | None
    #: (K,) us of NCCL's own choice in the benchmark; NaN where the kind is not covered.
    default_us: Floats
    #: (K,) us, sums over calls by weight: all of it, and what is exposed.
    kind_us: Floats
    kind_exposed_us: Floats
    #: Of each kind, (calls,) time, exposed time and weight.
    by_kind: Sequence[tuple[Floats, Floats, Floats]]

    @property
    def mean_us(self) -> Floats:
        """(K,) mean time of a call, us."""
        calls = np.bincount(self.job.kind, self.job.weight, minlength=len(self.kinds))
        found: Floats = self.kind_us / np.maximum(calls, 1e-12)
        return found

    @property
    def communication_us(self) -> float:
        """Total time of all calls, us."""
        return float(self.kind_us.sum())


def weigh(job: Job, kinds: Sequence[Kind], default_us: Floats) -> Weighed:
    """Give each call a time: its own, else its kind's mean, else the benchmark's, else by bytes."""
    known = np.isfinite(job.time_us)
    count = np.bincount(job.kind[known], minlength=len(kinds))
    total = np.bincount(job.kind[known], job.time_us[known], minlength=len(kinds))
    mean = np.where(count > 0, total / np.maximum(count, 1), default_us)
    sizes = np.array([float(kind.size_bytes) for kind in kinds])
    told = np.isfinite(mean)
    us_per_byte = float(mean[told].sum() / sizes[told].sum()) if told.any() else 1.0
    mean = np.where(told, mean, sizes * us_per_byte)
    time = np.where(known, job.time_us, mean[job.kind])
    kind_us = job.of_kind(time)
    exposed = job.exposed_us
    order = np.argsort(job.kind, kind="stable")
    ends = np.cumsum(np.bincount(job.kind, minlength=len(kinds)))[:-1]
    parts = (time, time if exposed is None else exposed, job.weight)
    by_kind = list(zip(*(np.split(part[order], ends) for part in parts), strict=True))
    return Weighed(
        job, kinds, time, exposed, default_us, kind_us,
        kind_us if exposed is None else job.of_kind(exposed), by_kind,
    )  # fmt: skip


def estimate(weighed: Weighed, picks: Sequence[Pick | None], of: Of) -> Estimate:
    """What a job saves under `picks`, None where nothing is known and nothing changes."""
    job = weighed.job
    whole = weighed.communication_us if of == "communication" else float(_steps(job).sum())
    if whole <= 0.0:
        return Estimate(0.0, 0.0, 0.0)
    acting = [(k, pick) for k, pick in enumerate(picks) if pick is not None]
    shares = np.zeros(len(picks))
    for k, pick in acting:
        shares[k] = float(np.mean(_share(pick.logs)))
    saved = _by_call(weighed, shares, of, "central")
    mean = float(saved @ job.weight) / whole
    variances = [
        *_of_runs(weighed, acting, of),
        *_of_few_runs(weighed, acting, of),
        *_of_sizes(weighed, acting, of),
        _of_surroundings(weighed, acting, of),
    ]
    variances = [(value / whole**2, freedom) for value, freedom in variances]
    variances.append(_of_blocks(weighed, saved, mean, of))
    half = _half(variances)
    ends = []
    for side in (-1.0, 1.0):
        moved = shares.copy()
        for k, pick in acting:
            if pick.model_error:
                moved[k] = float(_share(pick.logs[0] + side * _Z * pick.model_error))
        if side < 0.0:
            moved = np.where(moved > 0.0, moved * _least_factor(weighed), moved)
        end: End = "least" if side < 0.0 else "most"
        ends.append(float(_by_call(weighed, moved, of, end) @ job.weight) / whole + side * half)
    if of == "step" and weighed.exposed_us is not None:
        alone = estimate(weighed, picks, "communication")
        hidden = weighed.communication_us - float(weighed.kind_exposed_us.sum())
        ends[0] += _TAKEN * min(0.0, alone.low) * hidden / whole
        ends[1] += _TAKEN * max(0.0, alone.high) * hidden / whole
    return Estimate(mean, min(ends[0], mean), max(ends[1], mean))


def of_calls(weighed: Weighed, kind: int, pick: Pick) -> Estimate:
    """The share of their own time that the calls of one kind save."""
    mean = float(np.mean(_share(pick.logs)))
    if pick.config == ABSTAIN:
        return Estimate(0.0, 0.0, 0.0)
    variances = [(pick.blur**2, _SURE), ((_APART * _apart(weighed)[kind]) ** 2, _SURE)]
    if len(pick.runs) > 1:
        count = len(pick.logs)
        variances.append((float(np.var(pick.logs, ddof=1)) / count, count - 1.0))
        variances.append((_lacking(pick), _SURE))
    half = _half(variances) + _Z * pick.model_error
    low, high = (float(_share(pick.mean + side * half)) for side in (-1.0, 1.0))
    return Estimate(mean, min(low, mean), max(high, mean))


def _share(logs: Floats | float) -> Floats:
    """Share of time saved at log gains."""
    found: Floats = -np.expm1(-np.asarray(logs))
    return found


def _steps(job: Job) -> Floats:
    return np.zeros(job.num_blocks) if job.step_us is None else job.step_us


def _least_factor(weighed: Weighed) -> Floats:
    """(K,) the benchmark's time over the job's, where the job's is longer."""
    mean = weighed.mean_us
    ratio = weighed.default_us / np.where(mean > 0.0, mean, np.nan)
    found: Floats = np.nan_to_num(np.minimum(1.0, ratio), nan=1.0)
    return found


def _by_call(weighed: Weighed, shares: Floats, of: Of, end: End) -> Floats:
    """(C,) us saved by each call."""
    job, time = weighed.job, weighed.time_us
    saved: Floats = time * shares[job.kind]
    if of == "communication" or weighed.exposed_us is None:
        return saved
    exposed = weighed.exposed_us
    if end == "least":
        return np.where(saved > 0.0, np.maximum(0.0, saved - (time - exposed)), saved)
    longer = saved * exposed / np.where(time > 0.0, time, 1.0)
    if end == "central":
        return np.where(saved > 0.0, np.minimum(saved, exposed), longer)
    # Each group's savings in a step, up to its exposed time, shared out by what each call saves.
    groups = np.unique([f"{k.group}|{k.num_ranks}" for k in weighed.kinds], return_inverse=True)[1]
    place = job.block * (int(groups.max()) + 1) + groups[job.kind]
    gained = np.maximum(saved, 0.0)
    total = np.bincount(place, gained * job.weight)
    able = np.bincount(place, exposed * job.weight)
    factor = np.minimum(1.0, able / np.where(total > 0.0, total, 1.0))
    return np.where(saved > 0.0, gained * factor[place], longer)


def _kind_total(weighed: Weighed, kind: int, share: float, of: Of) -> float:
    """Us saved by all calls of a kind (central estimate)."""
    if of == "communication" or weighed.exposed_us is None:
        return float(weighed.kind_us[kind]) * share
    if share <= 0.0:
        return float(weighed.kind_exposed_us[kind]) * share
    time, exposed, weight = weighed.by_kind[kind]
    return float(np.minimum(time * share, exposed) @ weight)


def _of_runs(
    weighed: Weighed, acting: Sequence[tuple[int, Pick]], of: Of
) -> list[tuple[float, float]]:
    """(variance, degrees of freedom) of differences between runs; shared runs count together."""
    by_runs: dict[tuple[str, ...], Floats] = {}
    for k, pick in acting:
        if len(pick.runs) < 2:
            continue
        shares = _share(pick.logs)
        totals = np.array([_kind_total(weighed, k, float(share), of) for share in shares])
        by_runs[pick.runs] = totals + by_runs.get(pick.runs, 0.0)
    return [
        (float(np.var(totals, ddof=1)) / len(totals), len(totals) - 1.0)
        for totals in by_runs.values()
    ]


def _lacking(pick: Pick) -> float:
    """The variance of a mean gain that the spread of its own few runs does not show.

    One part is the runs' variance drawn towards the usual one (Smyth 2004, "Linear models and
    empirical Bayes methods"), less what it is. The other is there where the choice was close: the
    folds of a cross-fit share most of their runs (Nadeau and Bengio 2003, "Inference for the
    generalization error").
    """
    count = len(pick.logs)
    if len(pick.runs) < 2:
        return 0.0
    own = float(np.var(pick.logs, ddof=1))
    drawn = (_PRIOR_RUNS * pick.usual**2 + (count - 1) * own) / (_PRIOR_RUNS + count - 1)
    luck = max(drawn, own) / (count - 1) if pick.is_close else 0.0
    return max(0.0, drawn - own) / count + luck


def _of_few_runs(
    weighed: Weighed, acting: Sequence[tuple[int, Pick]], of: Of
) -> list[tuple[float, float]]:
    """Variances that few runs do not show, each kind by itself."""
    lacking = [(k, pick, _lacking(pick)) for k, pick in acting]
    return [
        (_moved(weighed, k, pick, float(np.sqrt(value)), of) ** 2, _SURE)
        for k, pick, value in lacking
        if value > 0.0
    ]


def _of_sizes(
    weighed: Weighed, acting: Sequence[tuple[int, Pick]], of: Of
) -> list[tuple[float, float]]:
    """Variances from the distance to measured sizes; kinds that share sizes together."""
    by_sizes: dict[tuple[object, ...], float] = {}
    for k, pick in acting:
        if pick.blur > 0.0:
            kind = weighed.kinds[k]
            key = (kind.collective, kind.num_nodes, kind.num_ranks, pick.sizes)
            moved = _moved(weighed, k, pick, pick.blur, of)
            by_sizes[key] = by_sizes.get(key, 0.0) + moved
    return [(moved**2, _SURE) for moved in by_sizes.values()]


def _of_surroundings(
    weighed: Weighed, acting: Sequence[tuple[int, Pick]], of: Of
) -> tuple[float, float]:
    """Variance from the job's surroundings, common to all gains."""
    apart = _apart(weighed)
    moved = [
        _moved(weighed, k, pick, _APART * float(apart[k]), of)
        for k, pick in acting
        if pick.config != ABSTAIN
    ]
    return sum(moved) ** 2, _SURE


def _apart(weighed: Weighed) -> Floats:
    """(K,) |ln(job's mean call time / benchmark's)|; 0 where one is unknown."""
    ratio = weighed.mean_us / weighed.default_us
    found: Floats = np.minimum(np.abs(np.log(np.where(ratio > 0.0, ratio, 1.0))), _MOST_APART)
    return found


def _moved(weighed: Weighed, kind: int, pick: Pick, by: float, of: Of) -> float:
    """Us by which the saving of a kind changes when its gain changes by `by`."""
    ends = [float(_share(pick.mean + side * by)) for side in (-1.0, 1.0)]
    low, high = (_kind_total(weighed, kind, share, of) for share in ends)
    return abs(high - low) / 2.0


def _of_blocks(weighed: Weighed, saved: Floats, mean: float, of: Of) -> tuple[float, float]:
    """Variance of a share between blocks of the trace (ratio of two sums)."""
    job = weighed.job
    if job.num_blocks < LEAST_BLOCKS:
        return 0.0, _SURE
    tops = np.bincount(job.block, saved * job.weight, minlength=job.num_blocks)
    if of == "step":
        bottoms = _steps(job)
    else:
        times = weighed.time_us * job.weight
        bottoms = np.bincount(job.block, times, minlength=job.num_blocks).astype(np.float64)
    rest = tops - mean * bottoms
    count = len(rest)
    return float(rest @ rest) / float(bottoms.sum()) ** 2 * count / (count - 1), count - 1.0


def _half(variances: Sequence[tuple[float, float]]) -> float:
    """Half-width of the interval: Student's t with Satterthwaite's degrees of freedom."""
    total = sum(value for value, _ in variances)
    if total <= 0.0:
        return 0.0
    freedom = total**2 / sum(value**2 / of for value, of in variances)
    return float(stats.t.ppf(0.5 + _CONFIDENCE / 2.0, freedom)) * float(np.sqrt(total))
