"""The simulated worlds of the benchmark, whose true times do not follow NCCL's cost table.

A kind of world is what is drawn (dynamiccl/simulator/drawn.py) and what is swept of it: group
shapes, collectives, configs, and half-octave sizes from 1 KiB to 1 GiB.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from dynamiccl.collect.simulated import simulate
from dynamiccl.simulator.drawn import FieldSystem, perturbed

#: Shapes of the H100 nodes; left out by turns.
SHAPES: Final = tuple((nodes, ranks) for nodes in (2, 4, 8, 16, 32) for ranks in (4, 8))
SWEEP: Final = """
name = "{name}"
system = "{system}"
collectives = [{collectives}]
algorithms = [{algorithms}]
groups = [{groups}]
sizes = {{ min = "1K", max = "1G", steps_per_octave = 2 }}
nccl_version = "{version}"
cycles = {cycles}
{channels}
[simulator]
seed = {seed}
{noise}
"""
NO_NOISE: Final = "noise_sigma = 0.0\ntail_probability = 0.0\ndrift_sigma = 0.0"
FIVE: Final = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")


@dataclass(frozen=True, slots=True)
class World:
    """A kind of world, and what is swept of it."""

    make: Callable[[int], Any]
    shapes: Sequence[tuple[int, int]]
    algorithms: Sequence[str]
    collectives: Sequence[str] = FIVE
    channels: Sequence[int] = ()

    def sweep(self, out: Path, seed: int, name: str, cycles: int, noise: str) -> Path:
        """Write a sweep of one draw; returns its data set."""
        system = self.make(seed)
        groups = [f"{{ num_nodes = {n}, ranks_per_node = {r} }}" for n, r in self.shapes]
        text = SWEEP.format(
            name=name,
            system=system.name,
            collectives=_quoted(self.collectives),
            algorithms=_quoted(self.algorithms),
            groups=", ".join(groups),
            version=system.nccl_version,
            cycles=cycles,
            channels=f"num_channels = {list(self.channels)}" if self.channels else "",
            seed=seed,
            noise=noise,
        )
        return simulate(text, out, system)


WORLDS: Final[Mapping[str, World]] = {
    "h100": World(
        FieldSystem,
        SHAPES,
        ("Ring", "Tree", "NVLSTree"),
        ("AllReduce", "AllGather", "ReduceScatter"),
    ),
    "b300": World(
        partial(perturbed, "b300-nvlink"),
        [(1, 8)],
        ("Ring", "Tree", "NVLS"),
        channels=(4, 8, 16, 24, 32),
    ),
    "gb10": World(
        partial(perturbed, "gb10-roce"), [(4, 1)], ("Ring", "Tree"), channels=(1, 2, 4, 8)
    ),
    "a100": World(
        partial(perturbed, "a100-nvswitch"), [(1, 8)], ("Ring", "Tree"), channels=(2, 4, 8, 16, 24)
    ),
}


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
