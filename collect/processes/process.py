"""Runs a program in a session of its own: line by line, within time limits."""

import logging
import os
import select
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, Final

from dynamiccl.collect.launchers.job import Command
from dynamiccl.collect.processes import process_group
from dynamiccl.collect.processes.interrupt import Interrupt
from dynamiccl.collect.processes.output_lines import Line, LineSplitter

_log = logging.getLogger(__name__)

#: Seconds between looks at the clock, the leader and the interrupt while no output comes.
_LOOK_S: Final = 0.05
_SHORTEST_LOOK_S: Final = 0.0005
#: Seconds that output may still come after the leader's end, from a child that holds the pipe.
_LINGER_S: Final = 0.5
_CHUNK_BYTES: Final = 1 << 16
#: Lines of output that are kept; the callback sees all of them.
KEPT_LINES: Final = 200_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Timeouts after which a program counts as hung, in seconds."""

    #: Until the first line that counts as progress.
    startup_s: float
    #: Between two lines that count as progress.
    stall_s: float
    #: Between SIGTERM and SIGKILL, for srun or mpirun to end ranks on other nodes.
    grace_s: float = 5.0
    #: What the next step may take on top of both, asked at the start and after each progress.
    more_s: Callable[[], float] = lambda: 0.0


class StopReason(StrEnum):
    """Why we ended a program."""

    STARTUP = "startup"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True)
class Finished:
    """Exit status, output and stop reason of a program."""

    #: As a shell counts: negative = ended by that signal; None = ended by us.
    returncode: int | None
    #: Why it was ended by us; None = it ended by itself.
    reason: StopReason | None
    #: The last `KEPT_LINES` lines.
    lines: tuple[Line, ...]
    seconds: float

    @property
    def output(self) -> str:
        """The lines as one text."""
        return "".join(f"{line.text}\n" for line in self.lines)


def run_process(
    command: Command,
    limits: Limits,
    on_line: Callable[[Line], bool] = lambda _: True,
    interrupt: Interrupt | None = None,
) -> Finished:
    """Run a program to its end, or end it with all its children when it hangs.

    Args:
        command: what to start.
        limits: when it counts as hung.
        on_line: called with every line of stdout and stderr; returns whether it is progress.
        interrupt: ends the program on a second Ctrl-C.

    Raises:
        KeyboardInterrupt: a second Ctrl-C came; no process of the program is left.
        MachineError: the program cannot be started.
    """
    leader = process_group.start(command, subprocess.PIPE)
    started = time.monotonic()
    assert leader.stdout is not None
    with leader.stdout as pipe:
        reader = _Reader(pipe, on_line)
        try:
            reason = _follow(leader, reader, _Clock(limits, started), interrupt)
            if reason is None:
                process_group.end_leftovers(leader, limits.grace_s)
            else:
                process_group.end(leader, limits.grace_s, meanwhile=reader.read)
            reader.finish()
        except BaseException:
            process_group.end(leader, limits.grace_s, meanwhile=reader.discard)
            raise
    returncode = leader.returncode if reason is None else None
    return Finished(returncode, reason, tuple(reader.lines), time.monotonic() - started)


class _Clock:
    """Decides when a program counts as hung."""

    def __init__(self, limits: Limits, started: float) -> None:
        self._limits = limits
        self._reason = StopReason.STARTUP
        self._deadline = started + limits.startup_s + limits.more_s()

    def progress(self) -> None:
        self._reason = StopReason.STALLED
        self._deadline = time.monotonic() + self._limits.stall_s + self._limits.more_s()

    def overdue(self) -> StopReason | None:
        return self._reason if time.monotonic() >= self._deadline else None


class _Reader:
    """Reads a pipe without blocking, and hands on its lines."""

    def __init__(self, pipe: IO[bytes], on_line: Callable[[Line], bool]) -> None:
        self.lines: deque[Line] = deque(maxlen=KEPT_LINES)
        self.open = True
        self.progressed = False
        self._descriptor = pipe.fileno()
        self._on_line = on_line
        self._splitter = LineSplitter()
        self._idle_s = _SHORTEST_LOOK_S
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        os.set_blocking(self._descriptor, False)

    def wait(self) -> None:
        """Wait, at most a moment, until there is something to read."""
        if self.open:
            self._poll.poll(_LOOK_S * 1000)
            return
        # Most programs end right after their output does: look soon, then less and less often.
        time.sleep(self._idle_s)
        self._idle_s = min(2 * self._idle_s, _LOOK_S)

    def read(self) -> bool:
        """Read one chunk if there is one; returns whether there was."""
        chunk = self._chunk()
        self._hand_on(self._splitter.feed(chunk, time.time()))
        return bool(chunk)

    def discard(self) -> None:
        """Read one chunk and discard it."""
        self._chunk()

    def finish(self) -> None:
        """Read what is left, for at most a moment, and a last line without newline."""
        deadline = time.monotonic() + _LINGER_S
        while self.read() and time.monotonic() < deadline:
            pass
        self._hand_on(self._splitter.close(time.time()))

    def _chunk(self) -> bytes:
        if not self.open:
            return b""
        try:
            chunk = os.read(self._descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return b""
        self.open = bool(chunk)
        return chunk

    def _hand_on(self, lines: list[Line]) -> None:
        for line in lines:
            self.lines.append(line)
            self.progressed |= self._on_line(line)


def _follow(
    leader: subprocess.Popen[bytes], reader: _Reader, clock: _Clock, interrupt: Interrupt | None
) -> StopReason | None:
    """Read until the program ends (None), hangs or is interrupted."""
    while not process_group.has_ended(leader):
        reader.wait()
        reader.read()
        if reader.progressed:
            reader.progressed = False
            clock.progress()
        if interrupt is not None:
            interrupt.check()
        overdue = clock.overdue()
        if overdue is not None:
            return overdue
    # What the leader wrote is in the pipe; a child of it may hold the pipe open for ever.
    deadline = time.monotonic() + _LINGER_S
    while reader.open and time.monotonic() < deadline:
        reader.wait()
        reader.read()
    return None
