"""`dynamiccl-train study`: recipes over a grid or a search and seeds, by workers that are alike."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
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
    folding_table,
    progress_bar,
    stderr,
    stdout,
    wide_stdout,
)
from dynamiccl.train.worker import ONE_THREAD, reason

if TYPE_CHECKING:
    from optuna import Study

    from dynamiccl.train.study import Plan, StudySummary

#: Seconds between two looks at the queue.
_LOOK_S: Final = 0.5
_STUDY: Final = ("dynamiccl-train", "study")


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
    optuna: Annotated[
        int | None,
        typer.Option(metavar="N", help="Search: try N settings of --space by TPE.", min=1),
    ] = None,
    space: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=LOW:HIGH[:log]", help="What to search; or KEY=V1,V2, as --grid."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Trials of each setting.", min=1)] = 5,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Workers here, a thread each; 0: leave the trials to --join.",
            min=0,
            show_default="processors",
        ),
    ] = None,
    experiment: Experiment = DEFAULT_EXPERIMENT,
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    resume: Annotated[
        str | None,
        typer.Option(metavar="STUDY_ID", help="Go on with a study: failed trials, and the table."),
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(metavar="STUDY_ID", help="Be one more worker of a study, here or in a job."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train recipes over a grid and several seeds in parallel; each trial is a child run.

    Example: dynamiccl-train study --data out/data --recipe ddqn-dueling --recipe cql --seeds 5
    """
    cli.configure_logging(verbose=False)
    if [data, resume, join].count(None) != 2:
        raise UserError(
            "give --data for a new study, --resume STUDY_ID to go on with one, or --join STUDY_ID "
            "to work for one"
        )
    if data is None and (recipe or settings or grid or optuna or space):
        raise UserError("--resume and --join take a study's own trials: leave out what they are")
    if join is not None:
        if jobs is not None or as_json:
            raise UserError("--join is one worker, without --jobs and --json: start several")
        _work(join, tracking_uri)
        return
    from dynamiccl.train.tracking import absolute_uri

    uri = absolute_uri(tracking_uri)
    with cli.working("loading PyTorch and MLflow"):
        from dynamiccl.train import study as studies
    if data is not None:
        plan = _plan(data, experiment, recipe, settings, grid, space, seeds, optuna)
        study = studies.begin_study(plan, uri)
        if jobs == 0:
            _tell_how_to_join(studies.summarise_study(study)[0], uri, as_json=as_json)
            return
    else:
        assert resume is not None
        study = studies.open_study(resume, uri)
        studies.retry_failed(study)
    failures = _run_workers(study, uri, jobs)
    summary, _ = studies.summarise_study(study)
    studies.end_study(summary, uri)
    store = "" if tracking_uri == DEFAULT_TRACKING_URI else f" --tracking-uri {uri}"
    _show(summary, failures, store, as_json=as_json)


def _plan(
    data: Path,
    experiment: str,
    recipes: list[str] | None,
    settings: list[str] | None,
    grid: list[str] | None,
    space: list[str] | None,
    seeds: int,
    count: int | None,
) -> "Plan":
    from dynamiccl.datasets.store import part_paths
    from dynamiccl.train.study import make_plan

    part_paths(data)
    if space and not count:
        raise UserError(f"--space {space[0]} is for --optuna N: give both, or --grid")
    if grid and count:
        raise UserError(f"--grid {grid[0]} is for all its values: with --optuna use --space")
    if count and not space and len(recipes or []) < 2:
        raise UserError("--optuna needs something to search: give --space, or several --recipe")
    return make_plan(
        data,
        experiment=experiment,
        recipes=recipes or [DEFAULT_RECIPE],
        settings=settings or [],
        axes=space or grid or [],
        seeds=seeds,
        count=count or 0,
    )


def _work(run_id: str, tracking_uri: str) -> None:
    """Be a worker, to the end of the study."""
    for name, value in ONE_THREAD.items():  # before numpy is imported
        os.environ.setdefault(name, value)
    # A shell's background jobs ignore it, and so would SIGTERM be.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # As Ctrl-C, which MLflow's transactions are shielded from: the trial goes to another worker.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    from dynamiccl.train.study import open_study, work
    from dynamiccl.train.tracking import absolute_uri

    uri = absolute_uri(tracking_uri)
    for line in work(open_study(run_id, uri), uri):
        stderr.print(line, soft_wrap=True, highlight=False)


