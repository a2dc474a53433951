"""local: one process on this machine that drives all GPUs of the communicator."""

from dynamiccl.collect.launchers.job import Command, Job
from dynamiccl.collect.launchers.rank import rank_command
from dynamiccl.collect.launchers.settings import LauncherSettings
from dynamiccl.errors import InvalidSweep


def command(job: Job, settings: LauncherSettings) -> Command:
    """The command itself; all ranks are in its one process (`-g N` of nccl-tests) (pure).

    Raises:
        InvalidSweep: arguments for a launcher that is not there.
    """
    if settings.extra_args:
        raise InvalidSweep(
            f"launcher 'local' takes no extra_args ({' '.join(settings.extra_args)}); words before "
            "the benchmark go into launcher.prefix"
        )
    rank = rank_command(job, settings, unset=False)
    return Command(rank.argv, rank.env, job.unset)
