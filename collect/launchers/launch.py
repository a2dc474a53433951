"""The launchers by name, and the command of a job under the sweep's `[launcher]`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from dynamiccl.collect.launchers.job import Command, Job
from dynamiccl.collect.launchers.local import command as local_command
from dynamiccl.collect.launchers.mpirun import command as mpirun_command
from dynamiccl.collect.launchers.settings import LauncherSettings
from dynamiccl.collect.launchers.srun import command as srun_command
from dynamiccl.errors import InvalidSweep, UnknownName


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """One way to start ranks."""

    #: What to start for a job, under a sweep's `[launcher]`, by the user of a uid.
    command: Callable[[Job, LauncherSettings, int], Command]
    #: Whether ranks are processes of their own: a benchmark built with MPI, and `-g 1`.
    needs_mpi: bool = True
    #: Whether srun starts them.
    is_slurm: bool = False
    #: Whether the whole sweep runs inside a batch job.
    is_batch: bool = False
    #: Seconds that it takes to end ranks which do not end by themselves.
    grace_s: float = 5.0


#: Slurm sends SIGKILL 30 s after SIGTERM (slurm.conf, KillWait), and srun waits 2 s more for that.
_SRUN_GRACE_S: Final = 40.0


#: All there are; what a sweep file and the command line may name.
LAUNCHERS: Final[Mapping[str, Launcher]] = {
    "local": Launcher(
        command=lambda job, settings, _: local_command(job, settings), needs_mpi=False
    ),
    "mpirun": Launcher(command=lambda job, settings, uid: mpirun_command(job, settings, uid=uid)),
    "srun": Launcher(
        command=lambda job, settings, _: srun_command(job, settings),
        is_slurm=True,
        grace_s=_SRUN_GRACE_S,
    ),
    # Inside its batch job a sweep starts its steps by srun.
    "sbatch": Launcher(
        command=lambda job, settings, _: srun_command(job, settings),
        is_slurm=True,
        is_batch=True,
        grace_s=_SRUN_GRACE_S,
    ),
}


def find_launcher(name: str) -> Launcher:
    """The launcher called `name`. Raises UnknownName with the choices."""
    if name not in LAUNCHERS:
        raise UnknownName("launcher", name, LAUNCHERS)
    return LAUNCHERS[name]


def command(job: Job, settings: LauncherSettings, *, uid: int) -> Command:
    """What to start for a job under the launcher that `settings.kind` names (pure).

    Args:
        job: what is to run, and on how many nodes.
        settings: the sweep's `[launcher]`.
        uid: of the user who starts it (mpirun has an option for root).

    Raises:
        UnknownName: there is no such launcher.
        InvalidSweep: the launcher cannot start such a job; the message says which can.
    """
    launcher = find_launcher(settings.kind)
    if job.num_nodes > 1 and not launcher.needs_mpi:
        raise InvalidSweep(
            f"launcher '{settings.kind}' starts one process on this machine, but a group has "
            f"num_nodes = {job.num_nodes}; take launcher {_those(lambda one: one.needs_mpi)}, or "
            "groups of one node"
        )
    container = settings.container
    if container is not None and container.runtime == "pyxis" and not launcher.is_slurm:
        raise InvalidSweep(
            f"container runtime 'pyxis' is a plugin of srun and does not work with launcher "
            f"'{settings.kind}'; take launcher {_those(lambda one: one.is_slurm)}, or runtime "
            "enroot or apptainer"
        )
    return launcher.command(job, settings, uid)


def per_node_command(job: Job, settings: LauncherSettings, *, uid: int) -> Command:
    """The command for one process on each node, beside what runs there (pure).

    For samplers and interference. `job.ranks_per_node` is ignored.
    """
    return command(replace(job, ranks_per_node=1, overlap=True), settings, uid=uid)


def _those(can: Callable[[Launcher], bool]) -> str:
    *some, last = (name for name, launcher in LAUNCHERS.items() if can(launcher))
    return f"{', '.join(some)} or {last}"
