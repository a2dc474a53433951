"""Trains a Trigger on a data set: quiet series in, tracked run and `trigger.pt` out.

The forecaster learns from quiet calls with injected slowdowns; the target is the quiet time. The
module runs as it will be deployed, its history frozen while a sum is above zero, so that the LSTM
learns what is worth knowing of a history with holes in it. What it must not learn is to follow a
slowdown, and there the target says no.
"""

import copy
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from dynamiccl.datasets.manifest import TRIGGER_FACTS_NAME, TRIGGER_FOLDER, TRIGGER_NAME
from dynamiccl.datasets.store import content_hash
from dynamiccl.errors import UserError
from dynamiccl.train import tracking
from dynamiccl.train.policy import save_script, script
from dynamiccl.train.trigger.calibration import (
    CALLS_PER_RUNG,
    Progress,
    delays_of,
    find_peaks,
    watch_with,
)
from dynamiccl.train.trigger.module import RUNGS, SMALLEST_SLOWDOWN, WARM_UP, TriggerModule
from dynamiccl.train.trigger.series import Series, SeriesCounts, read_series

#: Gradients go back over so many calls.
_CHUNK: Final = 40
_CHUNKS: Final = 8
_WIDTH: Final = 192
#: Steps between two looks at calls that are not trained on.
_LOOK: Final = 20
#: Calls of each stream by which a forecast is judged.
JUDGED_CALLS: Final = 1_000
_LEARNING_RATE: Final = 5e-3
#: Slowdowns that are put in: factors, and calls that they last, both log-uniform.
_SLOWEST: Final = 3.0
_LONGEST: Final = 200.0
_SLOWED: Final = 0.5
#: What is wanted where nobody says otherwise.
FALSE_ALARMS_PER_1E5: Final = 0.5
#: Training steps of the forecaster.
STEPS: Final = 80
#: Of each series, what the forecaster is trained on; thresholds come from the rest.
TRAINING_SHARE: Final = 0.6
#: Losses are logged as means of so many steps.
_EVERY: Final = 10
#: Slowdowns of which delays are told; streams, calls of each that are quiet, and calls in which an
#: alarm has to come.
_FACTORS: Final = (SMALLEST_SLOWDOWN, 1.5)
_ONSETS: Final = 500
_KNOWN: Final = 256
_HORIZON: Final = 500


@dataclass(frozen=True, slots=True)
class Training:
    """The losses of a training, and `forecast_error` on held-out series."""

    #: Of each step, in scales.
    losses: list[float]
    #: Before any step, when the forecast is the level alone.
    level_error: float
    #: Of the state that was kept.
    error: float


