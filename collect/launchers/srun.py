"""srun: a step of the current Slurm allocation; one process a rank.

Output keeps srun's line buffering: with --unbuffered it would be forwarded in pieces, and lines of
several ranks would be mixed. Variables go through srun's own environment, since
`--export=NAME=VALUE` cuts values at commas. How ranks find each other is the cluster's matter: for
Open MPI, put `--mpi=pmix` into extra_args.
"""

from dynamiccl.collect.launchers.job import Command, Job
from dynamiccl.collect.launchers.rank import rank_command
from dynamiccl.collect.launchers.settings import LauncherSettings


def command(job: Job, settings: LauncherSettings) -> Command:
    """An srun command line (pure)."""
    rank = rank_command(job, settings, unset=False)
    argv = (
        "srun",
        *("-N", str(job.num_nodes), "-n", str(job.num_ranks)),
        f"--ntasks-per-node={job.ranks_per_node}",
        # Said outright: a job submitted with --export=NONE would start steps without variables.
        "--export=ALL",
        # A rank that dies leaves the others waiting for it.
        "--kill-on-bad-exit=1",
        *(["--overlap"] if job.overlap else []),
        *rank.srun_options,
        *settings.extra_args,
        *rank.argv,
    )
    return Command(argv, rank.env, job.unset)
