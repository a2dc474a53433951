"""Interference on a node: cores or GPUs that are busy for a share of the time, as in training.

    python -m dynamiccl.collect.stress cpu --level 0.5
    python -m dynamiccl.collect.stress gemm --level 0.5

`cpu`: busy processes on `level` x the cores that this process may use, so the launcher must not
bind it to a few of them (`srun --cpu-bind=none`). Whole cores get a process each, and a fraction of
one gets a process that rests in between.

`gemm`: square matrix products on every GPU that CUDA shows, busy for `level` of the time: a batch
of about 10 ms, then a rest. Collectives slow down beside compute by other amounts for other
configs, so that the best one alone need not be the best one in training (AutoCCL, NSDI'25; Lagom,
arXiv 2602.20656). Needs torch.

Prints `ready`, once, when all are busy; ends as ending.py says.
"""

import argparse
import ctypes
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Semaphore
from typing import Any, Final

from dynamiccl import cli
from dynamiccl.collect.ending import Ending
from dynamiccl.errors import MachineError

#: Length of a busy stretch, in seconds: shorter than a launch, longer than the clock's grain.
BUSY_S: Final = 0.01
#: PR_SET_PDEATHSIG (linux/prctl.h).
_SET_DEATH_SIGNAL: Final = 1
_START_S: Final = 60.0
#: Edge of the matrices: 8192 fills an H100 for about 2 ms (1.1 TFLOP); a CPU gets less to do.
_EDGE: Final = {"cuda": 8192, "cpu": 256}


def main(arguments: Sequence[str] | None = None) -> None:
    """Keep cores or GPUs busy until SIGTERM; raises MachineError where that cannot be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=("cpu", "gemm"))
    parser.add_argument("--level", type=float, required=True, help="share of cores or time, 0..1")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of gemm")
    parser.add_argument("--edge", type=int, help="rows and columns of the matrices")
    options = parser.parse_args(arguments)
    if not 0 < options.level <= 1:
        parser.error(f"--level is {options.level:g}; give a share above 0 and at most 1")
    if options.kind == "cpu":
        _stress_cores(options.level)
    else:
        _stress_gpus(options.level, options.device, options.edge or _EDGE[options.device])


def _say_ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def repeat(work: Callable[[], None], level: float, over: Callable[[float], bool]) -> None:
    """Alternate `work` and rest, busy for `level` of the time, until `over(seconds to rest)`.

    A rest is stretched by what the last one missed of its length, so that a coarse clock or a late
    wake-up does not shift the share.
    """
    debt_s = 0.0
    while True:
        began = time.perf_counter()
        work()
        worked = time.perf_counter()
        debt_s += (worked - began) / level - (worked - began)
        if over(max(0.0, debt_s)):
            return
        debt_s -= time.perf_counter() - worked


def shares(level: float, cores: int) -> tuple[float, ...]:
    """The share of a core that each process takes: whole ones, then at most one part.

    >>> shares(0.75, 2)
    (1.0, 0.5)
    >>> shares(1.0, 3)
    (1.0, 1.0, 1.0)
    """
    wanted = level * cores
    whole = int(wanted + 1e-9)
    part = wanted - whole
    return (1.0,) * whole + ((part,) if part > 1e-9 else ())


def _stress_cores(level: float) -> None:
    fork = multiprocessing.get_context("fork")
    with Ending() as ending:
        busy, started, own = fork.Semaphore(0), time.monotonic(), os.getpid()
        workers = [
            fork.Process(target=_work, args=(share, busy, own), daemon=True)
            for share in shares(level, len(os.sched_getaffinity(0)))
        ]
        try:
            for worker in workers:
                worker.start()
            for _ in workers:
                if not busy.acquire(timeout=max(0.0, _START_S + started - time.monotonic())):
                    raise MachineError(
                        f"not all of {len(workers)} processes were busy after {_START_S:g} s; "
                        "the node has no such cores to spare: lower the level"
                    )
            _say_ready()
            while not ending.wait(1.0):
                pass
        finally:
            for worker in workers:
                if worker.pid is not None:
                    worker.kill()
                    worker.join()


def _work(share: float, busy: Semaphore, parent: int) -> None:
    """Busy loop of one process; never returns, ends with its parent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it was gone before we could say so
    _spin()
    busy.release()
    repeat(_spin, share, _rest)


def _rest(seconds: float) -> bool:
    if seconds > 0:
        time.sleep(seconds)
    return False


def _spin() -> None:
    until = time.thread_time() + BUSY_S
    while time.thread_time() < until:
        pass


def _stress_gpus(level: float, kind: str, edge: int) -> None:
    torch = _torch()
    with Ending() as ending:
        crew = [_Worker(torch, device, edge, level) for device in _devices(torch, kind)]
        for worker in crew:
            worker.start()
        try:
            said = False
            while not ending.wait(0.05 if not said else 1.0):
                for worker in crew:
                    worker.check()
                if not said and all(worker.ready.is_set() for worker in crew):
                    said = True
                    _say_ready()
        finally:
            for worker in crew:
                worker.stop()


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MachineError(
            "interference 'gemm' needs torch on every node; pip install 'dynamiccl[train]'"
        ) from error
    return torch


def _devices(torch: Any, kind: str) -> list[Any]:
    if kind == "cpu":
        torch.set_num_threads(1)
        return [torch.device("cpu")]
    if not torch.cuda.is_available():
        raise MachineError(
            f"interference 'gemm' finds no CUDA device on {platform.node()} (torch "
            f"{torch.__version__}); it needs a GPU, a driver and a torch built for CUDA"
        )
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


class _Worker(threading.Thread):
    """The loop of one GPU, in a thread."""

    def __init__(self, torch: Any, device: Any, edge: int, level: float) -> None:
        super().__init__(name=str(device), daemon=True)
        self._torch, self._device, self._edge, self._level = torch, device, edge, level
        self._over = threading.Event()
        self._failed: BaseException | None = None
        self.ready = threading.Event()

    def run(self) -> None:
        try:
            self._loop()
        except RuntimeError as error:  # CUDA out of memory, a lost GPU
            self._failed = error

    def check(self) -> None:
        if self._failed is not None:
            raise MachineError(f"interference 'gemm' on {self._device}: {self._failed}")

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _loop(self) -> None:
        multiply = self._product()
        multiply(1)  # loads the kernels
        began = time.perf_counter()
        multiply(1)
        count = max(1, round(BUSY_S / (time.perf_counter() - began)))

        def batch() -> None:
            multiply(count)
            self.ready.set()

        repeat(batch, self._level, self._over.wait)

    def _product(self) -> Callable[[int], None]:
        on_gpu = self._device.type == "cuda"
        dtype = self._torch.bfloat16 if on_gpu else self._torch.float32
        shape = (self._edge, self._edge)
        a, b, out = (self._torch.ones(shape, dtype=dtype, device=self._device) for _ in range(3))

        def multiply(count: int) -> None:
            with self._torch.inference_mode():
                for _ in range(count):
                    self._torch.mm(a, b, out=out)
            if on_gpu:
                self._torch.cuda.synchronize(self._device)

        return multiply


if __name__ == "__main__":
    cli.run(main)
