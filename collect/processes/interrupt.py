"""Ctrl-C in two levels: first finish the running trial, then stop at once.

A benchmark runs in a session of its own, so that a terminal's Ctrl-C reaches only this process,
which then decides. The signals that Slurm sends before a time limit or preemption (SIGUSR1,
SIGTERM) are handled as the first level.
"""

import logging
import signal
from types import FrameType
from typing import Any, Final, Self

_log = logging.getLogger(__name__)

#: Signals that ask for an end; SIGUSR1 is what our batch script has Slurm send before the limit.
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupt:
    """Handles the signals that end a run, as a context manager; in the main thread only.

    The first signal sets `requested`: finish the running trial, start nothing more. A second Ctrl-C
    sets `forced`: code that waits calls `check`, and a running process is killed. A third one
    raises KeyboardInterrupt at once, wherever the program is.
    """

    def __init__(self) -> None:
        self.requested = False
        self.forced = False
        #: Name of the first signal; empty before it.
        self.cause = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def check(self) -> None:
        """Raise KeyboardInterrupt when the user wants to stop at once."""
        if self.forced:
            raise KeyboardInterrupt

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if self.forced and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested:
            # A batch job gets SIGUSR1 and then SIGTERM, at times twice: only a person insists.
            self.forced |= number == signal.SIGINT
            return
        self.requested = True
        self.cause = signal.Signals(number).name
        _log.warning("%s: stopping after the running trial; Ctrl-C to stop at once", self.cause)
