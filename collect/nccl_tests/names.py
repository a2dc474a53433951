"""Collective names in the spellings of programs, command lines and file names."""

import re
from typing import Final

from dynamiccl.nccl import Collective

#: nccl-tests binaries; `make NAME_SUFFIX=_mpi` and packagers put something behind `_perf`.
_PROGRAMS: Final = {
    "all_reduce": Collective.AllReduce,
    "all_gather": Collective.AllGather,
    "broadcast": Collective.Broadcast,
    "reduce_scatter": Collective.ReduceScatter,
    "reduce": Collective.Reduce,
    "alltoall": Collective.AlltoAll,
    "scatter": Collective.Scatter,
    "gather": Collective.Gather,
    "sendrecv": Collective.SendRecv,
}
_PROGRAM: Final = re.compile(r"(?:^|[\s/\"'=])([a-z][a-z_]*?)_perf[\w.-]*(?=$|[\s\"'])")
_IN_FILE_NAME: Final = re.compile(
    r"(?<![a-z])(all[_-]?reduce|all[_-]?gather|reduce[_-]?scatter|all[_-]?to[_-]?all|send[_-]?recv"
    r"|broadcast|scatter|gather|reduce)(?![a-z])"
)


def program_in(line: str) -> str | None:
    """The nccl-tests program that a line names, without `_perf`, or None.

    >>> program_in("$ srun -N2 ./build/all_reduce_perf_mpi -b 1M -e 128M")
    'all_reduce'
    """
    if "_perf" not in line:
        return None
    match = _PROGRAM.search(line)
    return match.group(1) if match else None


def collective_of_program(program: str) -> Collective | None:
    """Collective of a program name; None for those that are not in NCCL's API (hypercube)."""
    return _PROGRAMS.get(program)


def program_of(collective: Collective) -> str:
    """The program that measures a collective, without `_perf`.

    >>> program_of(Collective.AllReduce)
    'all_reduce'
    """
    return next(program for program, found in _PROGRAMS.items() if found is collective)


def collective_in_file_name(name: str) -> Collective | None:
    """The one collective that a file name contains, or None when it is none or several.

    >>> collective_in_file_name("superbenchmark_reducescatter.log").wire
    'ReduceScatter'
    >>> collective_in_file_name("allreduce_and_allgather.log") is None
    True
    """
    found = {Collective.parse(m.group(1)) for m in _IN_FILE_NAME.finditer(name.lower())}
    return found.pop() if len(found) == 1 else None
