"""Interference beside a launch: starts it on the nodes, waits until it is under way, ends it.

    python -m dynamiccl.collect.disturb cpu 0.5
    python -m dynamiccl.collect.disturb gemm 0.5

are two kinds, on the node where they run, with their level: busy for so much of the time.
They print `ready` when all are busy, and end with their starter (sampler.py).

`cpu`: busy processes on `level` x the cores that it may use, of which one may rest in between. The
launcher must not bind it to a few of them (`srun --cpu-bind=none`).

`gemm`: square matrix products on all GPUs that CUDA shows, by torch. Collectives slow down beside
compute by other amounts for other configs, so that the best one alone need not be the best one in
training (AutoCCL, NSDI'25; Lagom, arXiv 2602.20656).

`traffic` is an endless second nccl-tests on GPUs that the trial leaves free; its level is the share
of 32 channels that it may use (NCCL_MAX_CTAS): with Ring, bandwidth at large sizes grows about
linearly with them. Measured on eight B300 at 128 MiB (eunomia-bpf/nccl-eBPF @14f9bca): 29, 59, 117,
231, 427 and 625 GB/s with 1, 2, 4, 8, 16 and 32 channels. It meets the trial on NVSwitch, PCIe and
NICs only, and runs in the user's environment without our tuner.
"""

import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from dynamiccl import cli
from dynamiccl.collect.grid import Setting
from dynamiccl.collect.nodes import Nodes
from dynamiccl.collect.output import MEANT_AS_ROW
from dynamiccl.collect.sampler import end_with_starter, outlives
from dynamiccl.datasets.schema import QUIET
from dynamiccl.errors import InvalidSweep, MachineError

#: Importing torch from a slow disk takes a minute, and so does NCCL's start on many nodes.
READY_S: Final = 300.0
_READY: Final = "ready"


@contextmanager
def disturb(
    nodes: Nodes, num_gpus: int | None, setting: Setting, program: str
) -> Iterator[Callable[[], str | None]]:
    """Disturb what runs inside the `with`; nothing for a setting that runs alone.

    `num_gpus` is how many each node has (None: not known), `program` the path of the benchmark that
    traffic comes from, which is the launch's own. The function that is given tells why the
    disturbance ended too early, None while it runs: ask after a trial, as what was measured later
    was measured without interference.

    Raises MachineError when it does not get under way within READY_S, InvalidSweep where traffic
    has no GPU.
    """
    kind, level = setting.interference.kind, setting.interference.level
    if kind == QUIET:
        yield lambda: None
        return
    # Each node's process says that it is ready; traffic prints rows for all its ranks together.
    count, ranks = setting.hosts, 1
    argv = [sys.executable, "-m", "dynamiccl.collect.disturb", kind, f"{level:g}"]
    if kind == "traffic":
        count = 1
        argv, ranks = _traffic(nodes, num_gpus, setting, program)
    ready: list[str] = []

    def hear(line: str) -> None:
        if len(ready) < count and (MEANT_AS_ROW.search(line) or line == _READY):
            ready.append(line)

    with nodes.start(argv, setting.hosts, hear, ranks_per_node=ranks) as started:

        def lost() -> str | None:
            status, said = started.process.poll(), started.last_words
            told = f"interference '{kind}' ended with status {status}; its last output: {said}"
            return None if status is None else told

        if not started.wait_for(lambda: len(ready) >= count, READY_S):
            slow = f"interference '{kind}' was not ready after {READY_S:g} s ({len(ready)} of "
            slow += f"{count} processes were); its last output: {started.last_words}"
            raise MachineError(lost() or slow)
        yield lost


