"""Domain randomisation: interference strengths, dwell times and config times vary by episode.

A policy trained with a single strength overfits to it; in deployment strengths differ (Tobin et al.
2017). Configs and NCCL's costs, which come from the data, do not vary.

K task keys, A actions.
"""

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.nccl import Protocol
from dynamiccl.simulator.scenario import MarkovLink, Scenario
from dynamiccl.simulator.world import World
from dynamiccl.train.environment import Tables


@dataclass(frozen=True, slots=True)
class Variation:
    """How much episodes differ from each other."""

    #: By which factor at most slowdowns beyond 1, and dwell times, are more or less; 1 = by none.
    most: float
    #: ln of the time of an algorithm under a protocol is off by so much (standard deviation).
    times: float

    def draw(
        self, world: World, tables: Tables, random: np.random.Generator
    ) -> tuple[World, Tables]:
        """A randomised copy of a world, and its tables."""
        found = copy.copy(world)
        found.scenario = self._scenario(world.scenario, random)
        if self.times > 0.0:
            algorithm, protocol = (
                np.maximum(each, 0) for each in (world.algorithm, world.protocol)
            )
            cell = algorithm.astype(np.int64) * len(Protocol) + protocol
            drawn = np.exp(self.times * random.standard_normal(int(cell.max()) + 1))[cell]
            for name in ("fixed_us", "intra_us", "inter_us"):
                setattr(found, name, getattr(world, name) * drawn)
            for name in ("quiet_us", "nominal_us"):  # computed from these
                vars(found).pop(name, None)
        return found, replace(tables, reference_us=found.quiet_us[:, ABSTAIN_ACTION].copy())

    def _scenario(self, scenario: Scenario, random: np.random.Generator) -> Scenario:
        links: list[Any] = []
        for link in scenario.link:
            strength, dwell = np.exp(random.uniform(-1.0, 1.0, 2) * math.log(self.most))
            if not isinstance(link, MarkovLink):
                links.append(link)
                continue
            changed = {
                "slowdowns": tuple(1.0 + strength * (each - 1.0) for each in link.slowdowns),
                "dwell_us": tuple(dwell * each for each in link.dwell_us),
            }
            links.append(link.model_copy(update=changed))
        return scenario.model_copy(update={"link": tuple(links)})
