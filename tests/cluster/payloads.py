"""Small programs for ranks (source for `python -c`), and parsers of their output."""

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from tests.collect.live_processes import Finished, Limits, run_to_end

#: Says on one line where and who a rank is, and what it finds under the variables that it is told.
REPORT = """
import json, os, socket, sys
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("SLURM_PROCID"))
found = {name: os.environ.get(name) for name in sys.argv[1:]}
print(json.dumps({"host": socket.gethostname(), "rank": int(rank), "env": found}), flush=True)
"""

#: Many long lines at once, each by one write.
CHATTER = """
import os, sys
for i in range(300):
    os.write(1, f"<{os.environ['SLURM_PROCID']}:{i}:{'x' * 150}>\\n".encode())
"""

#: Meets all other ranks by MPI itself (Open MPI's library, without a compiler). MPI_Init waits for
#: all; a barrier behind it opens TCP connections from both sides at once, in which Open MPI 4.1.4
#: now and then crashes.
MEET = """
import ctypes
mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
world = ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world"))
assert mpi.MPI_Init(None, None) == 0
rank, size = ctypes.c_int(), ctypes.c_int()
mpi.MPI_Comm_rank(world, ctypes.byref(rank))
mpi.MPI_Comm_size(world, ctypes.byref(size))
print(f"rank {rank.value} of {size.value}")
assert mpi.MPI_Finalize() == 0
"""

#: One row, then nothing for ever, whatever it is told; the words after it mark its processes.
HANG = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("row", flush=True)
time.sleep(600)
"""


def python(source: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", source, *arguments)


def stall(argv: Sequence[str], rows: int) -> Finished:
    """Run what prints so many rows and then hangs; a second after the last it counts as hung."""
    left = rows

    def take(text: str, _: float) -> bool:
        nonlocal left
        left -= text.count("row")
        return left <= 0

    return run_to_end(argv, Limits(60, 1), take)


def reports(done: Finished) -> list[dict[str, Any]]:
    """The output of REPORT's ranks, by rank; mpirun may put two on one line."""
    assert done.returncode == 0, done.lines
    decoder, text, found = json.JSONDecoder(), "\n".join(done.lines).strip(), []
    while text:
        report, end = decoder.raw_decode(text)
        found.append(report)
        text = text[end:].strip()
    return sorted(found, key=lambda report: int(report["rank"]))


def meetings(done: Finished) -> list[str]:
    """The ranks that met in MEET, sorted."""
    assert done.returncode == 0, done.lines
    return sorted(re.findall(r"rank \d+ of \d+", "\n".join(done.lines)))
