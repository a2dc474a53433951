"""`dynamiccl-train study` and `trial`: recipes over a grid and seeds, and one run of them."""

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from dynamiccl.train.fanout.backend import Backend
    from dynamiccl.train.search import Search
    from dynamiccl.train.study import Study, StudySummary


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
    """Train recipes over a grid and several seeds in parallel; each trial is a child run.

    Example: dynamiccl-train study --data out/data --recipe ddqn-dueling --recipe cql --seeds 5
    """
    cli.configure_logging(verbose=False)
    if (resume is None) == (data is None):
        raise UserError("give --data for a new study, or --resume STUDY_ID to go on with one")
    if resume is not None and (recipe or settings or grid or optuna or space):
        raise UserError("--resume goes on with a study's own trials: leave out what they are")
    if script_only and (not slurm or optuna):
        raise UserError(
            "--script-only writes one batch script, with --slurm and without --optuna, whose later "
            "trials depend on the first"
        )
    if slurm and ray is not None:
        raise UserError("--slurm and --ray are two places for the same trials: give one")
    backend = _backend(jobs, sbatch_option or [], ray, slurm=slurm)
    with cli.working("loading PyTorch and MLflow"):
        from dynamiccl.train import study as studies
    from dynamiccl.train.tracking import absolute_uri

    uri = absolute_uri(tracking_uri)
    run_id = resume
    if data is not None:
        from dynamiccl.datasets.store import part_paths

        part_paths(data)
        from dynamiccl.train.search import Search

        wanted = Search(
            recipes=tuple(recipe or [DEFAULT_RECIPE]),
            settings=tuple(settings or []),
            space=tuple(space or []),
            count=optuna or 0,
            seeds=seeds,
            per_round=max(1, (jobs or os.cpu_count() or 1) // seeds),
        )
        run_id = studies.begin_study(_planned(data, experiment, wanted, grid or []), uri)
    assert run_id is not None
    if script_only:
        _write_script(backend, run_id, uri, as_json=as_json)
        return
    again = f"dynamiccl-train study --resume {run_id} --tracking-uri {uri}"
    with cli.interruptible(lambda: f"study {run_id} keeps what is done; go on with: {again}"):
        failures = _run_study(backend, run_id, uri)
    summary = studies.summarise_study(run_id, uri)
    studies.end_study(summary, uri)
    store = "" if tracking_uri == DEFAULT_TRACKING_URI else f" --tracking-uri {uri}"
    _show(summary, failures, store, as_json=as_json)


def _planned(data: Path, experiment: str, wanted: "Search", grid: list[str]) -> "Study":
    """A new search; the study of a grid where it is to try no settings."""
    from dynamiccl.train.study import plan_search, plan_study

    if not wanted.count:
        if wanted.space:
            raise UserError(f"--space {wanted.space[0]} is for --optuna N: give both, or --grid")
        return plan_study(
            data,
            experiment=experiment,
            recipes=wanted.recipes,
            settings=wanted.settings,
            grid=grid,
            seeds=wanted.seeds,
        )
    if grid:
        raise UserError(f"--grid {grid[0]} is for all its values: with --optuna use --space")
    if not wanted.space and len(wanted.recipes) == 1:
        raise UserError("--optuna needs something to search: give --space, or several --recipe")
    return plan_search(data, experiment=experiment, search=wanted)


def _backend(
    jobs: int | None, sbatch_options: list[str], ray: str | None, *, slurm: bool
) -> "Backend":
    """The backend that runs the trials."""
    if slurm:
        from dynamiccl.train.fanout.slurm_array import SlurmArray

        return SlurmArray(jobs, tuple(sbatch_options))
    if sbatch_options:
        raise UserError(f"--sbatch-option {sbatch_options[0]} is for --slurm: give both")
    if ray is not None:
        from dynamiccl.train.fanout.ray_cluster import RayCluster
        from dynamiccl.train.ray_join import RayJoin

        return RayCluster(RayJoin(ray), jobs)
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


def _run_study(backend: "Backend", run_id: str, tracking_uri: str) -> list[str]:
    """Run the missing trials, round by round; returns messages of failed ones."""
    from dynamiccl.train.study import extend_study, missing_trials

    failures: list[str] = []
    tried: set[int] = set()
    while True:
        missing = [n for n in missing_trials(run_id, tracking_uri) if n not in tried]
        failures += _run_trials(backend, run_id, missing, tracking_uri)
        tried.update(missing)
        if not extend_study(run_id, tracking_uri):
            return failures


def _run_trials(
    backend: "Backend", run_id: str, missing: list[int], tracking_uri: str
) -> list[str]:
    """Run trials; returns messages of failed ones."""
    from dynamiccl.train.study import read_study

    trials = read_study(run_id, tracking_uri).trials
    if not missing and not trials:
        return []  # a search, before its first round
    words = f"study {run_id}: {len(missing)} of {len(trials)} trials to run"
    stderr.print(words, soft_wrap=True, highlight=False)
    if not missing:
        return []
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


def _show(summary: "StudySummary", failures: list[str], store: str, *, as_json: bool) -> None:
    """Print a study's result; raises DataError when trials failed."""
    if as_json:
        cli.print_json(asdict(summary))
    else:
        wide_stdout().print(_study_table(summary))
        runs = " ".join(f"--policy {each.best_run}" for each in summary.settings)
        report = f"dynamiccl-evaluate report --data {summary.data} {runs}{store} --out report"
        if summary.settings:
            told = f"their best runs, side by side on test sizes: {report}"
            stdout.print(told, soft_wrap=True, highlight=False)
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
    """Run or resume one trial of a study, as studies and batch arrays do.

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
