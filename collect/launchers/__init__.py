"""How processes are started: a launcher is a pure function to an argument vector and environment.

job        what goes in and what comes out
rank       what every rank runs, whatever starts it
container  Pyxis, Enroot, Apptainer, and paths inside them
local, mpirun, srun   one launcher each
launch     the choice among them
"""

from dynamiccl.collect.launchers.container import map_into_container
from dynamiccl.collect.launchers.job import Command, Job
from dynamiccl.collect.launchers.launch import command, needs_mpi, per_node_command

__all__ = [
    "Command",
    "Job",
    "command",
    "map_into_container",
    "needs_mpi",
    "per_node_command",
]
