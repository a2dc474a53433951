"""Refuses data that do not determine a parameter, and says what would have to be measured."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from dynamiccl.collect.fitting.problem import Name, Problem, Vector
from dynamiccl.errors import NotEnoughData

#: A number that changes no time by more than this when it is e times as large is not in the data.
_LEAST_EFFECT: Final = 0.02
#: Singular values below this share of the largest: two numbers that only show together.
_LEAST_SHARE: Final = 2e-3
#: What each number shows in.
_SHOWS_IN: Final[Mapping[str, str]] = {
    "base_us": "small sizes",
    "hop_us": "small sizes",
    "net_hop_us": "small sizes",
    "slice_us": "sizes on both sides of 64 KiB per channel and rank",
    "turn_us": "sizes that take many loops over the buffers",
    "proxy_us": "small sizes with few and with many channels",
    "channel_gbytes_per_s": "large sizes with few channels (num_channels = [1, 2, 4])",
    "link_share": "large sizes with NCCL's own channels",
    "inside_gbytes_per_s": "large sizes inside a node",
    "between_gbytes_per_s": "large sizes between nodes",
    "overlap": "sizes between the small and the large ones",
    "crowd_penalty": "more channels than NCCL opens by itself",
    "crowd_channels": "channel counts up to the most that can be opened",
    "small_penalty": "small sizes with many channels",
    "small_bytes": "small sizes with many channels",
}
#: Numbers that one channel count says nothing about, and how many it takes.
_NEEDS_CHANNELS: Final = {
    "proxy_us": 2,
    "channel_gbytes_per_s": 2,
    "crowd_channels": 3,
    "crowd_penalty": 3,
}


def check_data(problem: Problem) -> None:
    """Refuse too few sizes or channel counts, and cells without any repeat.

    Raises NotEnoughData with what is missing and what would be needed.
    """
    if not problem.items:
        raise NotEnoughData("no measurement runs on physics that the description has")
    if not problem.names:
        raise NotEnoughData(
            "nothing is to be fitted: no parameter of a measured cell has origin = 'fitted'; mark "
            "those that the data is to tell"
        )
    if all(item.cell.repeats < 2 for item in problem.items):
        raise NotEnoughData(
            "no config was measured twice, so its noise is not known; measure each in at least "
            "two independent launches (cycles = 2)"
        )
    complaints = [
        line
        for owner in dict.fromkeys(n.owner for n in problem.names)
        for line in _too_few(problem, owner)
    ]
    if complaints:
        raise NotEnoughData("; ".join(complaints))


def check_sensitivity(problem: Problem, x: Vector, jacobian: Vector) -> None:
    """Refuse parameters that change no time, and pairs that the data cannot tell apart.

    `jacobian`: (cells, parameters), derivatives of log time. Raises NotEnoughData.
    """
    effects = np.abs(jacobian).max(axis=0)
    low, high = problem.bounds()
    at_bound = (x - low < 1e-3) | (high - x < 1e-3)
    idle = [
        name
        for name, effect, bound in zip(problem.names, effects, at_bound, strict=True)
        if effect < _LEAST_EFFECT and not bound
    ]
    if idle:
        raise NotEnoughData(_unseen(idle))
    moving = ~at_bound
    if moving.sum() < 2:
        return
    scaled = jacobian[:, moving] / np.linalg.norm(jacobian[:, moving], axis=0)
    _, singular, directions = np.linalg.svd(scaled, full_matrices=False)
    if singular[-1] < _LEAST_SHARE * singular[0]:
        names = [name for name, free in zip(problem.names, moving, strict=True) if free]
        pair = sorted(np.argsort(-np.abs(directions[-1]))[:2])
        raise NotEnoughData(
            "their effects cannot be separated: " + _unseen([names[index] for index in pair])
        )


def _too_few(problem: Problem, owner: str) -> list[str]:
    names = [name.number for name in problem.names if name.owner == owner]
    mine = [item for item in problem.items if owner in {"links", item.key}]
    sizes = {item.cell.call.size_bytes for item in mine}
    counts = {item.work.num_channels for item in mine}
    lines = []
    if len({(i.cell.call.size_bytes, i.work.num_channels) for i in mine}) < len(names):
        lines.append(
            f"{owner} has {len(names)} numbers to fit ({', '.join(names)}) and only "
            f"{len(mine)} measured cells of {len(sizes)} sizes; measure at least {len(names)} "
            "sizes or channel counts of it"
        )
    lines += [
        f"{owner}/{number} cannot be determined from {len(counts)} channel count(s); measure "
        f"{_SHOWS_IN[number]}"
        for number, least in _NEEDS_CHANNELS.items()
        if number in names and len(counts) < least
    ]
    return lines


def _unseen(names: Sequence[Name]) -> str:
    told = [f"{name} (shows in {_SHOWS_IN[name.number]})" for name in names]
    return (
        f"the data do not determine {' and '.join(told)}; measure that, or mark the number as a "
        "prior"
    )
