"""mpirun of Open MPI 4 and 5: one process a rank, variables passed with -x.

mpirun forwards output in chunks, not lines, so output of two ranks may be mixed in one line.
nccl-tests prints its tables from one rank; logs of all ranks (NCCL_DEBUG) must go to
NCCL_DEBUG_FILE.
"""

from typing import Final

from dynamiccl.collect.launchers.job import Command, Job
from dynamiccl.collect.launchers.rank import rank_command
from dynamiccl.collect.launchers.settings import LauncherSettings

#: Options of mpirun that say where ranks are bound.
_BINDING: Final = ("--bind-to", "-bind-to", "--cpu-set", "--rankfile", "-rf", "--cpu-list")


def command(job: Job, settings: LauncherSettings, *, uid: int) -> Command:
    """An mpirun command line; `uid` is that of the user who starts it (pure).

    Output lines are not tagged with ranks, since the benchmark's tables are parsed as printed.
    """
    # Ranks on other nodes get their node's environment, so the rank itself unsets variables.
    rank = rank_command(job, settings, unset=True)
    exports = [word for name in sorted(rank.env) for word in ("-x", f"{name}={rank.env[name]}")]
    argv = (
        "mpirun",
        # Open MPI refuses to run as root without this option.
        *(["--allow-run-as-root"] if uid == 0 else []),
        *("-np", str(job.num_ranks)),
        *("--map-by", f"ppr:{job.ranks_per_node}:node"),
        # Open MPI 4 binds up to two ranks to one core each, which would make NCCL's proxy threads
        # and the benchmark share it.
        *(() if _binds(settings.extra_args) else ("--bind-to", "none")),
        *exports,
        *settings.extra_args,
        *rank.argv,
    )
    # Inside an allocation mpirun starts its daemons by srun, as a step that would wait for others.
    beside = {"SLURM_OVERLAP": "1"} if job.overlap else {}
    return Command(argv, {**rank.env, **beside}, job.unset)


def _binds(extra_args: tuple[str, ...]) -> bool:
    return any(word in _BINDING for word in extra_args)
