"""`dynamiccl-train`: fit a recipe to a data set."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dynamiccl import cli
from dynamiccl.errors import UserError
from dynamiccl.train import DEFAULT_TRACKING_URI
from dynamiccl.train.recipes import RECIPES, make_recipe

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
        typer.Option(help=f"One of {', '.join(RECIPES)}.", show_default=_DEFAULT_RECIPE),
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
        f"compare runs with: mlflow ui --backend-store-uri {tracking_uri}",
        soft_wrap=True,
    )


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
