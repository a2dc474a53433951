"""Simulated times of communicators and of their processes."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.sweep.trial import Setting
from dynamiccl.simulator.noise import Noise
from dynamiccl.simulator.parts import Parts, Surroundings


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    """A simulated call: its time in parts, its surroundings (network slowdown), and its noise."""

    parts: Parts
    beside: Surroundings
    noise: Noise
    run: str
    trial: str

    def times(self, setting: Setting) -> tuple[npt.NDArray[np.float64], list[float | None]]:
        """(communicators,) us of each, and us of each process (None: in no communicator)."""
        comms, per_node = setting.comms, setting.ranks_per_host
        processes = setting.hosts * per_node
        members = ((tuple(range(processes)),)) if comms is None else comms.members
        quiet_us = np.full(len(members), self.parts.time_us(self.beside))
        if comms is None:
            times_us = quiet_us * self.noise.factor(self.run, self.trial)
        else:
            times_us = quiet_us * self.noise.factors(self.run, self.trial, comms.count)
        by_process: list[float | None] = [None] * processes
        for ranks, time_us in zip(members, times_us.tolist(), strict=True):
            for process in ranks:
                by_process[process] = time_us
        return times_us, by_process
