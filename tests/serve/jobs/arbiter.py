"""The arbiter of a job, as dynamiccl-run starts it, and what may stand between it and the ranks."""

import os
import random
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from tests.cluster.slurm import wait_until
from tests.serve.jobs.play import clean_environment
from tests.serve.jobs.setting import KEY, Setting

#: As agree/vote.h asserts them.
VOTE_BYTES: Final = 240
REPLY_BYTES: Final = 216
#: Where their kinds lie.
VOTE_KIND: Final = 116
REPLY_KIND: Final = 4
VOTES: Final = {1: "vote", 2: "confirm", 3: "recall"}
REPLIES: Final = {1: "still there?", 2: "table", 3: "abstain", 4: "stranger"}
#: Where sanitizers report what they find in the arbiter.
REPORT: Final = "arbiter-report"
#: All limits of agree/vote.h are a tenth: what stops and cuts of a job may last is 30 s.
LIMIT_MS: Final = 1000
#: Often enough for a job of a second; on a busy machine ranks wait longer than a job may afford.
OFTEN: Final = {
    "DYNAMICCL_LOOK_INTERVAL_S": "0.05",
    "DYNAMICCL_PROBE_CALLS": "200",
    "DYNAMICCL_STOP_PERCENT": "100",
    "DYNAMICCL_TEST_LIMIT_MS": str(LIMIT_MS),
}


