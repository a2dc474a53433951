"""The arbiter of a job in mode adaptive, and what disturbs it."""

import random
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from tests.serve.jobs.arbiter import Arbiter, send
from tests.serve.jobs.setting import Setting

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


def arbiter_of(build: Path, setting: Setting, within: Sequence[str] = (), **more: str) -> Arbiter:
    """As `dynamiccl-run` starts it in mode adaptive, `within` another command.

    `more` are settings of its leader.
    """
    given = setting.environment()
    leader = {name: given[f"DYNAMICCL_{name}"] for name in ("ARTIFACT", "SYSTEMS", "MACHINE")}
    leader["BRAIN"] = "exit 0"  # none, unless a test has one
    named = {f"DYNAMICCL_{name}": value for name, value in leader.items()}
    # It has no stderr.
    sanitizers = ("ASAN", "TSAN", "UBSAN")
    named |= {f"{name}_OPTIONS": f"log_path={setting.root}/{REPORT}" for name in sanitizers}
    program = [*within, str(build / "dynamiccl-arbiter")]
    return Arbiter(program, setting.job, LIMIT_MS, OFTEN | named | more)


def assert_no_report(setting: Setting) -> None:
    """That no sanitizer has found anything in its arbiters."""
    for path in setting.root.glob(f"{REPORT}.*"):
        raise AssertionError(path.read_text())


@contextmanager
def trouble_for(arbiter: Arbiter, seed: int, *, pause_s: float) -> Iterator[None]:
    """Kills the worker or lets it stand still, again and again, about each `pause_s`."""
    over = threading.Event()
    draw = random.Random(seed)

    def disturb() -> None:
        while not over.wait(draw.uniform(0, 2 * pause_s)):
            worker = arbiter.worker()
            if worker is None:
                continue
            if draw.random() < 0.6:
                send(worker, signal.SIGKILL)
                continue
            send(worker, signal.SIGSTOP)
            over.wait(draw.uniform(0, 0.4))
            send(worker, signal.SIGCONT)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Cutter:
    """Leads to an arbiter's port: of its connections' directions a share breaks, or goes silent.

    `answers`: how many bytes the first connections are answered with; it is silent then, and on all
    later ones.
    """

    def __init__(
        self, port: int, seed: int = 0, *, share: float = 0, answers: Sequence[int] | None = None
    ) -> None:
        self._to = ("127.0.0.1", port)
        self._draw = random.Random(seed)
        self._share = share
        self._answers = answers
        self._opened = [socket.create_server(("127.0.0.1", 0), backlog=64)]
        self.port = int(self._opened[0].getsockname()[1])
        #: How many have come.
        self.num_connections = 0
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._opened:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._opened[0].accept()
            except OSError:
                return
            self._opened.append(near)
            self.num_connections += 1
            try:
                far = socket.create_connection(self._to)
            except OSError:
                near.close()
                continue
            self._opened.append(far)
            most = None
            if self._answers is not None:
                most = dict(enumerate(self._answers, 1)).get(self.num_connections, 0)
            for pipe in ((near, far, None), (far, near, most)):
                threading.Thread(target=self._pump, args=pipe, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, most: int | None) -> None:
        breaks = self._draw.random() < self._share
        left = self._draw.randrange(1, 600) if breaks else 1 << 60
        is_silent = self._draw.random() < 0.5
        if most is not None:
            left, is_silent = most, True
        with suppress(OSError):
            while left > 0 and (part := source.recv(4096)[:left]):
                left -= len(part)
                target.sendall(part)
        if left == 0 and is_silent:
            return  # nobody learns of it
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
