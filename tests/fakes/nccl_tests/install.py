"""A stand-in for the nccl-tests programs, for machines without a GPU.

Everything around a benchmark can so be tested as it really runs: launchers, time limits, readers of
output, a tuner plugin under NCCL's own call order. **Its figures say nothing about any GPU**: they
are the embedded simulator's (NCCL 2.27, H100), and its devices are called "FAKE H100".

It plays nccl-tests 2.19.6 (`src/common.cu`, `src/util.cu`) with the options that our launches use,
and NCCL 2.30.7: its tuner ABI and what it logs. How releases print is tested on their logs. There
is no MPI in it: rank and size come from the launcher's environment, no process waits for another,
and rank 0 makes up what the others would have told it.

Settings of the stand-in itself:

    FAKE_LAUNCH           name of the launch, which seeds its noise; without it each draws anew
    FAKE_NOISE            sigma of the noise (0.015); 0 switches it off
    FAKE_SECONDS_PER_ROW  time that a row takes to appear (0)
    FAKE_HANG, FAKE_CRASH, FAKE_WRONG
                          a Config key, `Tree/Simple`, `Ring/LL/8ch` or `ABSTAIN`: the first timed
                          call that runs it never ends, dies by SIGSEGV, or computes wrong values
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

from dynamiccl.nccl import Collective

#: The programs that there are, by name.
PROGRAMS: Final = {
    "all_reduce_perf": Collective.AllReduce,
    "all_gather_perf": Collective.AllGather,
    "reduce_scatter_perf": Collective.ReduceScatter,
    "broadcast_perf": Collective.Broadcast,
    "reduce_perf": Collective.Reduce,
    "alltoall_perf": Collective.AlltoAll,
    "sendrecv_perf": Collective.SendRecv,
}
_START: Final = """
import os, sys
sys.path.insert(0, {root!r})
from tests.fakes.nccl_tests.benchmark import main
sys.exit(main(sys.argv[1:], os.environ))
"""


def install_stand_in(folder: Path) -> Path:
    """Write one executable for each program into `folder`, and return it.

    Each runs this interpreter by its absolute path, so it works under any launcher and PATH.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start = _START.format(root=str(Path(__file__).parents[3]))
    command = shlex.join([sys.executable, "-P", "-c", start])
    for name in PROGRAMS:
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {command} "$0" "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    return folder


def run_stand_in(folder: Path, program: str, *arguments: str, **settings: str) -> str:
    """What a program prints in a clean environment; the same each time. It must succeed."""
    command = [str(install_stand_in(folder / "bin") / program), *arguments]
    env = {"PATH": os.environ["PATH"], "FAKE_LAUNCH": "0", **settings}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout
