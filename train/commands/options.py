"""Options, consoles and progress bars that the commands of train and evaluate share."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from dynamiccl.train.word_table import WordTable

#: Seconds between two lines where there is no bar.
EVERY_S: Final = 30.0
#: Columns that every table fits: those of a terminal, or of a file.
WIDTH: Final = 100
DEFAULT_RECIPE: Final = "ddqn-dueling"
DEFAULT_EXPERIMENT: Final = "dynamiccl"
Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]
TrackingUri = Annotated[str, typer.Option(help="MLflow store.")]
RunStore = Annotated[str, typer.Option(help="MLflow store that holds the run ids.")]
Experiment = Annotated[str, typer.Option(help="MLflow experiment.")]
stdout = Console()
stderr = Console(stderr=True)


def wide_stdout(least: int = WIDTH) -> Console:
    """Standard output for tables, at least `least` columns wide when not a terminal."""
    return stdout if stdout.is_terminal else Console(width=max(stdout.width, least))


def folding_table(*heads: str, title: str | None = None) -> Table:
    """A table whose cells are folded where it is narrow."""
    table = WordTable(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold")
    return table


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[int, int, dict[str, float]], None]]:
    """A progress bar of steps, or tables, on a terminal; yields the callback for each epoch."""
    with open_bar(TextColumn("{task.fields[note]}")) as bar:
        task = bar.add_task(name, total=None, note="")

        def show(step: int, total: int, metrics: dict[str, float]) -> None:
            note = ""
            if "validation_regret" in metrics:
                note = f"validation regret {metrics['validation_regret']:.2%}"
            bar.update(task, completed=step, total=total, note=note)

        yield show


class _Bar(Progress):
    """A progress bar; without a terminal, a line every half a minute."""

    _said = 0.0

    def start(self) -> None:
        """Start; the first line comes after half a minute."""
        self._said = time.monotonic()
        super().start()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """As `rich.progress.Progress.update`."""
        super().update(task_id, **changes)
        self._say(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """As `rich.progress.Progress.advance`."""
        super().advance(task_id, advance)
        self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        now = time.monotonic()
        if self.disable and now - self._said >= EVERY_S:
            self._said = now
            task = self._tasks[task_id]
            total = "" if task.total is None else f" of {task.total:,.0f}"
            note = f", {task.fields['note']}" if task.fields.get("note") else ""
            words = f"{task.description}: {task.completed:,.0f}{total}{note}"
            stderr.print(words, soft_wrap=True, highlight=False, markup=False)


def open_bar(*more: ProgressColumn) -> Progress:
    """A progress bar for terminals; the columns `more` are appended."""
    return _Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        *more,
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    )
