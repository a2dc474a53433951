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
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final, Self

from dynamiccl.collect.launchers import Command
from dynamiccl.errors import MachineError

_log = logging.getLogger(__name__)

#: Seconds between looks at the clock, the leader and the interrupt while no output comes, and at
#: what is about to end.
_LOOK_S: Final = 0.05
_SHORT_LOOK_S: Final = 0.005
#: Seconds that output may still come after the leader's end, from a child that holds the pipe.
_LINGER_S: Final = 0.5
#: Seconds that the kernel may take to end what got SIGKILL, before we stop waiting.
_KILLED_S: Final = 5.0
#: Lines of output that are kept; the callback sees all of them.
KEPT_LINES: Final = 200_000
#: A longer line is handed on in pieces: a runaway log must not fill our memory.
MAX_LINE_BYTES: Final = 1 << 20

#: Takes a line without its end and when it arrived, in seconds since the epoch; tells whether it is
#: progress.
OnLine = Callable[[str, float], bool]


class Interrupt:
    """Handles the signals that end a run, as a context manager; in the main thread only.

    The first signal sets `requested`: finish the running trial, start nothing more. Those that
    Slurm sends before a time limit or preemption (SIGUSR1, SIGTERM) do no more than that. A second
    Ctrl-C sets `forced`: code that waits calls `check`, and a running process is killed. A third
    one raises KeyboardInterrupt at once, wherever the program is.
    """

    def __init__(self) -> None:
        self.requested = self.forced = False
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


@dataclass(frozen=True, slots=True)
class Finished:
    """Exit status and output of a program."""

    #: As a shell counts: negative = ended by that signal; None = it hung, and we ended it.
    returncode: int | None
    #: The last `KEPT_LINES` lines.
    lines: tuple[str, ...]

    @property
    def output(self) -> str:
        """The lines as one text."""
        return "".join(f"{line}\n" for line in self.lines)


def run_process(
    command: Command,
    limits: Limits,
    on_line: OnLine = lambda *_: True,
    interrupt: Interrupt | None = None,
) -> Finished:
    """Run a program to its end, or end it with all its children when it hangs.

    `on_line` takes every line of stdout and stderr.

    Raises MachineError when the program cannot be started, and KeyboardInterrupt on a second
    Ctrl-C; then no process of the program is left.
    """
    leader = start_session(command, subprocess.PIPE)
    output = _Output(leader, on_line)
    try:
        is_hung = _follow(leader, output, limits, interrupt)
        if not is_hung:
            output.hand_on(_LINGER_S)
        # Whether it ended by itself or not: what it left running, too.
        end_session(leader, limits.grace_s, meanwhile=output.hand_on)
        output.hand_on(_LINGER_S)
    except BaseException:
        end_session(leader, limits.grace_s)
        raise
    finally:
        output.pipe.close()
    return Finished(None if is_hung else leader.returncode, tuple(output.lines))


def start_session(
    command: Command, output: int | IO[bytes], *, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a command as leader of a new session, with stdout and stderr together in `output`.

    Raises MachineError when the program is not there or cannot be executed.
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

    The leader is reaped here. `meanwhile` is called while waiting, e.g. to read output that would
    block the leader. An exception meanwhile (a third Ctrl-C) cuts the grace short.
    """
    if leader.returncode is not None:
        return  # reaped: its number may be somebody else's by now
    try:
        # What has ended between our look and now is what we want; so below.
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while _members(leader.pid) and time.monotonic() < deadline:
            meanwhile()
            time.sleep(_SHORT_LOOK_S)
    finally:
        # Again and again, since a process may start another one between our look and its end.
        deadline = time.monotonic() + _KILLED_S
        while (members := _members(leader.pid)) and time.monotonic() < deadline:
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_SHORT_LOOK_S)
        leader.wait()


def _has_ended(leader: subprocess.Popen[bytes]) -> bool:
    # Without reaping it: so its number stays its own until all of its session has ended.
    return os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _members(session: int) -> list[int]:
    """Living processes of a session, from /proc/PID/stat (proc(5): fields 3 state, 6 session)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
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
    leader: subprocess.Popen[bytes], output: "_Output", limits: Limits, interrupt: Interrupt | None
) -> bool:
    """Read until the program ends or is interrupted; returns True when it hangs."""
    deadline = time.monotonic() + limits.startup_s + limits.more_s()
    while not _has_ended(leader):
        output.hand_on(_LOOK_S)
        if output.progressed:
            output.progressed = False
            deadline = time.monotonic() + limits.stall_s + limits.more_s()
        if interrupt is not None:
            interrupt.check()
        if time.monotonic() >= deadline:
            return True
    return False


class _Output:
    """Hands on the lines of a program, whose pipe somebody that it left behind may hold open."""

    def __init__(self, leader: subprocess.Popen[bytes], on_line: OnLine) -> None:
        assert leader.stdout is not None
        self.pipe = leader.stdout
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.progressed = False
        self._on_line = on_line
        #: Of the line that has no end yet.
        self._rest = b""

    def hand_on(self, wait_s: float = _SHORT_LOOK_S) -> None:
        """Hand on the lines that arrive within so many seconds; returns early after the last."""
        deadline = time.monotonic() + wait_s
        while (left_s := deadline - time.monotonic()) > 0:
            if not select.select([self.pipe], [], [], left_s)[0]:
                return
            read = os.read(self.pipe.fileno(), MAX_LINE_BYTES)
            *whole, self._rest = (self._rest + read).split(b"\n")
            if self._rest and (not read or len(self._rest) > MAX_LINE_BYTES):
                whole, self._rest = [*whole, self._rest], b""
            for raw in whole:
                self._take(raw)
            if not read:
                time.sleep(min(left_s, _SHORT_LOOK_S))
                return

    def _take(self, raw: bytes) -> None:
        # A pseudo-terminal (srun --unbuffered) ends lines with a carriage return too.
        text = raw.removesuffix(b"\r").decode(errors="replace")
        self.lines.append(text)
        self.progressed |= self._on_line(text, time.time())
