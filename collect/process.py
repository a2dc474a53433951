"""Runs a program in a session of its own: follows its lines within limits, ends all of it, Ctrl-C.

In a session of its own a terminal's Ctrl-C does not reach the program, but only us, who then
decide (`Interrupt`). To end it, a signal goes to the leader's process group first, since srun and
mpirun end their ranks on other nodes when asked. What is left after that is killed by session:
mpirun gives each local rank a group of its own.
"""

import logging
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final, Self

from dynamiccl.collect.launchers import Command
from dynamiccl.errors import MachineError

_log = logging.getLogger(__name__)

#: Seconds between looks at the clock, the leader and the interrupt while no output comes.
_LOOK_S: Final = 0.05
#: The same at what is about to end: processes, and a leader whose output is closed.
_SHORT_LOOK_S: Final = 0.005
#: Seconds that output may still come after the leader's end, from a child that holds the pipe.
_LINGER_S: Final = 0.5
#: Seconds that the kernel may take to end what got SIGKILL, before we stop waiting.
_KILLED_S: Final = 5.0
_CHUNK_BYTES: Final = 1 << 16
#: Lines of output that are kept; the callback sees all of them.
KEPT_LINES: Final = 200_000
#: Bytes of a line that are kept; a runaway log must not fill our memory.
MAX_LINE_BYTES: Final = 1 << 20


class Interrupt:
    """Handles the signals that end a run, as a context manager; in the main thread only.

    The first signal sets `requested`: finish the running trial, start nothing more. Those that
    Slurm sends before a time limit or preemption (SIGUSR1, SIGTERM) do no more than that. A second
    Ctrl-C sets `forced`: code that waits calls `check`, and a running process is killed. A third
    one raises KeyboardInterrupt at once, wherever the program is.
    """

    def __init__(self) -> None:
        self.requested = False
        self.forced = False
        #: Name of the first signal; empty before it.
        self.cause = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
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


@dataclass(frozen=True, slots=True)
class Line:
    """One line of output, without its end."""

    text: str
    #: When its end arrived, in seconds since the epoch.
    arrived_s: float


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
    leader = start_session(command, subprocess.PIPE)
    started = time.monotonic()
    assert leader.stdout is not None
    with leader.stdout as pipe:
        output = LineReader(pipe, on_line)
        try:
            reason = _follow(leader, output, limits, interrupt)
            if reason is None:
                # A child of the leader may hold the pipe open for ever.
                output.drain(_LINGER_S)
                _end_what_is_left(leader, limits.grace_s)
            else:
                end_session(leader, limits.grace_s, meanwhile=output.read)
            output.drain(0.0)
            output.finish()
        except BaseException:
            end_session(leader, limits.grace_s, meanwhile=output.next_chunk)
            raise
    returncode = leader.returncode if reason is None else None
    return Finished(returncode, reason, tuple(output.lines), time.monotonic() - started)


