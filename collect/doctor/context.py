"""What a sweep needs of the machine; without a sweep file, common needs."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamiccl.collect.launchers import LAUNCHERS
from dynamiccl.collect.launchers.settings import LauncherSettings
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.libraries import SWEEP_NAME, built
from dynamiccl.nccl import Collective

_PARTITION: Final = re.compile(r"^(?:#SBATCH\s+)?(?:--partition[= ]|-p[= ]?)\s*([^\s,]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The needs of a sweep."""

    collectives: tuple[Collective, ...] = (Collective.AllReduce,)
    #: Folder of the nccl-tests binaries; None = PATH.
    nccl_tests_dir: str | None = None
    #: auto, sweep or processes.
    mode: str = "auto"
    wants_chunk_sizes: bool = False
    wants_iteration_times: bool = False
    plugin: str = str(built(SWEEP_NAME))
    #: One of LAUNCHERS.
    launcher: str = "local"
    partition: str | None = None
    #: pyxis, enroot or apptainer; None = none, or we are inside.
    container: str | None = None
    num_nodes: int = 1
    ranks_per_node: int = 1
    interference: frozenset[str] = frozenset()
    wants_telemetry: bool = True
    out: str = "."

    @property
    def wants_sweep_mode(self) -> bool:
        """Whether one process is to measure many configs, if it can."""
        return self.mode != "processes"

    @property
    def is_distributed(self) -> bool:
        """Whether ranks are processes of their own, started by MPI or Slurm."""
        return LAUNCHERS[self.launcher].needs_mpi

    @property
    def is_slurm(self) -> bool:
        """Whether Slurm starts them."""
        return LAUNCHERS[self.launcher].is_slurm


def context_of(
    file: SweepFile | None, *, nccl_tests_dir: Path | None, out: Path, inside: bool = False
) -> Context:
    """The needs of a sweep file (pure); `inside` = we run in its container already."""
    directory = None if nccl_tests_dir is None else str(nccl_tests_dir)
    if file is None:
        return Context(nccl_tests_dir=directory, out=str(out))
    container = None if inside else file.launcher.container
    return Context(
        collectives=tuple(dict.fromkeys(Collective.parse(name) for name in file.collectives)),
        nccl_tests_dir=directory,
        mode=file.runner.mode,
        wants_chunk_sizes=any(file.chunk_sizes),
        wants_iteration_times=file.runner.per_iteration,
        plugin=file.runner.plugin or str(built(SWEEP_NAME)),
        launcher=file.launcher.kind,
        partition=_partition(file.launcher),
        container=None if container is None else container.runtime,
        num_nodes=max(group.hosts for group in file.groups),
        ranks_per_node=max(group.ranks_per_host for group in file.groups),
        interference=frozenset(entry.kind for entry in file.interference),
        wants_telemetry=file.telemetry.enabled,
        out=str(out),
    )


def _partition(settings: LauncherSettings) -> str | None:
    words = " ".join(settings.extra_args)
    lines = [*settings.sbatch_header, *re.findall(r"(?:--partition[= ]|-p[= ]?)[^\s,]+", words)]
    for line in lines:
        found = _PARTITION.search(line.strip())
        if found:
            return found.group(1)
    return None
