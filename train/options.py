"""Options, tables, consoles and progress bars of train's and evaluate's commands."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich import progress
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import Progress, TaskID
from rich.table import Table

from dynamiccl import cli


class WordTable(Table):
    """Columns as wide as their longest word where all fit, which Rich would break."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Choose widths for the console."""
        words, lines = [], []
        for column in self.columns:
            texts = "\n".join([str(column.header), *map(str, column.cells)])
            lines.append(max(map(len, texts.splitlines()), default=0))
            longest = max(map(len, texts.split()), default=0)
            words.append(lines[-1] if column.no_wrap else longest)
        for padding in (1, 0):
            # Padding on both sides of a column, a line or blank on one; the table has one more.
            spare = options.max_width - sum(words) - (1 + 2 * padding) * len(words) - 1
            spare += 0 if self.pad_edge else 2 * padding
            if spare >= 0:
                self.padding = (0, padding)
                for column, word, line in sorted(
                    zip(self.columns, words, lines, strict=True), key=lambda each: each[2] - each[1]
                ):
                    column.width = min(line, word + spare)
                    spare -= column.width - word
                break
        return super().__rich_console__(console, options)


EVERY_S: Final = 30.0
WIDTH: Final = 100
DEFAULT_RECIPE: Final = "ddqn-dueling"
#   MLFLOW_EXPERIMENT_NAME  the experiment in MLflow that new runs are in. Default: dynamiccl.
EXPERIMENT: Final = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "dynamiccl"
Data = Annotated[Path, typer.Option(help="Data directory of dynamiccl-collect.")]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]
stdout = Console()
stderr = Console(stderr=True)


def wide_stdout() -> Console:
    """Stdout for tables, wide enough where it is no terminal."""
    return stdout if stdout.is_terminal else Console(width=max(stdout.width, WIDTH))


def tell(console: Console, text: str) -> None:
    """Print what may be copied, neither folded nor coloured."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def tell_result(document: object, text: str, *, as_json: bool) -> None:
    """Print a command's result on stdout: in words, or as JSON."""
    if as_json:
        cli.print_json(document)
    else:
        tell(stdout, text)


def folding_table(*heads: str, title: str | None = None) -> Table:
    """A table that folds cells."""
    table = WordTable(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold")
    return table


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[int, int, dict[str, float]], None]]:
    """A bar of steps or tables on a terminal; yields the callback for each epoch."""
    with open_bar(progress.TextColumn("{task.fields[note]}")) as bar:
        task = bar.add_task(name, total=None, note="")

        def show(step: int, total: int, metrics: dict[str, float]) -> None:
            note = ""
            if "validation_regret" in metrics:
                note = f"validation regret {metrics['validation_regret']:.2%}"
            bar.update(task, completed=step, total=total, note=note)

        yield show


class _Bar(Progress):
    _said = 0.0

    def start(self) -> None:
        self._said = time.monotonic()
        super().start()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        now = time.monotonic()
        if self.disable and now - self._said >= EVERY_S:
            self._said = now
            task = self._tasks[task_id]
            total = "" if task.total is None else f" of {task.total:,.0f}"
            note = f", {task.fields['note']}" if task.fields.get("note") else ""
            words = f"{task.description}: {task.completed:,.0f}{total}{note}"
            stderr.print(words, soft_wrap=True, highlight=False, markup=False)


def open_bar(*more: progress.ProgressColumn) -> Progress:
    """A progress bar for terminals, with `more` columns."""
    return _Bar(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        *more,
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    )