def train(
    module: TriggerModule,
    series: Series,
    held_out: Series,
    *,
    steps: int,
    seed: int,
    progress: Progress = lambda _what, _done, _total: None,
) -> Training:
    """Fit the LSTM.

    What is kept is the state with the least error on quiet calls of `held_out`: the untrained one,
    whose forecast is the level alone, where nothing can be learned.
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
    return Training(losses, level_error, best[0])


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
    """Times, sizes, quiet times (each (steps, width)) and scales (width,)."""
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
        # Absolute errors: what is forecast is the median, as heavy tails ask for.
        losses.append(((quiet[at] - forecast) / scales).abs().clamp(max=5.0).mean())
    return state, torch.stack(losses).mean()


@dataclass(frozen=True, slots=True)
class TriggerFacts:
    """The facts stored beside `trigger.pt`."""

    false_alarms_per_1e5: float
    #: Reference value of the CUSUM (in robust sigmas) -> threshold.
    thresholds: dict[str, float]
    #: Robust sigma of log time of the site's usual quiet call.
    usual_scale: float
    warm_up_calls: int
    smallest_slowdown: float
    #: Mean absolute error on quiet calls that were not trained on, in robust sigmas.
    level_error: float
    forecast_error: float
    counts: SeriesCounts
    #: Averages of nccl-tests stood in for calls, which vary more.
    from_averages: bool


@dataclass(frozen=True, slots=True)
class TriggerSummary:
    """Summary of a training run."""

    run_id: str
    run_directory: str
    seconds: float
    facts: TriggerFacts
    #: `delay_1_5x_calls` and so on: median calls at the site's usual noise; null: not in 500.
    delays: dict[str, float | None]


def make_trigger(
    series: Series,
    false_alarms_per_1e5: float = FALSE_ALARMS_PER_1E5,
    *,
    seed: int = 0,
    progress: Progress = lambda _what, _done, _total: None,
) -> tuple[TriggerModule, Training]:
    """A trained and calibrated Trigger, and its training history."""
    torch.manual_seed(seed)
    training, rest = series.split(TRAINING_SHARE)
    module = TriggerModule(series.usual_scale)
    trained = train(module, training, rest, steps=STEPS, seed=seed, progress=progress)
    peaks = find_peaks(module, rest, CALLS_PER_RUNG, seed=seed + 1, progress=progress)
    module.set_thresholds([each.threshold(false_alarms_per_1e5 * 1e-5) for each in peaks])
    return module, trained


def fit_trigger(
    data_dir: Path,
    false_alarms_per_1e5: float = FALSE_ALARMS_PER_1E5,
    *,
    experiment: str,
    tracking_uri: str,
    seed: int = 0,
    progress: Progress = lambda _what, _done, _total: None,
) -> TriggerSummary:
    """Train, calibrate, export and track.

    Raises what reading the data raises, NotEnoughData without quiet series, and UserError for a
    rate that cannot be wanted, and for a tracking URI that cannot be used.
    """
    if not 0.0 < false_alarms_per_1e5 <= 1000.0:
        raise UserError(
            f"{false_alarms_per_1e5} false alarms in 100,000 calls cannot be wanted; take 0.5, or "
            "anything above 0 and up to 1000"
        )
    series, counts = read_series(data_dir)
    name, asked = f"trigger-seed{seed}", {"false_alarms_per_1e5": false_alarms_per_1e5}
    with tracking.start_run(tracking_uri, experiment, name, {"kind": "trigger"}) as run:
        params = {f"series_{key}": value for key, value in asdict(counts).items()}
        run.begin(
            data_dir,
            content_hash(data_dir),
            {"recipe": "trigger", "seed": seed, "steps": STEPS, **asked, **params},
            f"A Trigger, which tells interference by the times of calls in `{data_dir}`.",
        )
        started = time.monotonic()
        module, trained = make_trigger(series, **asked, seed=seed, progress=progress)
        seconds = time.monotonic() - started
        for step in range(0, len(trained.losses), _EVERY):
            loss = float(np.mean(trained.losses[step : step + _EVERY]))
            run.log({"loss": loss}, step=step)
        pairs = zip(RUNGS, module.thresholds.tolist(), strict=True)
        facts = TriggerFacts(
            **asked,
            thresholds={f"{rung:.3f}": threshold for rung, threshold in pairs},
            usual_scale=series.usual_scale,
            warm_up_calls=WARM_UP,
            smallest_slowdown=SMALLEST_SLOWDOWN,
            level_error=trained.level_error,
            forecast_error=trained.error,
            counts=counts,
            from_averages=counts.averages > 0,
        )
        delays = {
            f"delay_{factor:g}x_calls".replace(".", "_"): _delay(module, series, factor)
            for factor in _FACTORS
        }
        metrics = {
            **{f"threshold_{key}": value for key, value in facts.thresholds.items()},
            **{key: value for key, value in delays.items() if value is not None},
            "level_error": facts.level_error,
            "forecast_error": facts.forecast_error,
            "train_seconds": seconds,
        }
        run.log(metrics, step=STEPS)
        place = str(run.directory or run.artifact_uri)
        summary = TriggerSummary(run.run_id, place, seconds, facts, delays)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / TRIGGER_FOLDER
            folder.mkdir()
            save_script(module, folder / TRIGGER_NAME)
            text = json.dumps(asdict(facts), indent=1) + "\n"
            (folder / TRIGGER_FACTS_NAME).write_text(text, encoding="utf-8")
            run.finish(summary, Path(scratch))
    return summary


def _delay(module: TriggerModule, series: Series, factor: float) -> float | None:
    """Median calls from onset to alarm at the site's usual noise; None: not within _HORIZON."""
    random = np.random.default_rng(11)
    values, _, _ = series.split(TRAINING_SHARE)[1].draw(random, _ONSETS, _KNOWN + _HORIZON)
    log_time = values * np.float32(series.usual_scale) + np.float32(5.0)
    log_time[_KNOWN:] += np.float32(np.log(factor))
    found = delays_of(watch_with(script(module), _ONSETS), log_time, _KNOWN)
    middle = float(np.median(found))
    return middle if np.isfinite(middle) else None
