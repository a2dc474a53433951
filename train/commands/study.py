"""`dynamiccl-train study` and `trial`: recipes over a grid and seeds, and one run of them."""

import os
import shlex
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
    from dynamiccl.train.fanout.backend import Backend
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
        typer.Option(
            help="Trials at a time, a thread each.",
            min=1,
            show_default="processors; with --slurm or --ray, theirs",
        ),
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Run trials as a Slurm array.")] = False,
    sbatch_option: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="For sbatch, one an option, like --time=02:00:00."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run trials on a Ray cluster: HOST:PORT, or auto."),
    ] = None,
    script_only: Annotated[
        bool, typer.Option("--script-only", help="Write the batch script, submit nothing.")
    ] = False,
    experiment: Experiment = DEFAULT_EXPERIMENT,
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    resume: Annotated[
        str | None, typer.Option(metavar="STUDY_ID", help="Go on with a study, wherever it ran.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train recipes over a grid and several seeds, side by side; one parent run, a child a trial.

    Example: dynamiccl-train study --data out/data --recipe dqn --recipe cql --seeds 5
    """
    cli.configure_logging(verbose=False)
    if (resume is None) == (data is None):
        raise UserError("give --data for a new study, or --resume STUDY_ID to go on with one")
    if resume is not None and (recipe or settings or grid):
        raise UserError("--resume goes on with a study's own trials: leave out what they are")
    if script_only and not slurm:
        raise UserError("--script-only writes the batch script of --slurm: give both")
    if slurm and ray is not None:
        raise UserError("--slurm and --ray are two places for the same trials: give one")
    backend = _backend(jobs, sbatch_option or [], ray, slurm=slurm)
    from dynamiccl.train import study as studies
    from dynamiccl.train import tracking

    uri = tracking.absolute_uri(tracking_uri)
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
        run_id = studies.begin_study(planned, uri)
    assert run_id is not None
    if script_only:
        _write_script(backend, run_id, uri, as_json=as_json)
        return
    failures = _run_trials(backend, run_id, uri)
    summary = studies.summarise_study(run_id, uri)
    studies.end_study(summary, uri)
    _show(summary, failures, as_json=as_json)


def _backend(
    jobs: int | None, sbatch_options: list[str], ray: str | None, *, slurm: bool
) -> "Backend":
    """Where the trials run."""
    if slurm:
        from dynamiccl.train.fanout.slurm_array import SlurmArray

        return SlurmArray(jobs, tuple(sbatch_options))
    if sbatch_options:
        raise UserError(f"--sbatch-option {sbatch_options[0]} is for --slurm: give both")
    if ray is not None:
        from dynamiccl.train.fanout.ray_cluster import RayCluster

        return RayCluster(ray, jobs)
    from dynamiccl.train.fanout.processes import Processes

    return Processes(jobs or os.cpu_count() or 1)


def _write_script(backend: "Backend", run_id: str, tracking_uri: str, *, as_json: bool) -> None:
    from dynamiccl.train.fanout.slurm_array import SlurmArray
    from dynamiccl.train.study import missing_trials

    assert isinstance(backend, SlurmArray)
    numbers = missing_trials(run_id, tracking_uri)
    if not numbers:
        raise UserError(f"study {run_id} has no trial left to run: leave out --script-only")
    script = backend.write_script(run_id, numbers, tracking_uri)
    if as_json:
        cli.print_json({"run_id": run_id, "script": str(script), "trials": numbers})
        return
    stdout.print(
        f"study {run_id}: {len(numbers)} trials\n"
        f"submit them with: sbatch {shlex.quote(str(script))}\n"
        f"when they have ended: dynamiccl-train study --resume {run_id} --tracking-uri "
        f"{tracking_uri}",
        soft_wrap=True,
        highlight=False,
    )


def _run_trials(backend: "Backend", run_id: str, tracking_uri: str) -> list[str]:
    """Run the trials that are not done; what those that failed said."""
    from dynamiccl.train.study import missing_trials, read_study

    trials = read_study(run_id, tracking_uri).trials
    missing = missing_trials(run_id, tracking_uri)
    words = f"study {run_id}: {len(missing)} of {len(trials)} trials to run"
    stderr.print(words, soft_wrap=True, highlight=False)
    failures, best = [], float("inf")
    with progress_bar("trials") as show:
        for done, outcome in enumerate(backend.run(run_id, missing, tracking_uri), start=1):
            trial = trials[outcome.number]
            if outcome.validation_regret is None:
                where = f"trial {outcome.number} ({trial.setting}, seed {trial.seed})"
                failures.append(f"{where}: {outcome.error}")
            else:
                best = min(best, outcome.validation_regret)
            show(done, len(missing), {"validation_regret": best})
    return failures


def _show(summary: "StudySummary", failures: list[str], *, as_json: bool) -> None:
    """Print a study's outcome; raises DataError when trials failed."""
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
            f"they say is mended, go on with 'dynamiccl-train study --resume {summary.run_id}'"
        )


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
