"""Runs a sweep as a Slurm batch job that may end and be submitted again any number of times.

script  the batch script (pure)
watch   submit, watch, and submit again while work is left
"""

from dynamiccl.collect.sbatch.script import BatchJob, batch_script, run_command
from dynamiccl.collect.sbatch.watch import Outcome, Work, run_as_batch

__all__ = [
    "BatchJob",
    "Outcome",
    "Work",
    "batch_script",
    "run_as_batch",
    "run_command",
]
