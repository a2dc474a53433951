"""`dynamiccl-train`: fit a recipe to a data set."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dynamiccl import cli
from dynamiccl.errors import DataError, UserError
from dynamiccl.train import DEFAULT_TRACKING_URI
from dynamiccl.train.recipes import RECIPES, make_recipe

if TYPE_CHECKING:
    from dynamiccl.train.study import StudySummary

app = typer.Typer(
    help="Train policies offline on measured data; every run is tracked in MLflow.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_DEFAULT_RECIPE: Final = "ddqn-dueling"
_stderr = Console(stderr=True)
_stdout = Console()
_Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]


def main() -> None:
    """Entry point of the console script."""
    cli.run(app)


@app.command("list")
def list_command(as_json: _Json = False) -> None:
    """Show the recipes and their settings.

    Example: dynamiccl-train list
    """
    recipes = [make().to_json() for make in RECIPES.values()]
    if as_json:
        cli.print_json(recipes)
        return
    for recipe in recipes:
        table = Table(title=f"{recipe['name']}: {recipe['summary']}", title_justify="left")
        table.add_column("setting (--set)")
        table.add_column("value")
        for key, value in recipe.items():
            if key not in {"name", "summary"}:
                table.add_row(key, str(value))
        _stdout.print(table)


@app.command("fit")
def fit_command(
    data: Annotated[Path, typer.Option(help="Data directory of dynamiccl-collect.")],
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(RECIPES)}, or FILE.py with one.",
            show_default=_DEFAULT_RECIPE,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting.")
    ] = None,
    experiment: Annotated[str, typer.Option(help="MLflow experiment.")] = "dynamiccl",
    tracking_uri: Annotated[str, typer.Option(help="MLflow store.")] = DEFAULT_TRACKING_URI,
    seed: Annotated[
        int | None, typer.Option(help="Seed of weights and batches.", min=0, show_default="0")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN_ID", help="Go on with a run that was killed, as it began."),
    ] = None,
    as_json: _Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Train a recipe; the checkpoint and the abstain margin are chosen on validation bins.

    Example: dynamiccl-train fit --data out/data --recipe ddqn-dueling --seed 1
    """
    cli.configure_logging(verbose=verbose)
    if resume is not None and (recipe, settings or None, seed) != (None, None, None):
        raise UserError(
            "--resume goes on with a run's own recipe, settings and seed: leave out --recipe, "
            "--set and --seed, or begin a new run without --resume"
        )
    chosen = make_recipe(recipe or _DEFAULT_RECIPE, settings or [])
    # Checked before the heavy imports: a typo should not take five seconds to be told.
    from dynamiccl.datasets.store import part_paths

    part_paths(data)
    from dynamiccl.train import fit as fitting
    from dynamiccl.train import tracking

    with _progress(resume or chosen.name) as show:
        if resume is not None:
            summary = fitting.resume(data, resume, tracking_uri=tracking_uri, progress=show)
        else:
            summary = fitting.fit(
                data,
                chosen,
                experiment=experiment,
                tracking_uri=tracking_uri,
                seed=seed or 0,
                progress=show,
            )
    version = tracking.register(tracking_uri, summary.run_id, tracking.CANDIDATE)
    if as_json:
        cli.print_json(asdict(summary))
        return
    _stdout.print(
        f"run {summary.run_id}: {summary.steps} steps in {summary.seconds:.1f} s, best at step "
        f"{summary.best_step}\n"
        f"validation: mean regret {summary.validation_regret:.2%} on {summary.validation_tasks} "
        f"tasks (NCCL's default {summary.validation_default_regret:.2%}), abstains below a "
        f"predicted gain of {summary.abstain_margin:.1%}\n"
        f"files: {summary.run_directory}\n"
        f"registered as models:/{tracking.MODEL_NAME}@{tracking.CANDIDATE} (version {version})\n"
        f"compare runs with: mlflow ui --backend-store-uri {tracking_uri}",
        soft_wrap=True,
    )


@app.command("study")
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
    experiment: Annotated[str, typer.Option(help="MLflow experiment.")] = "dynamiccl",
    tracking_uri: Annotated[str, typer.Option(help="MLflow store.")] = DEFAULT_TRACKING_URI,
    resume: Annotated[
        str | None, typer.Option(metavar="STUDY_ID", help="Go on with a study.")
    ] = None,
    as_json: _Json = False,
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
            recipes=recipe or [_DEFAULT_RECIPE],
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
        wide = _stdout if _stdout.is_terminal else Console(width=max(_stdout.width, 140))
        wide.print(_study_table(summary))
    if failures:
        for failure in failures:
            _stderr.print(failure, soft_wrap=True, highlight=False)
        raise DataError(
            f"{len(failures)} of {summary.trials} trials failed; the others are kept: when what "
            f"they say is mended, go on with 'dynamiccl-train study --resume {run_id}'"
        )


def _run_study(run_id: str, tracking_uri: str, jobs: int) -> list[str]:
    """Run its trials, those that are done included; what those that failed said."""
    from dynamiccl.train.study import read_study
    from dynamiccl.train.trials import run_trials

    trials = read_study(run_id, tracking_uri).trials
    _stderr.print(f"study {run_id}: {len(trials)} trials", soft_wrap=True, highlight=False)
    failures, best = [], float("inf")
    with _progress("trials") as show:
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


@app.command("trial")
def trial_command(
    study: Annotated[str, typer.Argument(metavar="STUDY_ID", help="The study's parent run.")],
    number: Annotated[int, typer.Argument(help="Which of its trials, from 0.")],
    tracking_uri: Annotated[str, typer.Option(help="MLflow store.")] = DEFAULT_TRACKING_URI,
    as_json: _Json = False,
) -> None:
    """Run one trial of a study, or go on with it: what a study runs, and a batch array can.

    Example: dynamiccl-train trial STUDY_ID $SLURM_ARRAY_TASK_ID
    """
    from dynamiccl.train.study import run_trial

    summary = run_trial(study, number, tracking_uri)
    if as_json:
        cli.print_json(asdict(summary))
        return
    _stdout.print(f"run {summary.run_id}: validation regret {summary.validation_regret:.2%}")


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


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int, dict[str, float]], None]]:
    """A bar of gradient steps, on a terminal; what to call after each epoch."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(
        *columns, console=_stderr, transient=True, disable=not _stderr.is_terminal
    ) as bar:
        task = bar.add_task(name, total=None, note="")

        def show(step: int, total: int, metrics: dict[str, float]) -> None:
            note = f"validation regret {metrics['validation_regret']:.2%}"
            bar.update(task, completed=step, total=total, note=note)

        yield show


if __name__ == "__main__":
    main()
