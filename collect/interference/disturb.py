"""Starts interference beside a trial, waits until it is under way, and ends it afterwards.

The caller supplies two functions: `start` takes an argument vector, runs it on every node of the
trial (or, for traffic, as ranks of its own), and returns an object like `subprocess.Popen` with a
pipe for its output; `end` ends it with all processes that it started.
"""

import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, Any, Final, Protocol, TypeVar

from dynamiccl.collect.interference.kinds import MODULES, REAL
from dynamiccl.collect.interference.traffic import Traffic, is_under_way, traffic_argv
from dynamiccl.collect.telemetry.companion import HELLO
from dynamiccl.datasets.schema import QUIET
from dynamiccl.errors import MachineError, UnknownName, UserError

#: A launcher may label each line with its rank.
_READY: Final = re.compile(r"(?:^|[\s:>\]])ready$")
#: Importing torch from a slow disk takes a minute, and so does NCCL's start on many nodes.
READY_S: Final = 300.0
_KEPT_LINES: Final = 20
_END_S: Final = 10.0


class Process(Protocol):
    """The part of `subprocess.Popen` that is used here."""

    @property
    def stdin(self) -> IO[Any] | None:
        """Takes companion.HELLO, so that the process ends when we are killed; None = it cannot."""

    @property
    def stdout(self) -> IO[Any] | None:
        """Its output, as text or bytes; standard error included."""

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status; raises subprocess.TimeoutExpired."""


P = TypeVar("P", bound=Process)


def end_one(process: Process) -> None:
    """SIGTERM, then SIGKILL after a timeout; for whole sessions use `process.end_session`."""
    process.terminate()
    try:
        process.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def argv_for(kind: str, level: float, traffic: Traffic | None = None) -> list[str]:
    """Argument vector of a disturbance (pure).

    `level` is a share above 0 and at most 1: of the cores (cpu), of the time (gemm), of the
    channels (traffic). Raises UnknownName for a kind that is no process, and UserError for another
    level.
    """
    if kind not in REAL:
        raise UnknownName("interference", kind, REAL, where="a sweep of real processes")
    if not 0 < level <= 1:
        raise UserError(f"the level of '{kind}' is {level:g}; give a share above 0 and at most 1")
    if kind == "traffic":
        if traffic is None:
            raise ValueError("traffic needs to know its binary and devices")
        return traffic_argv(traffic, level)
    return [sys.executable, "-m", MODULES[kind], "--level", f"{level:g}"]


class Disturbance:
    """A running interference process, or none."""

    def __init__(self, kind: str, process: Process | None = None) -> None:
        """Take the process; its output is read from now on, so that it never blocks on a pipe."""
        self.kind = kind
        self._process = process
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._is_ready = is_under_way if kind == "traffic" else _says_ready
        self._ready = 0
        self._heard = threading.Condition()
        self._mute = False
        output = None if process is None else process.stdout
        if process is not None and output is None:
            raise ValueError("start() must return a process with a pipe as stdout")
        self._reader = threading.Thread(target=self._read, args=(output,), daemon=True)
        self._reader.start()

    @property
    def lost(self) -> str | None:
        """Why it ended before it was told to; None while it runs.

        Ask after a trial: what was measured after it ended was measured without interference.
        """
        if self._process is None or (status := self._process.poll()) is None:
            return None
        return f"interference '{self.kind}' ended with status {status}; {self._last_words()}"

    def greet(self) -> None:
        """Write HELLO to its standard input, so that it ends when we do."""
        if self._process is not None and self._process.stdin is not None:
            # One that has ended already is seen, with its reason, when it does not get ready.
            with suppress(BrokenPipeError):
                self._process.stdin.write(HELLO)
                self._process.stdin.flush()

    def close(self) -> None:
        """Close our ends of the pipes of a process that has ended."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        # A process that it left behind may hold the pipe open: then the thread stays with it.
        self._reader.join(timeout=_END_S)

    def await_ready(self, count: int, timeout_s: float) -> None:
        """Return when `count` processes said that they are under way; raises MachineError."""
        with self._heard:
            self._heard.wait_for(lambda: self._ready >= count or self._mute, timeout_s)
            if self._ready >= count:
                return
        if self._process is not None and self._mute:
            # It closed its output: it is ending, and its status says why.
            self._process.wait(timeout=_END_S)
        raise MachineError(
            self.lost
            or f"interference '{self.kind}' was not ready after {timeout_s:g} s ({self._ready} of "
            f"{count} processes were); {self._last_words()}"
        )

    def _last_words(self) -> str:
        return f"its last output: {' | '.join(self._lines) or 'none'}"

    def _read(self, output: IO[Any] | None) -> None:
        with output or nullcontext(()) as lines:
            try:
                for raw in lines:
                    self._hear(raw if isinstance(raw, str) else raw.decode(errors="replace"))
            except ValueError:
                # Whoever ended the process may close its pipe under us: then nothing more comes.
                if output is None or not output.closed:
                    raise
        with self._heard:
            self._mute = True
            self._heard.notify_all()

    def _hear(self, line: str) -> None:
        with self._heard:
            self._lines.append(line.rstrip())
            self._ready += self._is_ready(line.rstrip())
            self._heard.notify_all()


def _says_ready(line: str) -> bool:
    return _READY.search(line) is not None


@contextmanager
def disturb(
    kind: str,
    level: float,
    start: Callable[[list[str]], P],
    *,
    end: Callable[[P], object] = end_one,
    nodes: int = 1,
    traffic: Traffic | None = None,
) -> Iterator[Disturbance]:
    """Disturb what runs inside the `with`; kind 'none' does nothing.

    Args:
        kind: 'none', or one of `kinds.REAL`.
        level: see `argv_for`.
        start: starts an argument vector wherever the trial runs.
        end: ends what `start` returned, and waits for it.
        nodes: how many processes of ours `start` begins, all of which must get ready (traffic
            prints for all its ranks together).
        traffic: what 'traffic' runs.

    Raises:
        MachineError: it was not ready within READY_S. When it ends too early nothing is raised: ask
            `Disturbance.lost`.
        UnknownName, UserError: see `argv_for`.
    """
    if kind == QUIET:
        yield Disturbance(kind)
        return
    process = start(argv_for(kind, level, traffic))
    try:
        disturbance = Disturbance(kind, process)
    except BaseException:
        end(process)
        raise
    try:
        disturbance.greet()
        disturbance.await_ready(1 if kind == "traffic" else nodes, READY_S)
        yield disturbance
    finally:
        end(process)
        disturbance.close()
