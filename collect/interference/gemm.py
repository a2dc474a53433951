"""GPU interference: a GEMM loop that competes with the trial for its GPUs, as in training.

    python -m dynamiccl.collect.interference.gemm --level 0.5

Square matrix products on every GPU that CUDA shows, busy for `level` of the time: a batch of about
10 ms, then a rest. Collectives slow down beside compute by other amounts for other configs, so that
the best one alone need not be the best one in training (AutoCCL, NSDI'25; Lagom, arXiv 2602.20656).

Needs torch. Prints `ready`, once, when all GPUs work; ends as telemetry/companion.py says.
"""

import argparse
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from dynamiccl import cli
from dynamiccl.collect.interference.duty import BUSY_S, repeat
from dynamiccl.collect.telemetry.companion import Ending
from dynamiccl.errors import MachineError

#: Edge of the matrices: 8192 fills an H100 for about 2 ms (1.1 TFLOP); a CPU gets less to do.
_EDGE: Final = {"cuda": 8192, "cpu": 256}


def main(arguments: Sequence[str] | None = None) -> None:
    """Multiply matrices until SIGTERM; raises MachineError without torch or a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--level", type=float, required=True, help="share of the time, 0..1")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--edge", type=int, help="rows and columns of the matrices")
    options = parser.parse_args(arguments)
    if not 0 < options.level <= 1:
        parser.error(f"--level is {options.level:g}; give a share above 0 and at most 1")
    torch = _torch()
    devices = _devices(torch, options.device)
    edge = options.edge or _EDGE[options.device]
    with Ending() as ending:
        crew = [_Worker(torch, device, edge, options.level) for device in devices]
        for worker in crew:
            worker.start()
        try:
            said = False
            while not ending.wait(0.05 if not said else 1.0):
                for worker in crew:
                    worker.check()
                if not said and all(worker.ready.is_set() for worker in crew):
                    said = True
                    sys.stdout.write("ready\n")
                    sys.stdout.flush()
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
