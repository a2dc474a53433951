"""When a process that runs beside trials must end: SIGTERM, or when its starter is gone.

It ends on SIGTERM or SIGINT, when its parent is gone, or when its standard input ends after
something came through it. Through srun and mpirun the input is the only connection to the starter
on another node: a starter that wants its programs to end with it keeps the other end of the pipe
open and writes a `HELLO` into it. An input that ends without HELLO has no meaning: srun and mpirun
pass such an input when they have none themselves.

The parent's death is detected by its process id and not by PR_SET_PDEATHSIG: that signal comes when
the *thread* that started us ends (prctl(2)), which may be a short-lived one.
"""

import os
import select
import signal
import time
from types import FrameType
from typing import Any, Final, Self

#: How often the parent is looked for, in seconds.
_LOOK_S: Final = 1.0
#: What a starter writes to say: end with me.
HELLO: Final = b"\n"
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Ending:
    """Waits for the end of this process; a context manager of the main thread.

    Python runs a signal's handler between two bytecodes, so a signal that comes just before `poll`
    could be slept through; the byte that it leaves in the pipe cannot.
    """

    def __init__(self, stdin: int = 0) -> None:
        """`stdin` is the file descriptor of standard input."""
        self._parent = os.getppid()
        self._over = False
        self._greeted = False
        self._stdin = stdin
        self._woken, self._wake = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        # A closed one answers POLLNVAL at the first look, and is dropped there.
        self._poll.register(stdin, select.POLLIN)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Install handlers for SIGTERM and SIGINT."""
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *raised: object) -> None:
        """Restore the handlers."""
        for number in _SIGNALS:
            signal.signal(number, self._before[number])
        os.close(self._woken)
        os.close(self._wake)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._over = True
        os.write(self._wake, b"x")

    def wait(self, seconds: float) -> bool:
        """Sleep so many seconds, or until the end; returns whether it has come."""
        until = time.monotonic() + seconds
        left = seconds
        while not self._over:
            self._look(min(max(left, 0.0), _LOOK_S))
            left = until - time.monotonic()
            if left <= 0:
                break
        return self._over

    def _look(self, seconds: float) -> None:
        for file, event in self._poll.poll(seconds * 1000.0):
            if file == self._stdin:
                self._listen(event)
        if os.getppid() != self._parent:
            self._over = True

    def _listen(self, event: int) -> None:
        try:
            heard = b"" if event & select.POLLNVAL else os.read(self._stdin, 4096)
        except OSError:
            heard = b""  # a terminal that is not ours to read (EIO), a directory
        if heard:
            self._greeted = True
            return
        self._over = self._over or self._greeted
        self._poll.unregister(self._stdin)