def _tell_how_to_join(summary: "StudySummary", uri: str, *, as_json: bool) -> None:
    """Say how workers are started, and what comes then."""
    from dynamiccl.train.tracking import database_of

    if database_of(uri) is not None:
        stderr.print(
            f"warning: {uri} is safe on one host alone; for workers on several run 'mlflow server' "
            "and begin the study with --tracking-uri http://NODE:5000",
            soft_wrap=True,
            highlight=False,
        )
    join = shlex.join([*_STUDY, "--join", summary.run_id, "--tracking-uri", uri])
    if as_json:
        cli.print_json({"run_id": summary.run_id, "trials": summary.trials, "join": join})
        return
    array = "sbatch --array=1-16 --cpus-per-task=1 --requeue"
    stdout.print(
        f"study {summary.run_id}: {summary.trials} trials wait for workers, of any number\n"
        f"one here: {join}\n"
        f"16 on Slurm: {array} --wrap {shlex.quote(f'exec {join}')}\n"
        f"the results: {_again(summary.run_id, uri)} --jobs 0",
        soft_wrap=True,
        highlight=False,
    )


def _again(run_id: str, uri: str) -> str:
    return shlex.join([*_STUDY, "--resume", run_id, "--tracking-uri", uri])


def _run_workers(study: "Study", uri: str, jobs: int | None) -> list[str]:
    """Run workers here until the study is over; returns what failed."""
    from dynamiccl.train.study import summarise_study

    run_id = study.study_name
    summary, failures = summarise_study(study)
    left = summary.trials - summary.done
    words = f"study {run_id}: {left} of {summary.trials} trials to run"
    stderr.print(words, soft_wrap=True, highlight=False)
    command = [sys.executable, "-P", "-m", "dynamiccl.train.cli", "study", "--join", run_id]
    with (
        tempfile.TemporaryFile("w+") as said,
        cli.interruptible(
            lambda: f"study {run_id} keeps what is done; go on with: {_again(run_id, uri)}"
        ),
        progress_bar("trials") as show,
    ):
        workers = [
            subprocess.Popen(
                [*command, "--tracking-uri", uri],
                stdout=said,
                stderr=said,
                env=os.environ | ONE_THREAD,
            )
            for _ in range(min(left, os.cpu_count() or 1 if jobs is None else jobs))
        ]
        try:
            while any(worker.poll() is None for worker in workers):
                time.sleep(_LOOK_S)
                summary, failures = summarise_study(study)
                found = summary.settings
                best = {"validation_regret": found[0].mean} if found else {}
                show(summary.done + len(failures), summary.trials, best)
        finally:
            for worker in workers:
                worker.terminate()
                worker.wait()
        said.seek(0)
        if any(worker.returncode for worker in workers):
            failures.append(f"a worker died: {reason(said.read())}")
    return failures


def _show(summary: "StudySummary", failures: list[str], store: str, *, as_json: bool) -> None:
    """Print a study's result; raises DataError when trials failed or are left."""
    if as_json:
        cli.print_json(asdict(summary))
    else:
        wide_stdout().print(_study_table(summary))
        runs = " ".join(f"--policy {each.best_run}" for each in summary.settings)
        report = f"dynamiccl-evaluate report --data {summary.data} {runs}{store} --out report"
        if summary.settings:
            told = f"their best runs, side by side on test sizes: {report}"
            stdout.print(told, soft_wrap=True, highlight=False)
    for failure in failures:
        stderr.print(failure, soft_wrap=True, highlight=False)
    if missing := summary.trials - summary.done:
        what = "failed" if failures else "are not done"
        raise DataError(
            f"{missing} of {summary.trials} trials {what}; the others are kept: when what they say "
            f"is mended, go on with 'dynamiccl-train study --resume {summary.run_id}'"
        )


def _study_table(summary: "StudySummary") -> Table:
    default = "" if summary.default_regret is None else f"{summary.default_regret:.2%}"
    title = f"{summary.done} of {summary.trials} trials; NCCL's default {default}"
    heads = ("setting", "seeds", "validation\nregret", "95 % interval", "seconds", "best run")
    table = folding_table(title=title)
    for head in heads:
        # A run id that is cut short names nothing.
        table.add_column(head, no_wrap=head != heads[0], overflow="fold")
    for each in summary.settings:
        # No regret is negative, which Student's interval does not know.
        low = None if each.low is None else max(each.low, 0.0)
        interval = "one seed" if low is None else f"{low:.2%} .. {each.high:.2%}"
        row = (each.setting, str(each.seeds), f"{each.mean:.2%}", interval)
        table.add_row(*row, f"{each.train_seconds:.0f}", each.best_run)
    return table