def start_session(
    command: Command, output: int | IO[bytes], *, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a command as leader of a new session, with stdout and stderr together in `output`.

    Raises:
        MachineError: the program is not there or cannot be executed.
    """
    kept = {name: value for name, value in os.environ.items() if name not in command.unset}
    try:
        return subprocess.Popen(
            command.argv,
            env={**kept, **command.env},
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise MachineError(
            f"cannot start '{command.argv[0]}': {error.strerror}; install it, or correct its path "
            f"(whole command: {command.text})"
        ) from error


def end_session(
    leader: subprocess.Popen[bytes], grace_s: float, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """End the whole session: SIGTERM to its group, after `grace_s` seconds SIGKILL to all of it.

    Args:
        leader: started by `start_session`, not yet waited for; it is reaped here.
        grace_s: seconds for srun or mpirun to end ranks on other nodes.
        meanwhile: called while waiting, e.g. to read output that would block the leader.

    An exception meanwhile (a third Ctrl-C) cuts the grace short.
    """
    if leader.returncode is not None:
        return  # reaped: its number may be somebody else's by now
    try:
        _end_members(leader.pid, grace_s, meanwhile)
    finally:
        leader.wait()


def _end_what_is_left(leader: subprocess.Popen[bytes], grace_s: float) -> None:
    """Reap a leader that has ended by itself, and end what it left running in its group."""
    leader.wait()
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, 0)
        if left := _members(leader.pid):
            _log.warning("process %d ended but left %s running: ending them", leader.pid, left)
            _end_members(leader.pid, grace_s, lambda: None)


def _end_members(session: int, grace_s: float, meanwhile: Callable[[], object]) -> None:
    try:
        # What has ended between our look and now is what we want; so below.
        with suppress(ProcessLookupError):
            os.killpg(session, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while _members(session) and time.monotonic() < deadline:
            meanwhile()
            time.sleep(_SHORT_LOOK_S)
    finally:
        # Again and again, since a process may start another one between our look and its end.
        deadline = time.monotonic() + _KILLED_S
        while (members := _members(session)) and time.monotonic() < deadline:
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_SHORT_LOOK_S)


def _has_ended(leader: subprocess.Popen[bytes]) -> bool:
    # Without reaping it: so its number stays its own until all of its session has ended.
    return os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _members(session: int) -> list[int]:
    """Living processes of a session, from /proc/PID/stat (proc(5): fields 3 state, 6 session)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended since we listed it
        # The name stands in brackets and may hold spaces and brackets itself.
        fields = text[text.rindex(b")") + 2 :].split()
        if int(fields[3]) == session and fields[0] not in {b"Z", b"X"}:
            found.append(int(entry.name))
    return found


def _follow(
    leader: subprocess.Popen[bytes],
    output: "LineReader",
    limits: Limits,
    interrupt: Interrupt | None,
) -> StopReason | None:
    """Read until the program ends (None), hangs or is interrupted."""
    reason = StopReason.STARTUP
    deadline = time.monotonic() + limits.startup_s + limits.more_s()
    while not _has_ended(leader):
        output.read(_LOOK_S)
        if output.progressed:
            output.progressed, reason = False, StopReason.STALLED
            deadline = time.monotonic() + limits.stall_s + limits.more_s()
        if interrupt is not None:
            interrupt.check()
        if time.monotonic() >= deadline:
            return reason
    return None


class LineReader:
    """Reads a pipe without blocking for long, and hands on its lines.

    Bytes that are no UTF-8 become U+FFFD. What a line has beyond `max_bytes` is dropped and
    counted.
    """

    def __init__(
        self, pipe: IO[bytes], on_line: Callable[[Line], bool], max_bytes: int = MAX_LINE_BYTES
    ) -> None:
        """Hand lines of the pipe to `on_line`, which returns whether one is progress."""
        self.lines: deque[Line] = deque(maxlen=KEPT_LINES)
        self.progressed = False
        self._pipe = pipe
        self._on_line = on_line
        self._max = max_bytes
        self._kept, self._dropped = bytearray(), 0
        self._is_open = True
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)

    def next_chunk(self, wait_s: float = 0.0) -> bytes:
        """What arrives within so many seconds; empty where nothing does."""
        if not self._is_open:
            # Most programs end right after their output does.
            time.sleep(min(wait_s, _SHORT_LOOK_S))
            return b""
        if not self._poll.poll(1000 * wait_s):
            return b""
        chunk = os.read(self._pipe.fileno(), _CHUNK_BYTES)
        self._is_open = bool(chunk)
        return chunk

    def read(self, wait_s: float = 0.0) -> bool:
        """Hand on the lines that the next chunk completes; returns whether there was one."""
        chunk = self.next_chunk(wait_s)
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            self._keep(end)
            self._end_line()
        self._keep(rest)
        return bool(chunk)

    def drain(self, wait_s: float) -> None:
        """Read for a moment, as long as something arrives each `wait_s` seconds."""
        deadline = time.monotonic() + _LINGER_S
        while self.read(wait_s) and time.monotonic() < deadline:
            pass

    def finish(self) -> None:
        """Hand on a last line without newline."""
        if self._kept or self._dropped:
            self._end_line()

    def _keep(self, piece: bytes) -> None:
        kept = piece[: self._max - len(self._kept)]
        self._kept += kept
        self._dropped += len(piece) - len(kept)

    def _end_line(self) -> None:
        # A pseudo-terminal (srun --unbuffered) ends lines with a carriage return too.
        text = self._kept.removesuffix(b"\r").decode(errors="replace")
        if self._dropped:
            text += f" [{self._dropped} more bytes]"
        self._kept, self._dropped = bytearray(), 0
        line = Line(text, time.time())
        self.lines.append(line)
        self.progressed |= self._on_line(line)
