"""What the commands of `dynamiccl-train` share: options, consoles and the progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

DEFAULT_RECIPE: Final = "ddqn-dueling"
DEFAULT_EXPERIMENT: Final = "dynamiccl"
Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]
TrackingUri = Annotated[str, typer.Option(help="MLflow store.")]
Experiment = Annotated[str, typer.Option(help="MLflow experiment.")]
stdout = Console()
stderr = Console(stderr=True)


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[int, int, dict[str, float]], None]]:
    """A bar of gradient steps, on a terminal; what to call after each epoch."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(name, total=None, note="")

        def show(step: int, total: int, metrics: dict[str, float]) -> None:
            note = f"validation regret {metrics['validation_regret']:.2%}"
            bar.update(task, completed=step, total=total, note=note)

        yield show
