"""Measurements of a system with known parameters, and published ones."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamiccl.datasets.store import measurements_table, write_part
from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from dynamiccl.simulator.system import Call, Group
from dynamiccl.simulator.systems import (
    Origin,
    Parameter,
    ParametricSystem,
    SystemFile,
    system_file,
)
from tests.rows import forced

SWEEPS = Path(__file__).parents[2].parent / "shared" / "data" / "sweeps"
NEEDS_SWEEPS = pytest.mark.skipif(not SWEEPS.is_dir(), reason="the measured data is not beside us")
NODE = Group(1, 8)
SIZES = tuple(1 << k for k in range(12, 31))
CHANNELS = (1, 4, 16, 32)
KEPT = ("links", "Ring/Simple")
RING = Algorithm.Ring


def ring_only(change: Callable[[float], float] = lambda value: value) -> SystemFile:
    """B300 with what belongs to a ring in Simple to be fitted, started from changed numbers."""
    file = system_file("b300-nvlink")

    def freed(name: str, held: Parameter) -> Parameter:
        if held.origin is not Origin.FITTED:
            return held
        if name not in KEPT:
            return held.model_copy(update={"origin": Origin.PRIOR})
        return held.model_copy(update={"value": change(held.value)})

    cells = tuple(
        cell.model_copy(
            update={
                key: freed(cell.key, getattr(cell, key))
                for key, field in type(cell).model_fields.items()
                if field.annotation is Parameter
            }
        )
        for cell in file.cells
    )
    inside = file.links.inside_gbytes_per_s
    links = file.links.model_copy(update={"inside_gbytes_per_s": freed("links", inside)})
    rules = file.fit.model_copy(update={"systems": (), "min_bytes": 0})
    return file.model_copy(update={"cells": cells, "links": links, "fit": rules})


def rows(
    *,
    sizes: Sequence[int] = SIZES,
    channels: Sequence[int] = CHANNELS,
    repeats: int = 2,
    noise: float = 0.0,
    system: str = "box",
) -> list[dict[str, Any]]:
    """A sweep of Ring in Simple over sizes and channels, as B300's own file would have it."""
    truth = ParametricSystem(system_file("b300-nvlink"))
    random = np.random.default_rng(1)
    found = []
    for size, count, repeat in product(sizes, channels, range(repeats)):
        config = Config(RING, Protocol.Simple, count)
        quiet_us = truth.parts(Call(NODE, Collective.AllReduce, size), config).quiet_us
        time_us = quiet_us * float(np.exp(random.normal(0.0, noise)))
        columns = {"size_bytes": size, "repeat": repeat, "system": system}
        found.append(forced("Ring", "Simple", time_us, channels=count, **columns))
    return found


def store_of(folder: Path, *parts: list[dict[str, Any]]) -> Path:
    """A data directory of some rows."""
    for part in parts:
        write_part(folder, measurements_table(part), provenance={})
    return folder
