"""CPU interference: busy processes on `level` x the cores that this process may use.

    python -m dynamiccl.collect.interference.cpu --level 0.5

The level counts cores, so the launcher must not bind this process to a few of them
(`srun --cpu-bind=none`). Whole cores get a process each, and a fraction of one gets a process that
rests in between. Prints `ready`, once, when all are busy; ends as telemetry/companion.py says.
"""

import argparse
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.synchronize import Semaphore
from typing import Final

from dynamiccl import cli
from dynamiccl.collect.interference.duty import BUSY_S, repeat
from dynamiccl.collect.telemetry.companion import Ending
from dynamiccl.errors import MachineError

#: PR_SET_PDEATHSIG (linux/prctl.h).
_SET_DEATH_SIGNAL: Final = 1
_START_S: Final = 60.0


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Keep cores busy until SIGTERM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--level", type=float, required=True, help="share of the cores, 0..1")
    options = parser.parse_args(arguments)
    if not 0 < options.level <= 1:
        parser.error(f"--level is {options.level:g}; give a share above 0 and at most 1")
    fork = multiprocessing.get_context("fork")
    with Ending() as ending:
        parts = shares(options.level, len(os.sched_getaffinity(0)))
        busy, started = fork.Semaphore(0), time.monotonic()
        workers = [_start(fork, part, busy) for part in parts]
        try:
            for _ in workers:
                if not busy.acquire(timeout=max(0.0, _START_S + started - time.monotonic())):
                    raise MachineError(
                        f"not all of {len(workers)} processes were busy after {_START_S:g} s; "
                        "the node has no such cores to spare: lower the level"
                    )
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            while not ending.wait(1.0):
                pass
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _start(fork: ForkContext, share: float, busy: Semaphore) -> ForkProcess:
    worker = fork.Process(target=_work, args=(share, busy, os.getpid()), daemon=True)
    worker.start()
    return worker


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


if __name__ == "__main__":
    cli.run(main)
