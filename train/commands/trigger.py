"""`dynamiccl-train trigger`: trains the detector of slow calls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynamiccl import cli
from dynamiccl.train import DEFAULT_TRACKING_URI
from dynamiccl.train.commands.options import (
    DEFAULT_EXPERIMENT,
    Experiment,
    Json,
    TrackingUri,
    open_bar,
    stderr,
    stdout,
)

if TYPE_CHECKING:
    from dynamiccl.train.trigger.fit import TriggerSummary


def trigger_command(
    data: Annotated[Path, typer.Option(help="Data directory of dynamiccl-collect.")],
    false_alarms_per_1e5: Annotated[
        float, typer.Option("--false-alarms-per-1e5", help="False alarms in 100,000 quiet calls.")
    ] = 0.5,
    steps: Annotated[int, typer.Option(help="Training steps of the forecaster.", min=0)] = 80,
    calls_per_rung: Annotated[
        int, typer.Option(help="Quiet calls by which each threshold is calibrated.", min=1000)
    ] = 1_000_000,
    experiment: Experiment = DEFAULT_EXPERIMENT,
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    seed: Annotated[int, typer.Option(help="Seed of weights and streams.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Train the Trigger on quiet calls; thresholds come from simulated run lengths.

    Example: dynamiccl-train trigger --data out/data --false-alarms-per-1e5 0.5
    """
    cli.configure_logging(verbose=False)
    # Checked before the heavy imports: a typo should not take five seconds to be told.
    from dynamiccl.datasets.store import part_paths

    part_paths(data)
    from dynamiccl.train.trigger.fit import TriggerSettings, fit_trigger

    settings = TriggerSettings(false_alarms_per_1e5, steps, calls_per_rung, seed)
    with _bar() as show:
        summary = fit_trigger(
            data, settings, experiment=experiment, tracking_uri=tracking_uri, progress=show
        )
    if summary.facts.from_averages:
        stderr.print(
            "warning: there were no single calls to learn from, only averages of nccl-tests, which "
            "vary less: expect more false alarms than asked for until recorded calls are imported",
            soft_wrap=True,
            highlight=False,
        )
    if as_json:
        cli.print_json(asdict(summary))
        return
    _show(summary, tracking_uri)


def _show(summary: "TriggerSummary", tracking_uri: str) -> None:
    facts, counts = summary.facts, summary.facts.counts
    thresholds = ", ".join(f"{key}: {value:.1f}" for key, value in facts.thresholds.items())
    found = ", ".join(
        f"{name.removeprefix('delay_').removesuffix('_calls').replace('_', '.')} after "
        f"{'more than 500' if calls is None else f'{calls:.0f}'} calls"
        for name, calls in summary.delays.items()
    )
    stdout.print(
        f"run {summary.run_id}: {counts.series} quiet series (calls {counts.calls}, iterations "
        f"{counts.iterations}, averages {counts.averages}; {counts.disturbed} disturbed calls left "
        f"out), usual noise {facts.usual_scale:.3f}, in {summary.seconds:.0f} s\n"
        f"thresholds by reference value, for {facts.false_alarms_per_1e5:g} false alarms in "
        f"100,000 calls: {thresholds}\n"
        f"found, at the usual noise and 0.5 false alarms in 100,000 calls: {found} (median)\n"
        f"forecast error {facts.forecast_error:.3f} robust sigmas (level alone "
        f"{facts.level_error:.3f})\n"
        f"files: {summary.run_directory}\n"
        f"next: dynamiccl-deploy export RUN --trigger {summary.run_id} --out DIR\n"
        f"compare runs with: mlflow ui --backend-store-uri {tracking_uri}",
        soft_wrap=True,
        highlight=False,
    )


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar with a description, on a terminal."""
    with open_bar() as bar:
        task = bar.add_task("reading", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show
