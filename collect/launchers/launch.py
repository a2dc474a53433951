"""From the sweep's `[launcher]` to the launcher of that kind."""

from dataclasses import replace

from dynamiccl.collect.launchers.job import Command, Job
from dynamiccl.collect.launchers.local import command as local_command
from dynamiccl.collect.launchers.mpirun import command as mpirun_command
from dynamiccl.collect.launchers.srun import command as srun_command
from dynamiccl.collect.sweep.settings import LauncherSettings


def command(job: Job, settings: LauncherSettings, *, uid: int) -> Command:
    """What to start for a job under the launcher that `settings.kind` names (pure).

    A sweep under `sbatch` runs inside its batch job, where steps are started by srun.

    Args:
        job: what is to run, and on how many nodes.
        settings: the sweep's `[launcher]`.
        uid: of the user who starts it (mpirun has an option for root).

    Raises:
        InvalidSweep: the launcher cannot start such a job; the message says which can.
    """
    if settings.kind == "local":
        return local_command(job, settings)
    if settings.kind == "mpirun":
        return mpirun_command(job, settings, uid=uid)
    return srun_command(job, settings)


def per_node_command(job: Job, settings: LauncherSettings, *, uid: int) -> Command:
    """The same with one process on each node, beside what runs there already (pure).

    For samplers and interference. `job.ranks_per_node` does not matter.
    """
    return command(replace(job, ranks_per_node=1, overlap=True), settings, uid=uid)


def needs_mpi(kind: str) -> bool:
    """Whether ranks are processes of their own: a benchmark built with MPI, and `-g 1`."""
    return kind != "local"
