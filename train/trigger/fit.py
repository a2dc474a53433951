"""Trains a Trigger on a data set: quiet series in, tracked run and `trigger.pt` out."""

import json
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from dynamiccl.datasets.manifest import TRIGGER_FACTS_NAME, TRIGGER_FOLDER, TRIGGER_NAME
from dynamiccl.datasets.store import content_hash, git_commit
from dynamiccl.errors import UserError
from dynamiccl.train import SUMMARY_NAME, tracking
from dynamiccl.train.torch_files import save_script, script
from dynamiccl.train.trigger.calibration import CALLS_PER_RUNG, RungPeaks, find_peaks
from dynamiccl.train.trigger.measure import delays, watch_with
from dynamiccl.train.trigger.module import RUNGS, SMALLEST_SLOWDOWN, WARM_UP, TriggerModule
from dynamiccl.train.trigger.series import Series, SeriesCounts, read_series
from dynamiccl.train.trigger.training import Training, train

#: What is wanted where nobody says otherwise.
FALSE_ALARMS_PER_1E5: Final = 0.5
STEPS: Final = 80
#: Of each series, what the forecaster is trained on; thresholds come from the rest.
TRAINING_SHARE: Final = 0.6
#: Told of the work in hand, and how much of it is done.
Progress = Callable[[str, int, int], None]
_EVERY: Final = 10
_FACTORS: Final = (SMALLEST_SLOWDOWN, 1.5)
_RATES: Final = (0.1, 0.5, 1.0, 10.0, 100.0)
_ONSETS: Final = 500
_KNOWN: Final = 256
_HORIZON: Final = 500


@dataclass(frozen=True, slots=True)
class DelayCurve:
    """Median detection delays for one slowdown, by false alarm rate."""

    #: Slow time over quiet time.
    factor: float
    #: False alarms in 100,000 calls.
    rates: list[float]
    #: Median calls of the key from onset to alarm; None: not within what was run.
    delays: list[float | None]


@dataclass(frozen=True, slots=True)
class TriggerSettings:
    """Training settings of a Trigger, and its false alarm rate."""

    false_alarms_per_1e5: float = FALSE_ALARMS_PER_1E5
    steps: int = STEPS
    calls_per_rung: int = CALLS_PER_RUNG
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.false_alarms_per_1e5 <= 1000.0:
            raise UserError(
                f"{self.false_alarms_per_1e5} false alarms in 100,000 calls cannot be wanted; take "
                "0.5, or anything above 0 and up to 1000"
            )


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
    settings: TriggerSettings,
    progress: Progress = lambda _what, _done, _total: None,
) -> tuple[TriggerModule, Training, list[RungPeaks]]:
    """A trained and calibrated Trigger, its training history, and its excursion peaks."""
    torch.manual_seed(settings.seed)
    training, rest = series.split(TRAINING_SHARE)
    module = TriggerModule(series.usual_scale)
    trained = train(
        module,
        training,
        rest,
        steps=settings.steps,
        seed=settings.seed,
        told=lambda step, steps, _loss: progress("training", step, steps),
    )
    module.eval()
    peaks = find_peaks(
        module,
        rest,
        seed=settings.seed + 1,
        calls_per_rung=settings.calls_per_rung,
        told=lambda done, total: progress("calibrating", done, total),
    )
    per_call = settings.false_alarms_per_1e5 * 1e-5
    module.set_thresholds([each.threshold(per_call) for each in peaks])
    return module, trained, peaks


