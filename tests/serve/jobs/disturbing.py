"""The arbiter of a job in mode adaptive, and what disturbs it."""

import hashlib
import os
import random
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.serve.jobs.setting import NCCL_CODES, SYSTEM, Setting

#: All limits of agree/vote.h are a tenth: what stops and cuts of a job may last is 30 s.
LIMIT_MS: Final = 1000
#: What its processes have in their environment, and the ranks have not.
MARK: Final = "ARBITER_OF_TEST"
SYSTEMS: Final = " ".join(f"{code}={SYSTEM}" for code in NCCL_CODES.values())
#: Often enough for a job of a second; on a busy machine ranks wait longer than a job may afford.
OFTEN: Final = {
    "DYNAMICCL_LOOK_INTERVAL_S": "0.05",
    "DYNAMICCL_PROBE_CALLS": "200",
    "DYNAMICCL_STOP_PERCENT": "100",
    "DYNAMICCL_TEST_LIMIT_MS": str(LIMIT_MS),
}


@dataclass(frozen=True, slots=True)
class Arbiter:
    """Two processes of a job: the keeper of the socket, and the worker."""

    setting: Setting
    job: str
    key: str
    port: int

    def environment(self, port: int | None = None) -> dict[str, str]:
        """What `dynamiccl-run` gives a rank, in mode adaptive."""
        artifact = self.setting.artifact
        index = hashlib.sha256((artifact / "plugin.index").read_bytes()).hexdigest()
        return OFTEN | {
            "DYNAMICCL_JOB": self.job,
            "DYNAMICCL_HOST": os.uname().nodename,
            "DYNAMICCL_MACHINE": "gpu=test*8;mig=0;nic=none",
            "DYNAMICCL_SYSTEMS": SYSTEMS,
            "DYNAMICCL_TABLES": str(artifact / "tables"),
            "DYNAMICCL_INDEX": index[:16],
            "DYNAMICCL_ARBITER": f"127.0.0.1:{port or self.port}",
            "DYNAMICCL_KEY": self.key,
        }

    def processes(self) -> list[int]:
        """Those that live: the keeper first."""
        found: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                if f"{MARK}={self.key}".encode() in (entry / "environ").read_bytes():
                    stat = (entry / "stat").read_text().rpartition(")")[2].split()
                    if stat[0] != "Z":
                        found[int(entry.name)] = int(stat[1])
        return sorted(found, key=lambda pid: found[pid] in found)

    def worker(self) -> int | None:
        processes = self.processes()
        return processes[1] if len(processes) == 2 else None

    def stop(self) -> None:
        while processes := self.processes():
            for pid in processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


@contextmanager
def arbiter_of(build: Path, setting: Setting, **more: str) -> Iterator[Arbiter]:
    """Starts it as `dynamiccl-run` does; `more` are settings of its leader."""
    job, key = secrets.token_hex(8), secrets.token_hex(16)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DYNAMICCL_", "NCCL_"))}
    own = {
        "DYNAMICCL_JOB": job,
        "DYNAMICCL_KEY": key,
        "DYNAMICCL_ARTIFACT": str(setting.artifact),
        "DYNAMICCL_SYSTEMS": SYSTEMS,
        "DYNAMICCL_BRAIN_SOCKET": str(setting.run_dir / "brain.sock"),  # a test may start one
        MARK: key,
    }
    started = subprocess.run(
        [build / "dynamiccl-arbiter", "0", str(os.getpid())],
        env=clean | OFTEN | own | more,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    arbiter = Arbiter(setting, job, key, int(started.stdout))
    try:
        yield arbiter
    finally:
        arbiter.stop()


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
            with suppress(ProcessLookupError):
                if draw.random() < 0.6:
                    os.kill(worker, signal.SIGKILL)
                    continue
                os.kill(worker, signal.SIGSTOP)
                over.wait(draw.uniform(0, 0.4))
                os.kill(worker, signal.SIGCONT)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Cutter:
    """Passes connections on; of their directions a share breaks at any byte, or goes silent."""

    def __init__(self, port: int, seed: int, share: float) -> None:
        self._to = ("127.0.0.1", port)
        self._draw = random.Random(seed)
        self._share = share
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._opened = [self._listener]
        #: How many have come.
        self.num_connections = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def stop(self) -> None:
        for each in self._opened:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
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
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        breaks = self._draw.random() < self._share
        left = self._draw.randrange(1, 600) if breaks else 1 << 60
        is_silent = self._draw.random() < 0.5
        with suppress(OSError):
            while left > 0 and (part := source.recv(4096)[:left]):
                left -= len(part)
                target.sendall(part)
        if left == 0 and is_silent:
            return  # nobody learns of it
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def cuts_before(port: int, seed: int, *, share: float) -> Iterator[Cutter]:
    """Leads to `port` through a network that breaks."""
    cutter = Cutter(port, seed, share)
    try:
        yield cutter
    finally:
        cutter.stop()