class Arbiter:
    """A keeper and a worker, which end with this block."""

    def __init__(
        self,
        program: Sequence[str],
        job: str,
        limit_ms: int,
        leader: Mapping[str, str] | None = None,
    ) -> None:
        self._program = program
        #: The process with which it ends.
        self.ends_with = os.getpid()
        self._variables = dict(leader or {}) | {
            "DYNAMICCL_JOB": job,
            "DYNAMICCL_KEY": KEY,
            "DYNAMICCL_TEST_LIMIT_MS": str(limit_ms),
            "ARBITER_OF_TEST": secrets.token_hex(8),
        }

    def __enter__(self) -> Self:
        started = subprocess.run(
            [*self._program, "0", str(self.ends_with)],
            env=clean_environment() | self._variables,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        self.port = int(started.stdout)
        self.address = f"127.0.0.1:{self.port}"
        # Until the leader has looked for the first time, no communicator gets a table: ranks take
        # longer to come than these, which are there at once.
        if "DYNAMICCL_KILL_FILE" in self._variables:
            wait_until(self._has_looked, "its leader looks for the kill file", 10)
        return self

    def _has_looked(self) -> bool:
        """Whether all threads of the worker sleep, one of them from one look to the next."""
        tasks = Path(f"/proc/{self.worker()}/task").glob("*/stat")
        states = [task.read_text().rpartition(")")[2].split()[0] for task in tasks]
        return len(states) > 1 and set(states) == {"S"}

    def __exit__(self, *_: object) -> None:
        while found := self.processes():
            for pid in found:
                send(pid, signal.SIGKILL)
            time.sleep(0.01)

    def processes(self) -> list[int]:
        """Keeper and worker, as far as they live."""
        mark = self._variables["ARBITER_OF_TEST"].encode()
        found = living(lambda folder: mark in (folder / "environ").read_bytes())
        return sorted(found, key=lambda pid: found[pid] in found)

    def worker(self) -> int | None:
        processes = self.processes()
        return processes[1] if len(processes) == 2 else None

    def kill_worker(self) -> None:
        for pid in self.processes()[1:]:
            send(pid, signal.SIGKILL)

    def stop_for(self, seconds: float) -> None:
        """Let both processes stand still for so long, beginning now."""
        found = self.processes()
        for pid in found:
            send(pid, signal.SIGSTOP)

        def go_on() -> None:
            for pid in found:
                send(pid, signal.SIGCONT)

        threading.Timer(seconds, go_on).start()


def living(is_sought: Callable[[Path], bool]) -> dict[int, int]:
    """Processes by what their folders under /proc say, and the parent of each."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if is_sought(folder):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    found[int(folder.name)] = int(parent)
    return found


def processes_of(program: str) -> list[int]:
    """The living processes of an arbiter's program, sorted."""
    begin = program.encode() + b"\0"
    return sorted(living(lambda folder: (folder / "cmdline").read_bytes().startswith(begin)))


def is_gone(program: str, limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while processes_of(program) and time.monotonic() < until:
        time.sleep(0.02)
    return not processes_of(program)


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class Between:
    """A proxy before an arbiter: hands on what comes, until something happens.

    `then` is called before the first message of the kind `when` is handed on, or at once; it may
    `disturb` what comes from there on. In `init`, whose messages have no bodies.

    Of the connections' directions a `share` breaks, or goes silent. `answers`: how many bytes the
    first connections are answered with; it is silent then, and on all later ones.
    """

    def __init__(
        self,
        port: int,
        then: Callable[["Between"], object] | None = None,
        when: str = "",
        *,
        seed: int = 0,
        share: float = 0,
        answers: Sequence[int] | None = None,
    ) -> None:
        self._to, self._then, self._when = ("127.0.0.1", port), then, when
        self._draw, self._share = random.Random(seed), share
        self._answers = None if answers is None else dict(enumerate(answers, 1))
        self._opened = [socket.create_server(("127.0.0.1", 0), backlog=64)]
        self.address = f"127.0.0.1:{self._opened[0].getsockname()[1]}"
        #: How many have come.
        self.num_connections = 0
        #: How many messages of each kind were handed on.
        self.passed = dict.fromkeys([*VOTES.values(), *REPLIES.values()], 0)
        self._lock = threading.Lock()
        self._how, self._until = "", 0.0
        self._thread = threading.Thread(target=self._accept)

    def __enter__(self) -> Self:
        if self._then and not self._when:
            self._then(self)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        shut(*self._opened)
        self._thread.join()
        for each in self._opened:
            each.close()

    def disturb(self, how: str, seconds: float = 600) -> None:
        """`close` what is connected and each new connection, or `swallow` all messages."""
        self._how, self._until = how, time.monotonic() + seconds
        if how == "close":
            shut(*self._opened[1:])

    def _does(self, how: str) -> bool:
        return self._how == how and time.monotonic() < self._until

    def _accept(self) -> None:
        with suppress(OSError):  # it is shut
            while True:
                near, _ = self._opened[0].accept()
                self._opened.append(near)
                self.num_connections += 1
                most = None
                if self._answers is not None:
                    most = self._answers.get(self.num_connections, 0)
                threading.Thread(target=self._join, args=(near, most), daemon=True).start()

    def _join(self, near: socket.socket, most: int | None) -> None:
        try:
            if self._does("close"):
                raise ConnectionError
            far = socket.create_connection(self._to, timeout=5)
        except OSError:
            shut(near)
            return
        far.settimeout(None)
        self._opened.append(far)
        back = threading.Thread(target=self._pump, args=(far, near, REPLY_BYTES, most), daemon=True)
        back.start()
        self._pump(near, far, VOTE_BYTES, None)

    def _pump(
        self, source: socket.socket, target: socket.socket, size: int, most: int | None
    ) -> None:
        breaks = self._draw.random() < self._share
        left = self._draw.randrange(1, 600) if breaks else 1 << 60
        is_silent = self._draw.random() < 0.5
        if most is not None:
            left, is_silent = most, True
        is_whole = self._then is not None
        with suppress(OSError):
            while left > 0:
                flags = socket.MSG_WAITALL if is_whole else 0
                part = source.recv(size if is_whole else min(left, 4096), flags)
                if len(part) < (size if is_whole else 1):
                    break
                left -= len(part)
                self._hand_on(part, target) if is_whole else target.sendall(part)
        if left > 0 or not is_silent:  # else nobody learns of it
            shut(source, target)

    def _hand_on(self, message: bytes, to: socket.socket) -> None:
        is_vote = len(message) == VOTE_BYTES
        kind = VOTES[message[VOTE_KIND]] if is_vote else REPLIES[message[REPLY_KIND]]
        with self._lock:
            if kind == self._when and self._then:
                self._when = ""
                self._then(self)
            if not (self._does("swallow") or self._does("close")):
                to.sendall(message)
                self.passed[kind] += 1


def shut(*opened: socket.socket) -> None:
    for each in opened:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def arbiter_of(build: Path, setting: Setting, **more: str) -> Arbiter:
    """As `dynamiccl-run` starts it in mode adaptive; `more` are settings of its leader."""
    given = setting.environment()
    leader = {name: given[f"DYNAMICCL_{name}"] for name in ("ARTIFACT", "SYSTEMS", "MACHINE")}
    leader["BRAIN"] = "exit 0"  # none, unless a test has one
    named = {f"DYNAMICCL_{name}": value for name, value in leader.items()}
    # It has no stderr.
    sanitizers = ("ASAN", "TSAN", "UBSAN")
    named |= {f"{name}_OPTIONS": f"log_path={setting.root}/{REPORT}" for name in sanitizers}
    return Arbiter([str(build / "dynamiccl-arbiter")], setting.job, LIMIT_MS, OFTEN | named | more)


def assert_no_report(setting: Setting) -> None:
    """That no sanitizer has found anything in its arbiters."""
    for path in setting.root.glob(f"{REPORT}.*"):
        raise AssertionError(path.read_text())


@contextmanager
def trouble_for(arbiter: Arbiter, seed: int, *, pause_s: float) -> Iterator[None]:
    """Kills the worker or lets both stand still, again and again, about each `pause_s`."""
    over = threading.Event()
    draw = random.Random(seed)

    def disturb() -> None:
        while not over.wait(draw.uniform(0, 2 * pause_s)):
            if draw.random() < 0.6:
                arbiter.kill_worker()
            else:
                arbiter.stop_for(draw.uniform(0, 0.4))

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
