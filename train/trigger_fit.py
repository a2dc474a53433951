"""Trains a Trigger on a data set: quiet series in, thresholds, a tracked run and `trigger.pt` out.

A *series* is a stream's calls, in order (docs/trigger.md). The module runs as it will be deployed,
its history frozen while a sum is above zero, so that the LSTM learns what is worth knowing of a
history with holes in it. Where a sum leaves zero and comes back there is one *excursion*; a
threshold has as many false alarms as excursions reach it.
"""

import copy
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import nn

from dynamiccl.datasets.cells import quiet, tuned, usable
from dynamiccl.datasets.manifest import TRIGGER_FACTS_NAME, TRIGGER_FOLDER, TRIGGER_NAME
from dynamiccl.datasets.steps import CALLS_USED, STREAM_COLUMNS, timed_calls
from dynamiccl.datasets.store import content_hash, part_paths, read, scan
from dynamiccl.errors import NotEnoughData, UserError
from dynamiccl.train import tracking
from dynamiccl.train.policy import save_script, script
from dynamiccl.train.trigger import RUNGS, WARM_UP, FloatArray, TriggerModule

Progress = Callable[[str, int, int], None]
Bools = npt.NDArray[np.bool_]
#: The fewest calls of a series.
SHORTEST: Final = 8
FEWEST: Final = 256
#: A stretch whose running median is this share, and a scale, above the series' is not quiet.
_STRETCH: Final = 33
_NOT_QUIET: Final = 0.10
#: Calls drawn in a row, to keep what they have in common.
BLOCK: Final = 64
_MAD: Final = 0.6745
#: Of each series, for the forecaster; thresholds come from the rest.
TRAINING_SHARE: Final = 0.6
#: Training steps; streams; calls of a chunk, and chunks that gradients go back over.
STEPS: Final = 80
_WIDTH: Final = 192
_CHUNK: Final = 40
_CHUNKS: Final = 8
_LEARNING_RATE: Final = 5e-3
#: Steps between looks at held-out calls, and calls of each stream.
_LOOK: Final = 20
JUDGED_CALLS: Final = 1_000
_EVERY: Final = 10
#: Slowdowns: factors and calls, both log-uniform.
_SLOWEST: Final = 3.0
_LONGEST: Final = 200.0
_SLOWED: Final = 0.5
#: Quiet calls for each rung; streams, and calls of each, roughly as in a job.
CALLS_PER_RUNG: Final = 1_000_000
_STREAMS: Final = 500
_LENGTH: Final = 2_000
#: Peaks that the tail is fitted to.
_TAIL: Final = 100
#: Streams that get here begin anew.
_NO_THRESHOLD: Final = 1000.0


