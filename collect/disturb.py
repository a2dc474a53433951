"""Interference beside a launch: starts it on the nodes, waits until it is under way, ends it.

    python -m dynamiccl.collect.disturb cpu --level 0.5
    python -m dynamiccl.collect.disturb gemm --level 0.5

are two kinds, on the node where they run: busy for `level` of the time, in stretches of about
10 ms. They print `ready` when all are busy, and end as sampler.Ending says.

`cpu`: busy processes on `level` x the cores that it may use, so the launcher must not bind it to a
few of them (`srun --cpu-bind=none`): one on each of so many cores, and for a fraction of a core one
that rests in between.

`gemm`: square matrix products on all GPUs that CUDA shows, by torch. Collectives slow down beside
compute by other amounts for other configs, so that the best one alone need not be the best one in
training (AutoCCL, NSDI'25; Lagom, arXiv 2602.20656).

`traffic` is an endless second nccl-tests on GPUs that the trial leaves free; its level is the share
of 32 channels that it may use (NCCL_MAX_CTAS): with Ring, bandwidth at large sizes grows about
linearly with them. Measured on eight B300 at 128 MiB (eunomia-bpf/nccl-eBPF @14f9bca): 29, 59, 117,
231, 427 and 625 GB/s with 1, 2, 4, 8, 16 and 32 channels. It meets the trial on NVSwitch, PCIe and
NICs only, and runs in the user's environment without our tuner.
"""

import argparse
import ctypes
import multiprocessing
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from dynamiccl import cli
from dynamiccl.collect.grid import REAL, Setting
from dynamiccl.collect.nodes import Nodes
from dynamiccl.collect.sampler import Ending
from dynamiccl.datasets.schema import QUIET
from dynamiccl.errors import InvalidSweep, MachineError, UnknownName

#: Importing torch from a slow disk takes a minute, and so does NCCL's start on many nodes.
READY_S: Final = 300.0
#: A launcher may label each line with its rank.
_READY: Final = re.compile(r"(?:^|[\s:>\]])ready$")
#: A row of results: size, count, type, ... (nccl-tests writes comments with '#').
_ROW: Final = re.compile(r"^(?!\s*#).*?(?:^|[>:\]\s])\d+\s+\d+\s+[a-z]\w*\s+\w+\s+-?\d+\s+[\d.]")
#: Channels at level 1; NCCL takes fewer where the communicator has fewer.
_ALL_CHANNELS: Final = 32
#: Large enough that bandwidth, not latency, is what is taken away.
_SIZE: Final = "64M"
#: Length of a busy stretch, in seconds: shorter than a launch, longer than the clock's grain.
BUSY_S: Final = 0.01
#: PR_SET_PDEATHSIG (linux/prctl.h).
_SET_DEATH_SIGNAL: Final = 1
#: Edge of the matrices: 8192 fills an H100 for about 2 ms (1.1 TFLOP); a CPU gets less to do.
_EDGE: Final = {"cuda": 8192, "cpu": 256}


class Disturber:
    """Disturbs launches on the nodes that a launcher reaches."""

    def __init__(self, nodes: Nodes, num_gpus: int | None) -> None:
        """Take the nodes, and how many GPUs each of them has (None: not known)."""
        self._nodes = nodes
        self._num_gpus = num_gpus

    @contextmanager
    def disturb(self, setting: Setting, program: str) -> Iterator[Callable[[], str | None]]:
        """Disturb what runs inside the `with`; nothing for a setting that runs alone.

        `program` is the path of the benchmark that traffic comes from, which is the launch's own.
        The function that is given tells why the disturbance ended too early, None while it runs:
        ask after a trial, as what was measured later was measured without interference.

        Raises MachineError when it does not get under way within READY_S, UnknownName for a kind
        that is no process, InvalidSweep where traffic has no GPU.
        """
        kind = setting.interference.kind
        if kind == QUIET:
            yield lambda: None
            return
        # Traffic prints for all its ranks together.
        form, count = (_ROW, 1) if kind == "traffic" else (_READY, setting.hosts)
        ready: list[str] = []
        argv, ranks = self._argv(setting, program)
        started = self._nodes.start(
            argv,
            setting.hosts,
            lambda line: ready.append(line) if len(ready) < count and form.search(line) else None,
            ranks_per_node=ranks,
        )

        def lost() -> str | None:
            status, said = started.process.poll(), started.last_words or "none"
            told = f"interference '{kind}' ended with status {status}; its last output: {said}"
            return None if status is None else told

        try:
            if not started.wait_for(lambda: len(ready) >= count, READY_S):
                raise MachineError(
                    lost()
                    or f"interference '{kind}' was not ready after {READY_S:g} s ({len(ready)} of "
                    f"{count} processes were); its last output: {started.last_words or 'none'}"
                )
            yield lost
        finally:
            started.end()

    def _argv(self, setting: Setting, program: str) -> tuple[list[str], int]:
        """What disturbs, and its ranks on each node."""
        kind, level = setting.interference.kind, setting.interference.level
        if kind not in REAL:
            raise UnknownName("interference", kind, REAL, where="a sweep of real processes")
        if kind != "traffic":
            words = ("-m", "dynamiccl.collect.disturb", kind, "--level", f"{level:g}")
            return [sys.executable, *words], 1
        used = setting.ranks_per_host
        if self._num_gpus is None:
            raise MachineError(
                "interference 'traffic' runs on the GPUs that a trial leaves free, and nobody "
                "knows how many the nodes have: does NVML answer there (dynamiccl-collect doctor)?"
            )
        spare = self._num_gpus - used
        if spare < 1:
            raise InvalidSweep(
                f"interference 'traffic' needs GPUs that the trial leaves free, and {used} "
                f"ranks per node use all {self._num_gpus}; take groups with fewer ranks_per_node"
            )
        ranks, gpus = (1, spare) if self._nodes.one_process else (spare, 1)
        channels = max(1, round(level * _ALL_CHANNELS))
        # `-N 0` never ends; `-c 0` since checking would pause the traffic.
        return [
            *("env", "-u", "NCCL_MIN_CTAS", f"NCCL_MAX_CTAS={channels}"),
            *(f"NCCL_TESTS_DEVICE={used}", program, "-b", _SIZE, "-e", _SIZE, "-g", str(gpus)),
            *("-n", "100", "-w", "5", "-c", "0", "-N", "0"),
        ], ranks


