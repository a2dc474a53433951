"""The arbiter of a job, as dynamiccl-run starts it, and what may stand between it and the ranks."""

import os
import re
import secrets
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from dynamiccl.serve.build import SOURCE_DIR
from tests.serve.jobs.play import clean_environment
from tests.serve.jobs.setting import KEY


def bytes_of(message: str) -> int:
    """The size of a message, as its header states it."""
    text = (SOURCE_DIR / "agree" / "vote.h").read_text(encoding="utf-8")
    found = re.search(rf"sizeof\({message}\) == (\d+)", text)
    assert found is not None
    return int(found[1])


VOTE_BYTES: Final = bytes_of("Vote")
REPLY_BYTES: Final = bytes_of("Reply")
#: Where their kinds lie.
VOTE_KIND: Final = 116
REPLY_KIND: Final = 4
VOTES: Final = {1: "vote", 2: "confirm", 3: "recall"}
REPLIES: Final = {1: "still there?", 2: "table", 3: "abstain", 4: "stranger"}


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
        until = time.monotonic() + 10
        while "DYNAMICCL_KILL_FILE" in self._variables and not self._has_looked():
            assert time.monotonic() < until, "its leader has not looked for the kill file"
            time.sleep(0.01)
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
        parents = {}
        mark = self._variables["ARBITER_OF_TEST"].encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes():
                    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                    if state != "Z":
                        parents[int(folder.name)] = int(parent)
        return sorted(parents, key=lambda pid: parents[pid] in parents)

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


def processes_of(program: str) -> list[int]:
    """The living processes of an arbiter's program, sorted."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if (folder / "cmdline").read_bytes().startswith(program.encode() + b"\0"):
                found.append(int(folder.name))
    return sorted(found)


def is_gone(program: str, limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while processes_of(program) and time.monotonic() < until:
        time.sleep(0.02)
    return not processes_of(program)


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class Between:
    """A proxy before an arbiter: hands on whole messages, until something happens at one of them.

    `then` is called before the first message of the kind `when` is handed on, or at once. It may
    `disturb` what comes from there on.
    """

    def __init__(self, port: int, then: Callable[["Between"], object], when: str = "") -> None:
        self._to, self._then, self._when = port, then, when
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        #: How many messages of each kind were handed on.
        self.passed = dict.fromkeys([*VOTES.values(), *REPLIES.values()], 0)
        self._lock = threading.Lock()
        self._how, self._until = "", 0.0
        self._is_over = False
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Self:
        if not self._when:
            self._then(self)
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def disturb(self, how: str, seconds: float = 600) -> None:
        """`close` what is connected and each new connection, or `swallow` all messages."""
        self._how, self._until = how, time.monotonic() + seconds

    def _does(self, how: str) -> bool:
        return self._how == how and time.monotonic() < self._until

    def _accept(self) -> None:
        while not self._is_over:
            if select.select([self._listener], [], [], 0.05)[0]:
                rank, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(rank,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, rank: socket.socket) -> None:
        with rank, socket.socket() as arbiter, suppress(OSError):
            if self._does("close"):
                return
            arbiter.settimeout(5)
            arbiter.connect(("127.0.0.1", self._to))
            while not self._is_over:
                for side in select.select([rank, arbiter], [], [], 0.02)[0]:
                    size = VOTE_BYTES if side is rank else REPLY_BYTES
                    message = side.recv(size, socket.MSG_WAITALL)
                    if len(message) < size:
                        return
                    self._hand_on(message, arbiter if side is rank else rank)
                if self._does("close"):
                    return

    def _hand_on(self, message: bytes, to: socket.socket) -> None:
        is_vote = len(message) == VOTE_BYTES
        kind = VOTES[message[VOTE_KIND]] if is_vote else REPLIES[message[REPLY_KIND]]
        with self._lock:
            if kind == self._when:
                self._when = ""
                self._then(self)
            if self._does("swallow") or self._does("close"):
                return
            to.sendall(message)
            self.passed[kind] += 1
