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
from dynamiccl.collect.strategies import Outcome
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


class SweepProgress:
    """A progress bar on a terminal, silent elsewhere; a context manager."""

    def __init__(
        self,
        name: str,
        console: Console | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """The bar of sweep `name`; `stopping` tells whether to stop after the running launch."""
        self.stopping = stopping
        self._failed = 0
        #: By task: the least time of NCCL's default, that of a config, and the gain of the config.
        self._default: dict[tuple[Setting, int], float] = {}
        self._fastest: dict[tuple[Setting, int], tuple[float, Trial]] = {}
        self._gains: dict[tuple[Setting, int], tuple[float, Trial]] = {}
        self._bar = _Bar(
            *_COLUMNS,
            line=self.best,
            console=console,
            transient=True,
            disable=console is None or not console.is_terminal,
            expand=True,
        )
        self._task = self._bar.add_task(name, total=None, failed=0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def expect(self, trials: int) -> None:
        """Set the number of trials in all, as far as known."""
        self._bar.update(self._task, total=trials)

    def advance(self, trials: int) -> None:
        """Add trials that are done."""
        self._bar.advance(self._task, trials)

    def outcome(self, trial: Trial, outcome: Outcome) -> None:
        """Count a failure, or update the best gain."""
        time_us = outcome.time_us
        if time_us is None:
            self._failed += outcome.failed
        elif trial.config == ABSTAIN:
            self._default[trial.task] = min(time_us, self._default.get(trial.task, math.inf))
        elif time_us < self._fastest.get(trial.task, (math.inf, trial))[0]:
            self._fastest[trial.task] = (time_us, trial)
        if trial.task in self._default and trial.task in self._fastest:
            fastest_us, fastest = self._fastest[trial.task]
            self._gains[trial.task] = (self._default[trial.task] / fastest_us, fastest)
        self._bar.update(self._task, failed=self._failed)

    def best(self) -> str:
        """The task with the largest gain so far, in one line; empty without any."""
        # A copy: the thread that draws asks while times come in.
        gains = list(self._gains.values())
        if not gains:
            return ""
        gain, trial = max(gains, key=lambda found: found[0])
        return f"best {gain:.2f}x: {trial.key}" if gain > 1 else "default is best so far"