# --- The programs ---


def main(arguments: Sequence[str] | None = None) -> None:
    """Keep cores or GPUs busy until SIGTERM; raises MachineError where that cannot be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=("cpu", "gemm"))
    parser.add_argument("--level", type=float, required=True, help="share of cores or time, 0..1")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of gemm")
    options = parser.parse_args(arguments)
    if not 0 < options.level <= 1:
        parser.error(f"--level is {options.level:g}; give a share above 0 and at most 1")
    if options.kind == "cpu":
        _stress_cores(options.level)
    else:
        _stress_gpus(options.level, options.device)


def repeat(work: Callable[[], object], level: float, rest: Callable[[float], object]) -> None:
    """Alternate `work` and `rest(seconds)`, busy for `level` of the time, until a rest is True."""
    while True:
        began = time.perf_counter()
        work()
        if rest((time.perf_counter() - began) * (1.0 / level - 1.0)):
            return


def _stress_cores(level: float) -> None:
    ending, fork = Ending(), multiprocessing.get_context("fork")
    whole, part = divmod(level * len(os.sched_getaffinity(0)) + 1e-9, 1.0)
    parts = [1.0] * int(whole) + ([part] if part > 1e-6 else [])
    workers = [fork.Process(target=_work, args=(part, os.getpid()), daemon=True) for part in parts]
    try:
        for worker in workers:
            worker.start()
        print("ready", flush=True)  # noqa: T201 - for whoever started it
        while not ending.wait(1.0):
            pass
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.kill()
                worker.join()


def _work(share: float, parent: int) -> None:
    """Busy loop of one process; never returns, ends with its parent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() == parent:  # else it was gone before we could say so
        repeat(_spin, share, _rest)


def _rest(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


def _spin() -> None:
    until = time.thread_time() + BUSY_S
    while time.thread_time() < until:
        pass


def _stress_gpus(level: float, kind: str) -> None:
    try:
        import torch
    except ImportError as error:
        raise MachineError(
            "interference 'gemm' needs torch on every node; pip install 'dynamiccl[train]'"
        ) from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise MachineError(
            f"interference 'gemm' finds no CUDA device on {platform.node()} (torch "
            f"{torch.__version__}); it needs a GPU, a driver and a torch built for CUDA"
        )
    count = torch.cuda.device_count() if kind == "cuda" else 1
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    edge = _EDGE[kind]

    def multiply(times: int) -> None:
        for _ in range(times):
            for a, b, out in matrices:
                torch.mm(a, b, out=out)
        for gpu in range(count if kind == "cuda" else 0):
            torch.cuda.synchronize(gpu)

    ending = Ending()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            devices = [torch.device(kind, index) for index in range(count)]
            matrices = [
                [torch.ones((edge, edge), dtype=dtype, device=device) for _ in range(3)]
                for device in devices
            ]
            multiply(1)  # loads the kernels
            began = time.perf_counter()
            multiply(1)
            batch = max(1, round(BUSY_S / (time.perf_counter() - began)))
            multiply(batch)
            print("ready", flush=True)  # noqa: T201 - for whoever started it
            repeat(lambda: multiply(batch), level, ending.wait)
    except RuntimeError as error:  # CUDA out of memory, a lost GPU
        raise MachineError(f"interference 'gemm' on {platform.node()}: {error}") from error


if __name__ == "__main__":
    cli.run(main)
