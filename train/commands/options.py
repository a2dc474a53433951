"""What the commands of `dynamiccl-train` and `-evaluate` share: options, consoles and bars."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

DEFAULT_RECIPE: Final = "ddqn-dueling"
DEFAULT_EXPERIMENT: Final = "dynamiccl"
Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]
TrackingUri = Annotated[str, typer.Option(help="MLflow store.")]
Experiment = Annotated[str, typer.Option(help="MLflow experiment.")]
stdout = Console()
stderr = Console(stderr=True)


def wide_stdout(least: int) -> Console:
    """Standard output for a table: in a file it is at least so wide."""
    return stdout if stdout.is_terminal else Console(width=max(stdout.width, least))


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[int, int, dict[str, float]], None]]:
    """A bar of gradient steps, on a terminal; what to call after each epoch."""
    with open_bar(TextColumn("{task.fields[note]}")) as bar:
        task = bar.add_task(name, total=None, note="")

        def show(step: int, total: int, metrics: dict[str, float]) -> None:
            note = f"validation regret {metrics['validation_regret']:.2%}"
            bar.update(task, completed=step, total=total, note=note)

        yield show


def open_bar(*more: ProgressColumn) -> Progress:
    """A bar that is drawn on a terminal alone; `more` columns stand at its end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        *more,
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    )
