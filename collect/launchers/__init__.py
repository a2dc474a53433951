"""Launchers: pure functions from a job to the argument vector and environment that start it.

job        what goes in and what comes out
rank       what every rank runs, whatever starts it
container  Pyxis, Enroot, Apptainer, and paths inside them
local, mpirun, srun   one launcher each
launch     all of them by name, and the choice among them
settings   what a sweep file says of them
"""

from dynamiccl.collect.launchers.container import map_into_container
from dynamiccl.collect.launchers.job import Command, Job
from dynamiccl.collect.launchers.launch import LAUNCHERS, command, find_launcher, per_node_command

__all__ = [
    "LAUNCHERS",
    "Command",
    "Job",
    "command",
    "find_launcher",
    "map_into_container",
    "per_node_command",
]
