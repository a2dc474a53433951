"""`dynamiccl-train study` and `trial`: recipes over a grid and seeds, and one run of them."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dynamiccl import cli
from dynamiccl.errors import DataError, UserError
from dynamiccl.train import DEFAULT_TRACKING_URI
from dynamiccl.train.commands.options import (
    DEFAULT_EXPERIMENT,
    DEFAULT_RECIPE,
    Experiment,
    Json,
    TrackingUri,
    progress_bar,
    stderr,
    stdout,
)

if TYPE_CHECKING:
    from dynamiccl.train.study import StudySummary


def study_command(
    data: Annotated[Path | None, typer.Option(help="Data directory of dynamiccl-collect.")] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Recipes to compare, one an option.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="For all trials.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2", help="Vary a setting; lists with +, as in 64+64."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Trials of each setting.", min=1)] = 5,
    jobs: Annotated[
        int | None,
        typer.Option(help="Trials at a time, a thread each.", min=1, show_default="processors"),
    ] = None,
    experiment: Experiment = DEFAULT_EXPERIMENT,
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    resume: Annotated[
        str | None, typer.Option(metavar="STUDY_ID", help="Go on with a study.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train recipes over a grid and several seeds, side by side; one parent run, a child a trial.

    Example: dynamiccl-train study --data out/data --recipe dqn --recipe cql --seeds 5
    """
    if (resume is None) == (data is None):
        raise UserError("give --data for a new study, or --resume STUDY_ID to go on with one")
    if resume is not None and (recipe or settings or grid):
        raise UserError("--resume goes on with a study's own trials: leave out what they are")
    from dynamiccl.train import study as studies

    run_id = resume
    if data is not None:
        from dynamiccl.datasets.store import part_paths

        part_paths(data)
        planned = studies.plan_study(
            data,
            experiment=experiment,
            recipes=recipe or [DEFAULT_RECIPE],
            settings=settings or [],
            grid=grid or [],
            seeds=seeds,
        )
        run_id = studies.begin_study(planned, tracking_uri)
    failures = _run_study(str(run_id), tracking_uri, jobs or os.cpu_count() or 1)
    summary = studies.summarise_study(str(run_id), tracking_uri)
    studies.end_study(summary, tracking_uri)
    if as_json:
        cli.print_json(asdict(summary))
    else:
        wide = stdout if stdout.is_terminal else Console(width=max(stdout.width, 140))
        wide.print(_study_table(summary))
    if failures:
        for failure in failures:
            stderr.print(failure, soft_wrap=True, highlight=False)
        raise DataError(
            f"{len(failures)} of {summary.trials} trials failed; the others are kept: when what "
            f"they say is mended, go on with 'dynamiccl-train study --resume {run_id}'"
        )


def _run_study(run_id: str, tracking_uri: str, jobs: int) -> list[str]:
    """Run its trials, those that are done included; what those that failed said."""
    from dynamiccl.train.study import read_study
    from dynamiccl.train.trials import run_trials

    trials = read_study(run_id, tracking_uri).trials
    stderr.print(f"study {run_id}: {len(trials)} trials", soft_wrap=True, highlight=False)
    failures, best = [], float("inf")
    with progress_bar("trials") as show:
        outcomes = run_trials(run_id, range(len(trials)), tracking_uri, jobs=jobs)
        for done, outcome in enumerate(outcomes, start=1):
            trial = trials[outcome.number]
            if outcome.validation_regret is None:
                where = f"trial {outcome.number} ({trial.setting}, seed {trial.seed})"
                failures.append(f"{where}: {outcome.error}")
            else:
                best = min(best, outcome.validation_regret)
            show(done, len(trials), {"validation_regret": best})
    return failures


def trial_command(
    study: Annotated[str, typer.Argument(metavar="STUDY_ID", help="The study's parent run.")],
    number: Annotated[int, typer.Argument(help="Which of its trials, from 0.")],
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    as_json: Json = False,
) -> None:
    """Run one trial of a study, or go on with it: what a study runs, and a batch array can.

    Example: dynamiccl-train trial STUDY_ID $SLURM_ARRAY_TASK_ID
    """
    from dynamiccl.train.study import run_trial

    summary = run_trial(study, number, tracking_uri)
    if as_json:
        cli.print_json(asdict(summary))
        return
    stdout.print(f"run {summary.run_id}: validation regret {summary.validation_regret:.2%}")


def _study_table(summary: "StudySummary") -> Table:
    default = "" if summary.default_regret is None else f"{summary.default_regret:.2%}"
    title = f"{summary.done} of {summary.trials} trials; NCCL's default {default}"
    heads = ("setting", "seeds", "validation regret", "95 % interval", "seconds", "best run")
    table = Table(*heads, title=title, title_justify="left")
    for each in summary.settings:
        interval = "one seed" if each.low is None else f"{each.low:.2%} .. {each.high:.2%}"
        row = (each.setting, str(each.seeds), f"{each.mean:.2%}", interval)
        table.add_row(*row, f"{each.train_seconds:.0f}", each.best_run)
    return table
