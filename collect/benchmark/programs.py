"""The nccl-tests binaries: where they are, and which options their release has.

Releases differ in their options (-N, -S from 2.13, -J from 2.17.3, -I from 2.19.2), so every one is
asked for its own help text; nothing is used that it does not list.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamiccl.errors import InvalidSweep, MachineError
from dynamiccl.nccl import Collective

#: Names of the nccl-tests binaries (v2.19.6, `src/`).
BINARIES: Final[Mapping[Collective, str]] = {
    Collective.AllReduce: "all_reduce_perf",
    Collective.AllGather: "all_gather_perf",
    Collective.ReduceScatter: "reduce_scatter_perf",
    Collective.Broadcast: "broadcast_perf",
    Collective.Reduce: "reduce_perf",
    Collective.AlltoAll: "alltoall_perf",
    Collective.SendRecv: "sendrecv_perf",
}
#: Endings that builds with MPI are given (`NAME_SUFFIX`, and what distributions do).
_SUFFIXES: Final = ("", "_mpi")
_OPTION: Final = re.compile(r"\[-(\w),--\w+")
_HELP_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Program:
    """One binary and the option letters that it takes."""

    path: str
    options: frozenset[str]

    @property
    def has_cycles(self) -> bool:
        """Whether it can repeat its walk over sizes (`-N`), which sweep mode needs."""
        return "N" in self.options

    @property
    def has_json(self) -> bool:
        """Whether it writes JSON (`-J`), whose times have six decimals."""
        return "J" in self.options

    @property
    def warms_up_each_size(self) -> bool:
        """Whether its warm-up runs every size of the walk (2.16.9 and later).

        Judged by `-J`, of 2.17.3: releases before and after 2.16.9 list the same options.
        """
        return self.has_json

    @property
    def has_iteration_times(self) -> bool:
        """Whether it can print the time of every iteration (`-I`)."""
        return "I" in self.options


def binary_names(collective: Collective, *, mpi: bool) -> tuple[str, ...]:
    """The names that a collective's binary may have, the likelier one first.

    With `mpi`, one that ends in `_mpi` is preferred. Raises InvalidSweep for a collective without.
    """
    name = BINARIES.get(collective)
    if name is None:
        choices = ", ".join(c.wire for c in BINARIES)
        raise InvalidSweep(f"no nccl-tests binary for {collective.wire}; choose from {choices}")
    return tuple(name + suffix for suffix in (reversed(_SUFFIXES) if mpi else _SUFFIXES))


def find_program(collective: Collective, directory: Path | None, *, mpi: bool) -> Program:
    """The binary of a collective from `directory`, or PATH when it is None.

    Raises InvalidSweep for a collective without one, and MachineError when it is not there or does
    not start.
    """
    place = None if directory is None else str(directory.resolve())
    for name in binary_names(collective, mpi=mpi):
        found = shutil.which(name, path=place)
        if found is not None:
            return Program(found, _options(found))
    raise MachineError(
        f"no executable {BINARIES[collective]} in {place or 'PATH'}; build nccl-tests"
        f"{' with MPI=1' if mpi else ''} and give its build directory with --nccl-tests-dir, or "
        "use --runner simulator"
    )


def options_in(output: str, path: str, returncode: int | None) -> frozenset[str]:
    """The letters of the options that a help text lists; raises MachineError when it is none."""
    options = frozenset(_OPTION.findall(output))
    if not options >= {"b", "e", "n", "w"}:
        said = output.strip().splitlines()
        last = said[-1] if said else "nothing"
        raise MachineError(
            f"{path} -h lists no options of nccl-tests (exit code {returncode}, output: "
            f"{last}); is a library missing (ldd), or is it another program?"
        )
    return options


def _options(path: str) -> frozenset[str]:
    try:
        done = subprocess.run(
            [path, "-h"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_HELP_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"{path} -h does not run: {error}; check it by hand") from error
    return options_in(done.stdout + done.stderr, path, done.returncode)
