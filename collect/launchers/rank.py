"""The command that every rank runs under any launcher: wrapper, program, container."""

from collections.abc import Mapping

from dynamiccl.collect.launchers.container import Wrapped, wrap
from dynamiccl.collect.launchers.job import Job
from dynamiccl.collect.launchers.settings import LauncherSettings


def rank_command(job: Job, settings: LauncherSettings, *, unset: bool) -> Wrapped:
    """A rank's command and environment (pure).

    Args:
        job: what is to run.
        settings: the sweep's `[launcher]`.
        unset: whether the rank itself must drop the job's unset variables, since the launcher hands
            it another environment than our own. An image's variables always need it.
    """
    drop: tuple[str, ...] = ()
    if job.unset and (unset or settings.container is not None):
        drop = ("env", *(word for name in job.unset for word in ("-u", name)))
    argv = (*drop, *settings.prefix, *job.argv)
    return wrap(argv, environment(job, settings), settings.container)


def environment(job: Job, settings: LauncherSettings) -> Mapping[str, str]:
    """The user's variables and the job's, which override them; without those to unset.

    Raises:
        ValueError: the job sets and unsets the same variable.
    """
    both = sorted(set(job.env) & set(job.unset))
    if both:
        raise ValueError(f"a job cannot set and unset {', '.join(both)}")
    merged = {**settings.env, **job.env}
    return {name: value for name, value in merged.items() if name not in job.unset}
