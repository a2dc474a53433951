"""mpirun of Open MPI 4 and 5: one process a rank, variables passed with -x.

It forwards output in pieces, not lines: what two ranks print at once may share a line. nccl-tests
prints its tables from one rank; what all ranks print (NCCL_DEBUG) belongs into NCCL_DEBUG_FILE.
"""

from typing import Final

from dynamiccl.collect.launchers.job import Command, Job
from dynamiccl.collect.launchers.rank import rank_command
from dynamiccl.collect.launchers.settings import LauncherSettings

#: Options of mpirun that say where ranks are bound.
_BINDING: Final = ("--bind-to", "-bind-to", "--cpu-set", "--rankfile", "-rf", "--cpu-list")


def command(job: Job, settings: LauncherSettings, *, uid: int) -> Command:
    """An mpirun command line; `uid` is that of the user who starts it (pure).

    Output is never tagged with ranks: the benchmark's tables are read as it prints them.
    """
    # Ranks elsewhere start in that node's own environment: they drop variables themselves.
    rank = rank_command(job, settings, unset=True)
    exports = [word for name in sorted(rank.env) for word in ("-x", f"{name}={rank.env[name]}")]
    argv = (
        "mpirun",
        # Open MPI refuses root unless told, and needs no telling otherwise.
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
