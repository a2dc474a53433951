"""The `only` key of a sweep file: single tasks of the grid, under NCCL's default and one config.

A gate needs no more than that: a policy wants another config at each size, and the grid of all of
them would be most of the sweep that it was trained on.
"""

from dataclasses import dataclass
from typing import Self

from dynamiccl.collect.sweep.settings import SweepFile
from dynamiccl.collect.sweep.trial import Setting
from dynamiccl.errors import InvalidSweep
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol


@dataclass(frozen=True, slots=True)
class Task:
    """A workload, whatever launch profile and interference it is measured under."""

    collective: Collective
    num_nodes: int
    ranks_per_node: int
    size_bytes: int
    #: How a launch makes several communicators; what `only` names has one.
    split: str = ""

    @classmethod
    def of(cls, setting: Setting, size_bytes: int) -> Self:
        """The task of a trial."""
        shape = (setting.num_nodes, setting.ranks_per_node)
        return cls(setting.collective, *shape, size_bytes, setting.split)


def only_of(file: SweepFile, *, where: str) -> dict[Task, list[Config]] | None:
    """Task -> configs that are measured, NCCL's default first; None: the whole grid is.

    Raises UnknownName, and InvalidSweep for what the grid does not hold.
    """
    if not file.only:
        return None
    groups = {(g.num_nodes, g.ranks_per_node) for g in file.groups if g.split is None}
    sizes, collectives = set(file.sizes.ladder()), {Collective.parse(c) for c in file.collectives}
    wanted: dict[Task, list[Config]] = {}
    for index, one in enumerate(file.only):
        place = f"{where}: only.{index}"
        collective = Collective.parse(one.collective, where=f"{place}: collective")
        config = Config(
            Algorithm.parse(one.algorithm, where=f"{place}: algorithm"),
            Protocol.parse(one.protocol, where=f"{place}: protocol"),
            one.num_channels or None,
            one.chunk_size or None,
        )
        _check(place, "collective", collective.wire, collective in collectives)
        group = (one.num_nodes, one.ranks_per_node)
        _check(place, "group", f"{group[0]}x{group[1]}", group in groups)
        _check(place, "algorithm", one.algorithm, one.algorithm in file.algorithms)
        _check(place, "protocol", one.protocol, one.protocol in file.protocols)
        _check(place, "channel count", one.num_channels, one.num_channels in file.num_channels)
        _check(place, "chunk size", one.chunk_size, one.chunk_size in file.chunk_sizes)
        for size in one.sizes:
            _check(place, "size", size, size in sizes)
            configs = wanted.setdefault(Task(collective, *group, size), [ABSTAIN])
            if config not in configs:
                configs.append(config)
    return wanted


def _check(place: str, what: str, value: object, held: bool) -> None:
    if not held:
        raise InvalidSweep(
            f"{place}: the grid has no {what} {value}; add it to the file's own keys"
        )
