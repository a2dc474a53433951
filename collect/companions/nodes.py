"""Start and end a program on each node of a launch, through the launcher."""

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from dynamiccl.collect.launchers import LauncherSettings, Ranks, command, find_launcher
from dynamiccl.collect.process import Limits, end_session, run_process, start_session
from dynamiccl.errors import MachineError

#: Seconds for srun or mpirun to end ranks elsewhere before they are killed here.
_GRACE_S: Final = 5.0
#: A question to all nodes takes as long as a step takes to start.
_ANSWER_S: Final = 120.0


class Nodes:
    """The nodes that a launcher reaches; our own programs run outside of any container."""

    def __init__(self, launcher: LauncherSettings) -> None:
        """Take the sweep's launcher."""
        extra = launcher.extra_args
        if find_launcher(launcher.kind).is_slurm:
            # Bound to the one core of its task, CPU stress would leave all others alone.
            extra = (*extra, "--cpu-bind=none")
        changes = {"container": None, "prefix": (), "extra_args": extra}
        self._launcher = launcher.model_copy(update=changes)

    @property
    def one_process(self) -> bool:
        """Whether all ranks of a node are one process."""
        return not find_launcher(self._launcher.kind).needs_mpi

    def ask(self, argv: Sequence[str], num_nodes: int) -> list[str]:
        """Run a program once on each node; returns its output lines, in any order.

        Raises MachineError when it fails or does not end.
        """
        started = command(Ranks(tuple(argv), num_nodes=num_nodes, overlap=True), self._launcher)
        done = run_process(started, Limits(_ANSWER_S, _ANSWER_S))
        if done.returncode != 0:
            raise MachineError(
                f"the nodes do not answer: '{started.text}' ended with status {done.returncode}: "
                f"{' | '.join(line.text for line in done.lines[-3:]) or 'no output'}"
            )
        return [line.text for line in done.lines]

    def start(
        self,
        argv: Sequence[str],
        num_nodes: int,
        *,
        ranks_per_node: int = 1,
    ) -> subprocess.Popen[bytes]:
        """Start a program in the background: one process on each node, or ranks of its own.

        Its standard input is a pipe, so that it can see us die; its output goes to a pipe that the
        caller closes. End it with `end`.
        """
        ranks = Ranks(tuple(argv), {}, num_nodes, ranks_per_node, overlap=True)
        return start_session(command(ranks, self._launcher), subprocess.PIPE, stdin=subprocess.PIPE)

    @staticmethod
    def end(process: subprocess.Popen[bytes]) -> None:
        """End a started program with all its processes; output stays for whoever reads it."""
        end_session(process, _GRACE_S)
        if process.stdin is not None:
            # What was written to one that had ended already is still in the buffer.
            with suppress(BrokenPipeError):
                process.stdin.close()
