"""The programs of nccl-tests: where they are, and which options their release has.

Releases differ in their options (-N, -S from 2.13, -J from 2.17.3, -I from 2.19.2), so every one is
asked for its own help text, where the ranks run; nothing is used that it does not list.
"""

import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamiccl.collect.launchers import Command, Job, command, find_launcher, map_into_container
from dynamiccl.collect.launchers.settings import ContainerSettings, LauncherSettings
from dynamiccl.collect.processes.process import Limits, run_process
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.errors import InvalidSweep, MachineError
from dynamiccl.nccl import TUNER_ABI_SINCE, Collective, NcclVersion

_log = logging.getLogger(__name__)

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
#: How long a program may take for its help text; a container's first start pulls the image.
HELP_S: Final = 60.0
_PULL_S: Final = 900.0
_FOUND: Final = "dynamiccl-found "
#: Prints the first name that can be run, then its help text. `command -v` accepts paths, too.
_ASK: Final = (
    'for name; do path=$(command -v "$name") && [ -x "$path" ] || continue; '
    f'echo "{_FOUND}$path"; exec "$path" -h; done; exit 127'
)
_OPTION: Final = re.compile(r"\[-(\w),--\w+")


@dataclass(frozen=True, slots=True)
class Site:
    """Where nccl-tests runs: launcher, directories, plugin."""

    #: Data directory; topology dumps go there, too.
    out: Path
    #: Folder for the files of launches, on a file system shared by all nodes.
    work: Path
    #: Where the binaries are; None = PATH.
    nccl_tests_dir: Path | None
    #: The tuner plugin that plays schedules; None = there is none.
    plugin: Path | None
    launcher: LauncherSettings


@dataclass(frozen=True, slots=True)
class Program:
    """A binary of nccl-tests and the letters of the options that its release has."""

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


def find_program(collective: Collective, site: Site) -> Program:
    """The binary of a collective as the site's ranks see it, inside a container if there is one.

    Raises InvalidSweep for a collective without a binary, and MachineError when it is not there or
    is another program.
    """
    if collective not in BINARIES:
        choices = ", ".join(c.wire for c in BINARIES)
        raise InvalidSweep(f"no nccl-tests binary for {collective.wire}; choose from {choices}")
    mpi = find_launcher(site.launcher.kind).needs_mpi
    # Where ranks are processes of their own a build with MPI is the likelier one.
    suffixes = reversed(_SUFFIXES) if mpi else _SUFFIXES
    names = [BINARIES[collective] + suffix for suffix in suffixes]
    container, place, where = site.launcher.container, site.nccl_tests_dir, "PATH"
    if place is not None:
        where = str(place.resolve()) if container is None else directory_inside(place, container)
        names = [f"{where}/{name}" for name in names]
    ask = ("sh", "-c", _ASK, "sh", *names)
    if container is None:
        started, limit_s = Command(ask), HELP_S
    else:
        started, limit_s = command(Job(ask), site.launcher, uid=os.getuid()), _PULL_S
    done = run_process(started, Limits(limit_s, limit_s))
    lines = [line.text for line in done.lines]
    paths = [line.removeprefix(_FOUND) for line in lines if line.startswith(_FOUND)]
    said = [line for line in lines if line.strip() and not line.startswith(_FOUND)]
    if not paths:
        if container is not None:
            raise MachineError(
                f"no executable {BINARIES[collective]} in {where} of the container "
                f"'{container.image}' (exit code {done.returncode}, output: "
                f"{' | '.join(said[-3:]) or 'nothing'}); give its directory inside the image, or "
                "one under launcher.container.mounts, with --nccl-tests-dir"
            )
        raise MachineError(
            f"no executable {BINARIES[collective]} in {where}; build nccl-tests"
            f"{' with MPI=1' if mpi else ''} and give its build directory with --nccl-tests-dir, "
            "or use --runner simulator"
        )
    if done.reason is not None:
        raise MachineError(f"{paths[0]} -h does not end within {limit_s:g} s; check it by hand")
    options = frozenset(_OPTION.findall("\n".join(lines)))
    if not options >= {"b", "e", "n", "w"}:
        raise MachineError(
            f"{paths[0]} -h lists no options of nccl-tests (exit code {done.returncode}, output: "
            f"{said[-1] if said else 'nothing'}); is a library missing (ldd), or is it another "
            "program?"
        )
    return Program(paths[0], options)


def directory_inside(directory: Path, container: ContainerSettings) -> str:
    """Path of a directory inside the container: mapped if mounted, else the image's own."""
    try:
        return map_into_container(str(directory.resolve()), container)
    except InvalidSweep:
        return str(directory)


def can_play(file: SweepFile, plugin: Path | None, programs: Iterable[Program]) -> bool:
    """Whether the plugin can play a schedule of configs in one process.

    Raises MachineError where the sweep wants that and it cannot be.
    """
    without = [program.path for program in programs if not program.has_cycles]
    version = file.nccl_version
    obstacle = None
    if plugin is None:
        obstacle = "there is no tuner plugin; build it with 'make plugin', or set runner.plugin"
    elif version is not None and NcclVersion.parse(version) < TUNER_ABI_SINCE[3]:
        obstacle = f"it needs NCCL {TUNER_ABI_SINCE[3]} and this is {version}"
    elif without:
        obstacle = f"{without[0]} has no option -N; build nccl-tests 2.13 or later"
    if file.runner.mode == "processes":
        return False
    if obstacle is not None and file.runner.mode == "sweep":
        raise MachineError(f"runner mode 'sweep' cannot work: {obstacle}")
    if obstacle is not None:
        _log.warning("one process for each config, since the sweep mode cannot work: %s", obstacle)
    return obstacle is None
