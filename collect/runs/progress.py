"""Progress of a running sweep: done, failed, left, time left, best gain so far."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Final, Self

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.outcomes import Outcome
from dynamiccl.nccl import ABSTAIN

_COLUMNS: Final = (
    TextColumn("{task.description}"),
    BarColumn(bar_width=None),
    MofNCompleteColumn(),
    TextColumn("{task.fields[failed]} failed"),
    TimeRemainingColumn(),
)


class _Bar(Progress):
    """A progress bar with a line of text below it, computed when it is drawn."""

    def __init__(self, *columns: ProgressColumn, line: Callable[[], str], **more: Any) -> None:
        self._line = line
        super().__init__(*columns, **more)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if line := self._line():
            yield Text(line, style="dim", no_wrap=True, overflow="ellipsis")


class BestSoFar:
    """The largest gain over NCCL's default in any task so far."""

    def __init__(self) -> None:
        """Start without times."""
        self._default: dict[tuple[Setting, int], float] = {}
        self._best: dict[tuple[Setting, int], tuple[float, Trial]] = {}
        self._gains: dict[tuple[Setting, int], tuple[float, Trial]] = {}

    def add(self, trial: Trial, time_us: float) -> None:
        """Add a time of a config; the smallest counts."""
        task = trial.task
        if trial.config == ABSTAIN:
            self._default[task] = min(time_us, self._default.get(task, math.inf))
        elif time_us < self._best.get(task, (math.inf, trial))[0]:
            self._best[task] = (time_us, trial)
        if task in self._default and task in self._best:
            best_us, best = self._best[task]
            self._gains[task] = (self._default[task] / best_us, best)

    def text(self) -> str:
        """The task with the largest gain, in one line; empty without any."""
        # A copy: the thread that draws asks while times come in.
        gains = list(self._gains.values())
        if not gains:
            return ""
        gain, trial = max(gains, key=lambda found: found[0])
        return f"best {gain:.2f}x: {trial.key}" if gain > 1 else "default is best so far"


class SweepProgress:
    """A progress bar on a terminal, silent elsewhere; a context manager."""

    def __init__(self, name: str, console: Console, stopping: Callable[[], bool]) -> None:
        """`stopping` returns whether to stop."""
        shown = console.is_terminal
        self._best = BestSoFar()
        self._bar = _Bar(
            *_COLUMNS,
            line=self._best.text,
            console=console,
            transient=True,
            disable=not shown,
            expand=True,
        )
        self._task = self._bar.add_task(name, total=None, failed=0)
        self._stopping = stopping
        self._failed = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def expect(self, picks: int) -> None:
        """Set the number of picks in all, as far as known."""
        self._bar.update(self._task, total=picks)

    def advance(self, picks: int) -> None:
        """Add picks that are done."""
        self._bar.advance(self._task, picks)

    def outcome(self, trial: Trial, outcome: Outcome) -> None:
        """Count a failure, or update the best gain."""
        if outcome.time_us is not None:
            self._best.add(trial, outcome.time_us)
        elif not (outcome.ok or outcome.infeasible):
            self._failed += 1
        self._bar.update(self._task, failed=self._failed)

    def stopping(self) -> bool:
        """Whether to stop after the launch that is running."""
        return self._stopping()
