"""Interference beside a launch: starts it on the nodes, waits until it is under way, ends it.

    python -m dynamiccl.collect.disturb 0.5

is `cpu`, on the node where it runs: busy processes on so much of the cores that it may use, of
which one may rest in between. The launcher must not bind it to a few of them (`srun
--cpu-bind=none`). It prints `ready` when all are busy, and ends with its starter (sampler.py).

`traffic` is an endless second nccl-tests on GPUs that the trial leaves free; its level is the share
of 32 channels that it may use (NCCL_MAX_CTAS): with Ring, bandwidth at large sizes grows about
linearly with them. Measured on eight B300 at 128 MiB (eunomia-bpf/nccl-eBPF @14f9bca): 29, 59, 117,
231, 427 and 625 GB/s with 1, 2, 4, 8, 16 and 32 channels. It meets the trial on NVSwitch, PCIe and
NICs only, and runs in the user's environment without our tuner.

Products on the trial's own GPUs (`matmul`, `persistent-matmul`) are in the process of the calls
(beside.py): those of another process would get slices of time, and no SMs beside a call.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from dynamiccl import cli
from dynamiccl.collect.grid import PRODUCTS, Setting
from dynamiccl.collect.nodes import Nodes
from dynamiccl.collect.output import MEANT_AS_ROW
from dynamiccl.collect.sampler import end_with_starter, outlives
from dynamiccl.datasets.schema import QUIET
from dynamiccl.errors import InvalidSweep, MachineError

#: NCCL's start on many nodes takes a minute.
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
    if kind in {QUIET, *PRODUCTS}:
        yield lambda: None
        return
    # Each node's process says that it is ready; traffic prints rows for all its ranks together.
    count, ranks = setting.hosts, 1
    argv = [sys.executable, "-m", "dynamiccl.collect.disturb", f"{level:g}"]
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
    """Keep `level` of the cores busy until the end."""
    fork, parent = multiprocessing.get_context("fork"), os.getppid()
    whole, part = divmod(float(sys.argv[1]) * len(os.sched_getaffinity(0)) + 1e-9, 1.0)
    for share in [1.0] * int(whole) + ([part] if part > 1e-6 else []):
        # They end with us, killed ones too, as the last argument says.
        fork.Process(target=_stress, args=(share, os.getpid()), daemon=True).start()
    end_with_starter()
    print(_READY, flush=True)  # noqa: T201 - for whoever started it
    while not outlives(parent, 1.0):
        pass


def _stress(level: float, parent: int) -> None:
    """Keep a core busy for `level` of the time, while `parent` lives."""
    rest_s = 0.0
    while not outlives(parent, rest_s):
        began = time.perf_counter()
        # Shorter than a launch, longer than the clock's grain.
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        rest_s = (time.perf_counter() - began) * (1.0 / level - 1.0)


if __name__ == "__main__":
    cli.run(main)
