"""local: one process on this machine that drives all GPUs of the group."""

from dynamiccl.collect.launchers.job import Command, Job
from dynamiccl.collect.launchers.rank import rank_command
from dynamiccl.collect.sweep.settings import LauncherSettings
from dynamiccl.errors import InvalidSweep


def command(job: Job, settings: LauncherSettings) -> Command:
    """The command itself; all ranks are in its one process (`-g N` of nccl-tests) (pure).

    Raises:
        InvalidSweep: several nodes, or arguments for a launcher that is not there.
    """
    if job.num_nodes != 1:
        raise InvalidSweep(
            f"launcher 'local' starts one process on this machine, but a group has num_nodes = "
            f"{job.num_nodes}; take launcher mpirun, srun or sbatch, or groups of one node"
        )
    if settings.extra_args:
        raise InvalidSweep(
            f"launcher 'local' takes no extra_args ({' '.join(settings.extra_args)}); words before "
            "the benchmark go into launcher.prefix"
        )
    rank = rank_command(job, settings, launcher="local", unset=False)
    return Command(rank.argv, rank.env, job.unset)
