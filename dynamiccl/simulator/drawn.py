"""Random systems whose times do not follow NCCL's cost table.

* `perturbed`: a parametric system (B300, GB10, A100) with every time and bandwidth of its physics
  multiplied by a log-normal factor of its own (sd `log 1.5`: about +-50 %).
* `FieldSystem`: H100 nodes, every time multiplied by exp of a smooth random field over size, nodes,
  ranks a node and channels, one for each (collective, algorithm, protocol), sd 0.3 (random Fourier
  features of a Gaussian process, Rahimi and Recht 2007).

NCCL's decisions and costs stay, and equal seeds give equal systems.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import Config
from dynamiccl.simulator.h100_system import H100System
from dynamiccl.simulator.parameters import LINK_NUMBERS, Parameter, SystemFile
from dynamiccl.simulator.parts import Parts
from dynamiccl.simulator.system import UNTOUCHED, Call, Launch
from dynamiccl.simulator.systems import parametric_system, shipped_file

#: What is multiplied, of a cell; its shares and the overlap are no quantities of their own.
PERTURBED: Final = (
    "base_us",
    "hop_us",
    "net_hop_us",
    "slice_us",
    "turn_us",
    "proxy_us",
    "channel_gbytes_per_s",
    "crowd_penalty",
    "crowd_channels",
    "small_penalty",
    "small_bytes",
)
SIGMA: Final = math.log(1.5)
FIELD_SIGMA: Final = 0.3
_FEATURES: Final = 64
#: Over how many octaves of size, nodes, ranks a node and channels the field changes.
_LENGTHS: Final = np.array([4.0, 1.5, 1.5, 1.5])


def perturbed(name: str, seed: int) -> Any:
    """A built-in parametric system with randomly scaled physics."""
    file = shipped_file(name)
    random = np.random.default_rng((seed, *name.encode()))

    def moved(told: Parameter) -> Parameter:
        factor = float(np.exp(random.normal(0.0, SIGMA)))
        return told.model_copy(update={"value": told.value * factor})

    def with_moved(table: Any, names: Sequence[str]) -> Any:
        return table.model_copy(update={each: moved(getattr(table, each)) for each in names})

    cells = tuple(with_moved(cell, PERTURBED) for cell in file.cells)
    links = with_moved(file.links, LINK_NUMBERS)
    made: SystemFile = file.model_copy(update={"cells": cells, "links": links})
    return parametric_system(made)


class FieldSystem:
    """H100 nodes with times scaled by a random field; see the module."""

    def __init__(self, seed: int) -> None:
        """The fields are drawn when first used."""
        self._inner = H100System()
        self._seed = seed
        self._fields: dict[tuple[int, ...], _Field] = {}

    def __getattr__(self, name: str) -> Any:
        """Everything else is that of the H100 nodes."""
        return getattr(self._inner, name)

    def parts(self, call: Call, config: Config, launch: Launch = UNTOUCHED) -> Parts:
        """The nodes' time in parts, all scaled by the field."""
        found = self._inner.parts(call, config, launch)
        key = (int(call.collective), int(found.algorithm), int(found.protocol))
        if key not in self._fields:
            self._fields[key] = _Field((self._seed, *key))
        place = np.log2(
            [call.size_bytes, call.group.num_nodes, call.group.ranks_per_node, found.num_channels]
        )
        factor = math.exp(self._fields[key](place))
        return replace(
            found,
            fixed_us=found.fixed_us * factor,
            intra_us=found.intra_us * factor,
            inter_us=found.inter_us * factor,
        )


class _Field:
    """A smooth random function of a place (4,), sd FIELD_SIGMA."""

    def __init__(self, seed: Sequence[int]) -> None:
        random = np.random.default_rng(seed)
        self._waves = random.normal(size=(_FEATURES, len(_LENGTHS))) / _LENGTHS
        self._phases = random.uniform(0.0, 2.0 * math.pi, _FEATURES)
        self._weights = random.normal(size=_FEATURES) * FIELD_SIGMA * math.sqrt(2.0 / _FEATURES)

    def __call__(self, place: npt.NDArray[np.float64]) -> float:
        return float(np.cos(self._waves @ place + self._phases) @ self._weights)