def _traffic(
    nodes: Nodes, num_gpus: int | None, setting: Setting, program: str
) -> tuple[list[str], int]:
    """The argument vector of endless traffic on spare GPUs, and its ranks on each node."""
    used = setting.ranks_per_host
    if num_gpus is None or num_gpus <= used:
        have = num_gpus or "nobody knows how many (does NVML answer there?)"
        raise InvalidSweep(
            f"interference 'traffic' needs GPUs that the trial leaves free; {used} ranks per node "
            f"use one each, of {have}; take groups with fewer ranks_per_node"
        )
    spare = num_gpus - used
    ranks, gpus = (1, spare) if nodes.one_process else (spare, 1)
    # NCCL takes fewer where the communicator has fewer.
    channels = max(1, round(setting.interference.level * 32))
    # A size at which bandwidth is taken away, not latency. `-N 0` never ends; `-c 0` since checking
    # would pause the traffic.
    return [
        *("env", "-u", "NCCL_MIN_CTAS", f"NCCL_MAX_CTAS={channels}"),
        *(f"NCCL_TESTS_DEVICE={used}", program, "-b", "64M", "-e", "64M", "-g", str(gpus)),
        *("-n", "100", "-w", "5", "-c", "0", "-N", "0"),
    ], ranks


def main() -> None:
    """Keep cores or GPUs busy until the end; raises MachineError where that cannot be."""
    kind, level = sys.argv[1:]
    {"cpu": stress_cores, "gemm": stress_gpus}[kind](float(level))


def repeat(work: Callable[[], object], level: float, parent: int) -> None:
    """Alternate `work` and rest, busy for `level` of the time, while `parent` lives."""
    rest_s = 0.0
    while not outlives(parent, rest_s):
        began = time.perf_counter()
        work()
        rest_s = (time.perf_counter() - began) * (1.0 / level - 1.0)


def stress_cores(level: float) -> None:
    """Keep `level` of the cores busy."""
    fork, parent = multiprocessing.get_context("fork"), os.getppid()
    whole, part = divmod(level * len(os.sched_getaffinity(0)) + 1e-9, 1.0)
    for share in [1.0] * int(whole) + ([part] if part > 1e-6 else []):
        # They end with us, killed ones too, as the last argument says.
        fork.Process(target=repeat, args=(_spin, share, os.getpid()), daemon=True).start()
    end_with_starter()
    print(_READY, flush=True)  # noqa: T201 - for whoever started it
    while not outlives(parent, 1.0):
        pass


def _spin() -> None:
    # Shorter than a launch, longer than the clock's grain.
    until = time.thread_time() + 0.01
    while time.thread_time() < until:
        pass


def stress_gpus(level: float, kind: str = "cuda") -> None:
    """Keep all GPUs busy for `level` of the time, or this core (`kind` cpu)."""
    # Before the import, which takes long.
    parent = os.getppid()
    import torch

    if kind == "cuda" and not torch.cuda.is_available():
        raise MachineError(
            f"interference 'gemm' finds no CUDA device on {platform.node()} (torch "
            f"{torch.__version__}); it needs a GPU, a driver and a torch built for CUDA"
        )
    gpus = range(torch.cuda.device_count() if kind == "cuda" else 0)
    # An edge of 8192 fills an H100 for about 2 ms (1.1 TFLOP); a CPU gets less to do.
    edge, dtype = (8192, torch.bfloat16) if kind == "cuda" else (256, torch.float32)

    def multiply() -> None:
        for a, b, out in matrices:
            torch.mm(a, b, out=out)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    end_with_starter()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            matrices = [
                [torch.ones((edge, edge), dtype=dtype, device=device) for _ in range(3)]
                for device in [f"cuda:{gpu}" for gpu in gpus] or ["cpu"]
            ]
            multiply()  # loads the kernels
            print(_READY, flush=True)  # noqa: T201 - for whoever started it
            repeat(multiply, level, parent)
    except RuntimeError as error:  # CUDA out of memory, a lost GPU
        raise MachineError(f"interference 'gemm' on {platform.node()}: {error}") from error


if __name__ == "__main__":
    cli.run(main)
