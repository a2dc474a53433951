"""Starts the interference of a setting beside a launch, on the nodes of the launch."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from dynamiccl.collect.companions.nodes import Nodes
from dynamiccl.collect.grid import Setting
from dynamiccl.collect.interference.disturb import Disturbance, disturb
from dynamiccl.collect.interference.traffic import Traffic, spare_gpus
from dynamiccl.errors import MachineError


class Disturber:
    """Disturbs launches on the nodes that a launcher reaches."""

    def __init__(self, nodes: Nodes, num_gpus: int | None) -> None:
        """Take the nodes, and how many GPUs each of them has (None: not known)."""
        self._nodes = nodes
        self._num_gpus = num_gpus

    @contextmanager
    def disturb(self, setting: Setting, program: str) -> Iterator[Disturbance]:
        """Disturb what runs inside the `with`; nothing for a setting that runs alone.

        `program` is the path of the benchmark that traffic comes from, which is the launch's own.

        Raises MachineError when it does not get under way.
        """
        beside = setting.interference
        traffic, ranks = None, 1
        if beside.kind == "traffic":
            traffic, ranks = self._traffic(setting, program)

        def start(argv: list[str]) -> subprocess.Popen[bytes]:
            return self._nodes.start(argv, setting.hosts, ranks_per_node=ranks)

        with disturb(
            beside.kind,
            beside.level,
            start,
            end=self._nodes.end,
            nodes=setting.hosts,
            traffic=traffic,
        ) as disturbance:
            yield disturbance

    def _traffic(self, setting: Setting, program: str) -> tuple[Traffic, int]:
        """The second benchmark, and its ranks on each node: on the GPUs that are left free."""
        if self._num_gpus is None:
            raise MachineError(
                "interference 'traffic' runs on the GPUs that a trial leaves free, and nobody "
                "knows how many the nodes have: is the NVIDIA driver there (nvidia-smi)?"
            )
        spare = spare_gpus(self._num_gpus, setting.ranks_per_host)
        if self._nodes.one_process:
            return Traffic(program, setting.ranks_per_host, spare), 1
        return Traffic(program, setting.ranks_per_host), spare
