"""Simulated times of communicators and of their processes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.sweep.trial import Setting
from dynamiccl.simulator.noise import Noise
from dynamiccl.simulator.parts import Parts, Surroundings
from dynamiccl.simulator.slow_parts import SlowPart, around


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    """A simulated call: its time in parts, its surroundings (network slowdown), and its noise."""

    parts: Parts
    beside: Surroundings
    noise: Noise
    run: str
    trial: str

    def times(
        self, setting: Setting, slow: Sequence[SlowPart]
    ) -> tuple[npt.NDArray[np.float64], list[float | None]]:
        """(communicators,) us of each, and us of each process (None: in no communicator)."""
        comms, per_node = setting.comms, setting.ranks_per_host
        processes = setting.hosts * per_node
        members = ((tuple(range(processes)),)) if comms is None else comms.members
        quiet_us = np.array([self._quiet_us(each, per_node, slow) for each in members])
        if comms is None:
            times_us = quiet_us * self.noise.factor(self.run, self.trial)
        else:
            times_us = quiet_us * self.noise.factors(self.run, self.trial, comms.count)
        by_process: list[float | None] = [None] * processes
        for ranks, time_us in zip(members, times_us.tolist(), strict=True):
            for process in ranks:
                by_process[process] = time_us
        return times_us, by_process

    def _quiet_us(self, members: Sequence[int], per_node: int, slow: Sequence[SlowPart]) -> float:
        if not slow:
            return self.parts.time_us(self.beside)
        found = around(slow, [divmod(process, per_node) for process in members])
        beside = self.beside
        both = replace(beside, intra=beside.intra * found.intra, inter=beside.inter * found.inter)
        return self.parts.time_us(both)