@dataclass(frozen=True, slots=True)
class Series:
    """Standardised quiet calls: (log time - median) / robust sigma; series are concatenated."""

    values: FloatArray
    #: Log sizes less their mean.
    sizes: FloatArray
    #: First call of each series, and the end of the last.
    starts: npt.NDArray[np.int64]
    #: Robust sigma of log time.
    scales: FloatArray

    @classmethod
    def of(cls, times: Sequence[FloatArray], sizes: Sequence[FloatArray]) -> Self:
        """Standardise series of log times, with their log sizes."""
        middles = [np.median(each) for each in times]
        scales = [
            max(float(np.median(np.abs(each - middle))) / _MAD, 1e-4)
            for each, middle in zip(times, middles, strict=True)
        ]
        values = [(t - m) / s for t, m, s in zip(times, middles, scales, strict=True)]
        return cls(
            np.concatenate(values).astype(np.float32),
            np.concatenate([each - each.mean() for each in sizes]).astype(np.float32),
            np.cumsum([0, *map(len, times)]),
            np.array(scales, dtype=np.float32),
        )

    @property
    def usual_scale(self) -> float:
        """The scale of the median call."""
        return float(np.median(np.repeat(self.scales, np.diff(self.starts))))

    def split(self, share: float) -> tuple["Series", "Series"]:
        """The first fraction `share` of every series, and the rest."""
        lengths = np.diff(self.starts)
        ends = self.starts[:-1] + np.maximum((lengths * share).astype(np.int64), 1)
        owner = np.repeat(np.arange(len(lengths)), lengths)
        is_first = np.arange(len(self.values)) < ends[owner]
        return self._where(is_first, owner), self._where(~is_first, owner)

    def _where(self, kept: Bools, owner: npt.NDArray[np.int64]) -> "Series":
        counts = np.bincount(owner[kept], minlength=len(self.scales))
        starts = np.concatenate([[0], np.cumsum(counts[counts > 0])])
        return Series(self.values[kept], self.sizes[kept], starts, self.scales[counts > 0])

    def draw(
        self, random: np.random.Generator, count: int, steps: int
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Streams by moving blocks: values and sizes (steps, count), and scales (count,)."""
        lengths = np.diff(self.starts)
        blocks = -(-steps // BLOCK)
        whole = random.choice(len(lengths), size=count, p=lengths / lengths.sum())
        owner = np.repeat(whole[None], blocks, axis=0)
        short = lengths[whole] < 4 * BLOCK
        others = random.choice(len(lengths), size=(blocks, count), p=lengths / lengths.sum())
        owner[:, short] = others[:, short]
        begin = (random.random((blocks, count)) * lengths[owner]).astype(np.int64)
        at = (begin[:, None] + np.arange(BLOCK)[None, :, None]) % lengths[owner][:, None]
        index = (self.starts[owner][:, None] + at).reshape(blocks * BLOCK, count)[:steps]
        return self.values[index], self.sizes[index], self.scales[whole]


def read_series(data_dir: Path) -> tuple[Series, dict[str, int]]:
    """The quiet series of a data directory; NotEnoughData with fewer than FEWEST calls.

    Counts times that were used (`calls`, `iterations`), `disturbed`, and `unusable`: without a time
    from all ranks, or of traces that tell no config.
    """
    calls, unusable = _call_series(data_dir) if part_paths(data_dir, "calls") else ([], 0)
    iterations = _iteration_series(data_dir) if part_paths(data_dir) else []
    pairs = [*calls, *iterations]
    kept = [_quiet_calls(times) for times, _ in pairs]
    disturbed = sum(int((~each).sum()) for each in kept)
    pairs = [(t[k], s[k]) for (t, s), k in zip(pairs, kept, strict=True) if k.sum() >= SHORTEST]
    total = _calls_of(pairs)
    if total < FEWEST:
        raise NotEnoughData(
            f"{data_dir} holds {total} quiet calls in series and {FEWEST} are needed"
            f"{f' ({unusable} calls have no time or config)' if unusable else ''}; import a "
            "job's recorded calls (DYNAMICCL_CALLS_DIR, 'dynamiccl-collect import'), or sweep with "
            "nccl-tests that report each iteration: averages vary less than calls do"
        )
    counts = {
        "calls": _calls_of(calls),
        "iterations": _calls_of(iterations),
        "disturbed": disturbed,
        "unusable": unusable,
        "series": len(pairs),
    }
    return Series.of([t for t, _ in pairs], [s for _, s in pairs]), counts


#: Log times and log sizes.
_Pair = tuple[FloatArray, FloatArray]


def _calls_of(pairs: Sequence[_Pair]) -> int:
    return sum(len(times) for times, _ in pairs)


def _call_series(data_dir: Path) -> tuple[list[_Pair], int]:
    """Series of recorded calls, and how many calls could not be used."""
    recorded = tuned(scan(data_dir, "calls").select(CALLS_USED).collect())
    rows = timed_calls(recorded)
    groups = rows.group_by(STREAM_COLUMNS, maintain_order=True).agg(
        pl.col("time_us").log(), pl.col("size_bytes").cast(pl.Float64).log()
    )
    pairs = groups.select("time_us", "size_bytes").iter_rows()
    found = [
        (np.asarray(time, np.float32), np.asarray(size, np.float32))
        for time, size in pairs
        if len(time) >= SHORTEST
    ]
    return found, recorded.height - rows.height


def _iteration_series(data_dir: Path) -> list[_Pair]:
    found = quiet(tuned(usable(read(data_dir))))["iteration_times_us"].drop_nulls()
    arrays = [np.log(np.asarray(each, dtype=np.float32)) for each in found]
    return [(each, np.zeros_like(each)) for each in arrays if len(each) >= SHORTEST]


def _quiet_calls(log_time: FloatArray) -> Bools:
    if len(log_time) < 2 * _STRETCH:
        return np.ones(len(log_time), dtype=np.bool_)
    middle = np.median(log_time)
    scale = np.median(np.abs(log_time - middle)) / _MAD
    running = pl.Series(log_time).rolling_median(_STRETCH, center=True).to_numpy()
    limit = middle + max(np.log1p(_NOT_QUIET), float(scale))
    slow = np.nan_to_num(running, nan=float(middle)) > limit
    # The median turns half a window late.
    reach = np.convolve(slow, np.ones(_STRETCH, dtype=np.int64), mode="same") > 0
    return np.asarray(~reach)


def peaks_of(statistic: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """(P,) the peaks of excursions above 0 of streams (T, N), largest first."""
    steps, width = statistic.shape
    excursion = np.cumsum(statistic <= 0.0, axis=0) + np.arange(width) * (steps + 1)
    peaks = np.zeros(width * (steps + 1))
    np.maximum.at(peaks, excursion.ravel(), statistic.ravel())
    return np.sort(peaks[peaks > 0.0])[::-1]


def threshold_of(peaks: npt.NDArray[np.float64], alarms: float) -> float:
    """The threshold that so many of the peaks (P,), one at least, reach. Raises NotEnoughData."""
    if not len(peaks):
        raise NotEnoughData("calls whose times never vary tell no threshold; record more of them")
    if _TAIL <= alarms < len(peaks):
        return float(peaks[int(alarms)])
    count = min(_TAIL, max(len(peaks) // 2, 1))
    base = peaks[count - 1]
    return float(base + np.mean(peaks[:count] - base) * np.log(count / alarms))


def find_peaks(
    module: TriggerModule,
    series: Series,
    calls_per_rung: int,
    *,
    seed: int,
    progress: Progress = lambda _what, _done, _total: None,
) -> list[npt.NDArray[np.float64]]:
    """Peaks of the detector's excursions on quiet streams at the noise of each rung."""
    random = np.random.default_rng(seed)
    without = copy.deepcopy(module)
    without.thresholds.fill_(_NO_THRESHOLD)
    scripted: Any = script(without)  # a fifth faster
    length = min(_LENGTH, max(calls_per_rung // _STREAMS, 1))
    rounds = max(calls_per_rung // (_STREAMS * length), 1)
    found = []
    for number, rung in enumerate(RUNGS):
        # The noise (robust sigma of log time) of the rung.
        scale = np.float32(module.half_shift / rung)
        peaks = []
        for turn in range(rounds):
            values, sizes, _ = series.draw(random, _STREAMS, length)
            times = torch.from_numpy(values * scale + np.float32(5.0))
            sums = []
            with torch.inference_mode():
                state = scripted.new_state(_STREAMS)
                for now, size in zip(times, torch.from_numpy(sizes), strict=True):
                    state, _, _ = scripted(state, now, size)
                    sums.append(state[:, 3:5].amax(dim=1).numpy())
            peaks.append(peaks_of(np.array(sums)))
            progress("calibrating", number * rounds + turn + 1, rounds * len(RUNGS))
        found.append(np.sort(np.concatenate(peaks))[::-1])
    return found


def train(
    module: TriggerModule,
    series: Series,
    held_out: Series,
    *,
    steps: int,
    seed: int,
    progress: Progress = lambda _what, _done, _total: None,
) -> tuple[list[float], dict[str, float]]:
    """Fit the LSTM to the state with the least `forecast_error` on `held_out`; losses and errors.

    At worst that is the untrained one, whose forecast is the level alone.
    """
    level_error = forecast_error(module, held_out, seed=seed)
    best = (level_error, copy.deepcopy(module.state_dict()))
    random = np.random.default_rng(seed)
    optimizer = torch.optim.Adam(module.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    losses = []
    module.train()
    for step in range(steps):
        streams = _streams(series, random)
        state = module.new_state(_WIDTH)
        total = 0.0
        for chunk in range(_CHUNKS):
            optimizer.zero_grad()
            state, loss = _loss(module, state.detach(), streams, chunk)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
        schedule.step()
        losses.append(total / _CHUNKS)
        progress("training", step + 1, steps)
        if (step + 1) % _LOOK == 0 or step + 1 == steps:
            error = forecast_error(module, held_out, seed=seed)
            if error < best[0]:
                best = (error, copy.deepcopy(module.state_dict()))
    module.load_state_dict(best[1])
    module.eval()
    return losses, {"level_error": level_error, "forecast_error": best[0]}


def forecast_error(module: TriggerModule, series: Series, *, seed: int) -> float:
    """Mean absolute error of the forecast on quiet calls of a series, in scales."""
    random = np.random.default_rng(seed)
    values, sizes, scales = series.draw(random, _WIDTH, JUDGED_CALLS)
    times = torch.from_numpy(values * scales + np.float32(5.0))
    state, errors = module.new_state(_WIDTH), []
    with torch.inference_mode():
        for number, (time, size) in enumerate(zip(times, torch.from_numpy(sizes), strict=True)):
            state, _, _, forecast = module.step(state, time, size)
            if number >= WARM_UP:
                errors.append(((time - forecast).abs() / torch.from_numpy(scales)).mean().item())
    return float(np.mean(errors))


def _streams(series: Series, random: np.random.Generator) -> tuple[torch.Tensor, ...]:
    steps = WARM_UP + _CHUNK * _CHUNKS
    values, sizes, scales = series.draw(random, _WIDTH, steps)
    quiet = values * scales + random.uniform(1.0, 12.0, _WIDTH).astype(np.float32)
    onset = random.integers(WARM_UP, steps, _WIDTH)
    length = np.exp(random.uniform(0.0, np.log(_LONGEST), _WIDTH))
    factor = np.exp(random.uniform(0.0, np.log(_SLOWEST), _WIDTH))
    factor = np.where(random.random(_WIDTH) < _SLOWED, factor, 1.0)
    at = np.arange(steps)[:, None]
    slow = (at >= onset) & (at < onset + length)
    times = quiet + np.where(slow, np.log(factor), 0.0).astype(np.float32)
    return tuple(torch.from_numpy(np.ascontiguousarray(a)) for a in (times, sizes, quiet, scales))


def _loss(
    module: TriggerModule, state: torch.Tensor, streams: tuple[torch.Tensor, ...], chunk: int
) -> tuple[torch.Tensor, Any]:
    times, sizes, quiet, scales = streams
    first = WARM_UP + _CHUNK * chunk
    if chunk == 0:
        with torch.no_grad():
            for at in range(WARM_UP):
                state, _, _ = module(state, times[at], sizes[at])
    losses = []
    for at in range(first, first + _CHUNK):
        state, _, _, forecast = module.step(state, times[at], sizes[at])
        losses.append(((quiet[at] - forecast) / scales).abs().clamp(max=5.0).mean())
    return state, torch.stack(losses).mean()


def make_trigger(
    series: Series,
    false_alarms_per_1e5: float,
    *,
    seed: int = 0,
    progress: Progress = lambda _what, _done, _total: None,
) -> tuple[TriggerModule, list[float], dict[str, float]]:
    """A trained and calibrated Trigger, and what `train` returns."""
    torch.manual_seed(seed)
    training, rest = series.split(TRAINING_SHARE)
    module = TriggerModule(series.usual_scale)
    told = train(module, training, rest, steps=STEPS, seed=seed, progress=progress)
    peaks = find_peaks(module, rest, CALLS_PER_RUNG, seed=seed + 1, progress=progress)
    alarms = false_alarms_per_1e5 * 1e-5 * CALLS_PER_RUNG
    module.thresholds.copy_(torch.tensor([threshold_of(each, alarms) for each in peaks]))
    return module, *told


def fit_trigger(
    data_dir: Path,
    false_alarms_per_1e5: float,
    *,
    experiment: str,
    tracking_uri: str,
    seed: int = 0,
    progress: Progress = lambda _what, _done, _total: None,
) -> dict[str, Any]:
    """Train, calibrate, export and track; raises NotEnoughData and UserError.

    Tells `run_id`, `run_directory`, `seconds`, and the `facts` that lie beside `trigger.pt`:
    `thresholds` by reference value of the CUSUM; `usual_scale`, the robust sigma of log time of the
    usual quiet call; `level_error` and `forecast_error`, mean absolute ones on held-out quiet
    calls, in robust sigmas; `false_alarms_per_1e5` and `counts`.
    """
    if not 0.0 < false_alarms_per_1e5 <= 1000.0:
        raise UserError(
            f"{false_alarms_per_1e5} false alarms in 100,000 calls cannot be wanted; take 0.5, or "
            "anything above 0 and up to 1000"
        )
    series, counts = read_series(data_dir)
    name, asked = f"trigger-seed{seed}", {"false_alarms_per_1e5": false_alarms_per_1e5}
    with tracking.open_run(tracking_uri, experiment, name, {"kind": "trigger"}) as run:
        params = {f"series_{key}": value for key, value in counts.items()}
        run.begin(
            data_dir,
            content_hash(data_dir),
            {"recipe": "trigger", "seed": seed, "steps": STEPS, **asked, **params},
            f"A Trigger, which tells interference by the times of calls in `{data_dir}`.",
        )
        started = time.monotonic()
        module, losses, errors = make_trigger(series, **asked, seed=seed, progress=progress)
        seconds = time.monotonic() - started
        for step in range(0, len(losses), _EVERY):
            loss = float(np.mean(losses[step : step + _EVERY]))
            run.log({"loss": loss}, step=step)
        rungs = [f"{rung:.3f}" for rung in RUNGS]
        thresholds = dict(zip(rungs, module.thresholds.tolist(), strict=True))
        scale = {"usual_scale": series.usual_scale}
        facts = {**asked, "thresholds": thresholds, **scale, **errors, "counts": counts}
        metrics = {f"threshold_{key}": value for key, value in thresholds.items()}
        run.log({**metrics, **errors, "train_seconds": seconds}, step=STEPS)
        place = {"run_id": run.run_id, "run_directory": run.place}
        summary = {**place, "seconds": seconds, "facts": facts}
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / TRIGGER_FOLDER
            folder.mkdir()
            save_script(module, folder / TRIGGER_NAME)
            text = json.dumps(facts, indent=1) + "\n"
            (folder / TRIGGER_FACTS_NAME).write_text(text, encoding="utf-8")
            run.finish(summary, Path(scratch))
    return summary