def fit_trigger(
    data_dir: Path,
    settings: TriggerSettings,
    *,
    experiment: str,
    tracking_uri: str,
    progress: Progress = lambda _what, _done, _total: None,
) -> TriggerSummary:
    """Train, calibrate, export and track.

    Raises what reading the data raises, NotEnoughData without quiet series, and UserError for a
    tracking URI that cannot be used.
    """
    series, counts = read_series(data_dir)
    name = f"trigger-seed{settings.seed}"
    with tracking.start_run(tracking_uri, experiment, name, {"kind": "trigger"}) as run:
        run.log_params({**asdict(settings), "data": str(data_dir), "recipe": "trigger"})
        run.log_params({f"series_{key}": value for key, value in asdict(counts).items()})
        digest = content_hash(data_dir)
        run.log_data(str(data_dir), digest)
        run.describe(f"A Trigger, which tells interference by the times of calls in `{data_dir}`.")
        run.set_tags(
            {
                "data_hash": digest,
                "git_commit": git_commit(),
                "host": socket.gethostname(),
            }
        )
        started = time.monotonic()
        module, trained, peaks = make_trigger(series, settings, progress)
        losses = trained.losses
        seconds = time.monotonic() - started
        for step in range(0, len(losses), _EVERY):
            run.log_metrics({"loss": float(np.mean(losses[step : step + _EVERY]))}, step=step)
        facts = _facts(module, series, trained, settings, counts)
        curves = [_delay_curve(module, series, peaks, factor) for factor in _FACTORS]
        at = _RATES.index(FALSE_ALARMS_PER_1E5)
        found = {f"delay_{_name(c.factor)}_calls": c.delays[at] for c in curves}
        run.log_metrics(
            {
                **{f"threshold_{key}": value for key, value in facts.thresholds.items()},
                **{key: value for key, value in found.items() if value is not None},
                "level_error": facts.level_error,
                "forecast_error": facts.forecast_error,
                "train_seconds": seconds,
            },
            step=settings.steps,
        )
        summary = TriggerSummary(
            run_id=run.run_id,
            run_directory=str(run.directory or run.artifact_uri),
            seconds=seconds,
            facts=facts,
            delays=found,
        )
        with tempfile.TemporaryDirectory() as scratch:
            _write(Path(scratch), module, facts, losses, curves)
            run.log_folder(Path(scratch))
        # Last of all: who finds it finds the rest.
        run.log_text(json.dumps(asdict(summary), indent=1), SUMMARY_NAME)
    return summary


def _facts(
    module: TriggerModule,
    series: Series,
    trained: Training,
    settings: TriggerSettings,
    counts: SeriesCounts,
) -> TriggerFacts:
    pairs = zip(RUNGS, module.thresholds.tolist(), strict=True)
    return TriggerFacts(
        false_alarms_per_1e5=settings.false_alarms_per_1e5,
        thresholds={f"{rung:.3f}": threshold for rung, threshold in pairs},
        usual_scale=series.usual_scale,
        warm_up_calls=WARM_UP,
        smallest_slowdown=SMALLEST_SLOWDOWN,
        level_error=trained.level_error,
        forecast_error=trained.error,
        counts=counts,
        from_averages=counts.averages > 0,
    )


def _delay_curve(
    module: TriggerModule, series: Series, peaks: list[RungPeaks], factor: float
) -> DelayCurve:
    """Median detection delays at the site's usual noise, by false alarm rate."""
    random = np.random.default_rng(11)
    values, _, _ = series.split(TRAINING_SHARE)[1].draw(random, _ONSETS, _KNOWN + _HORIZON)
    log_time = values * np.float32(series.usual_scale) + np.float32(5.0)
    log_time[_KNOWN:] += np.float32(np.log(factor))
    kept = module.thresholds.tolist()
    scripted = script(module)  # it has the module's own thresholds, not copies
    found: list[float | None] = []
    for rate in _RATES:
        module.set_thresholds([each.threshold(rate * 1e-5) for each in peaks])
        middle = float(np.median(delays(watch_with(scripted, _ONSETS), log_time, _KNOWN)))
        found.append(middle if np.isfinite(middle) else None)
    module.set_thresholds(kept)
    return DelayCurve(factor, list(_RATES), found)


def _write(
    scratch: Path,
    module: TriggerModule,
    facts: TriggerFacts,
    losses: list[float],
    curves: list[DelayCurve],
) -> None:
    folder = scratch / TRIGGER_FOLDER
    folder.mkdir()
    save_script(module, folder / TRIGGER_NAME)
    (folder / TRIGGER_FACTS_NAME).write_text(
        json.dumps(asdict(facts), indent=1) + "\n", encoding="utf-8"
    )
    (scratch / "plots").mkdir()
    trigger_curves(scratch / "plots" / "trigger.png", losses, curves)


def _name(factor: float) -> str:
    """A factor as part of a metric name: 1.15 -> 1_15x.

    >>> _name(1.5)
    '1_5x'
    """
    return f"{factor:g}x".replace(".", "_")


def trigger_curves(path: Path, losses: list[float], curves: list[DelayCurve]) -> None:
    """Loss by step, and delays by false-alarm rate, as a PNG."""
    # It takes a second to import.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.use("Agg")
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(losses) + 1), losses, color="tab:blue")
    left.set(xlabel="step", ylabel="mean absolute error of the forecast (robust sigmas)")
    for curve in curves:
        known = [(r, d) for r, d in zip(curve.rates, curve.delays, strict=True) if d is not None]
        if known:
            right.plot(*zip(*known, strict=True), marker="o", label=f"{curve.factor:g}x slower")
    right.set(
        xscale="log",
        yscale="log",
        xlabel="false alarms in 100,000 calls",
        ylabel="median delay (calls of the key)",
    )
    if right.lines:
        right.legend(loc="upper right", fontsize=8)
    for axes in (left, right):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=120)
