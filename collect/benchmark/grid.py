"""The order in which one process measures its picks: cycles over sizes, one pick a block.

nccl-tests walks all sizes once in each cycle of `-N`. A *block* is one (cycle, size): the picks of
a size are shuffled and dealt to the cycles; sizes with fewer picks than others, or none,
get NCCL's default once more, which sharpens the noise band.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dynamiccl.collect.grid import Chain, Trial, walks
from dynamiccl.collect.runner import Launch, Pick
from dynamiccl.nccl import ABSTAIN, Config, Protocol

_SLOW_BYTES_PER_S: Final = 0.25e9
_PLAIN_BYTES_PER_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class Grid:
    """The blocks of one process: `cycles[c][s]` is measured in cycle c at `chain.sizes[s]`."""

    chain: Chain
    #: What nccl-tests prints as size, and NCCL's nBytes; shape as `chain.sizes`.
    benchmark_bytes: tuple[int, ...]
    cycles: tuple[tuple[Pick, ...], ...]
    #: Picks of the launch that did not fit (another walk, or too many blocks).
    left_over: tuple[Pick, ...]

    @property
    def blocks(self) -> tuple[Pick, ...]:
        """All blocks in the order in which nccl-tests prints their rows."""
        return tuple(pick for cycle in self.cycles for pick in cycle)

    @property
    def configs(self) -> tuple[tuple[Config, ...], ...]:
        """The schedule of configs; shape [cycle][size]."""
        return tuple(tuple(pick.trial.config for pick in cycle) for cycle in self.cycles)

    def asked_from(self, block: int, launch: Launch) -> list[Pick]:
        """Picks of `launch` in the blocks from `block` on, without those that only fill gaps."""
        asked = {id(pick) for pick in launch.picks}
        return [pick for pick in self.blocks[block:] if id(pick) in asked]


def slow_seconds(grid: Grid, calls_per_half: int) -> list[float]:
    """Time limit of each block in seconds, in row order, assuming the slowest possible config.

    Two halves of calls at an algorithm bandwidth that is slow for any cluster: one channel of LL
    over two nodes of H100 makes 1.5 GB/s, so that 44 calls of 4 GiB take 126 s and are no hang.
    """
    return [
        2 * calls_per_half * size / _least_bytes_per_s(pick.trial.config)
        for cycle in grid.cycles
        for pick, size in zip(cycle, grid.benchmark_bytes, strict=True)
    ]


def _least_bytes_per_s(config: Config) -> float:
    return _SLOW_BYTES_PER_S if is_slow(config) else _PLAIN_BYTES_PER_S


def is_slow(config: Config) -> bool:
    """Whether a config is slow for large messages: LL, or one or two channels.

    In the published sweeps LL takes more than twice the best config's time from 4 MiB on (33 cells)
    and four times from 16 MiB on (23); so do up to two channels over NVLink from 4 MiB on (16; over
    sockets 1.36 times, 8).
    """
    return config.protocol is Protocol.LL or 0 < (config.num_channels or 0) <= 2


def deal(launch: Launch, *, max_blocks: int) -> Grid:
    """Assign the picks of a launch to cycles; the order of a size is seeded by its id (pure)."""
    chain = max(walks(pick.trial.size_bytes for pick in launch.picks), key=lambda c: len(c.sizes))
    hands = [_hand(launch, size) for size in chain.sizes]
    depth = min(max(map(len, hands)), max(1, max_blocks // len(chain.sizes)))
    filler = _fillers(launch, chain)
    dealt = [
        [hand[c] if c < len(hand) else next(filler[s]) for s, hand in enumerate(hands)]
        for c in range(depth)
    ]
    used = {id(pick) for cycle in dealt for pick in cycle}
    setting = launch.setting
    return Grid(
        chain,
        tuple(map(setting.benchmark_bytes, chain.sizes)),
        tuple(map(tuple, dealt)),
        tuple(pick for pick in launch.picks if id(pick) not in used),
    )


def _hand(launch: Launch, size_bytes: int) -> list[Pick]:
    hand = [pick for pick in launch.picks if pick.trial.size_bytes == size_bytes]
    random.Random(f"{launch.id}:{size_bytes}").shuffle(hand)
    return hand


#: Repeat numbers of a continuing launch's fillers start above those of the launch it continues.
_FILLERS_OF_A_LAUNCH: Final = 1_000_000


def _fillers(launch: Launch, chain: Chain) -> list[Iterator[Pick]]:
    """Endless iterators of gap-filling picks, one a size: the forced config, or NCCL's default."""
    configs = {pick.trial.config for pick in launch.picks}
    config = next(iter(configs)) if len(configs) == 1 else ABSTAIN
    known = (p.repeat for p in launch.picks if p.trial.config == config)
    first = max(known, default=-1) + 1 + launch.id.count("~") * _FILLERS_OF_A_LAUNCH
    return [_repeats(Trial(launch.setting, size, config), first) for size in chain.sizes]


def _repeats(trial: Trial, first: int) -> Iterator[Pick]:
    repeat = first
    while True:
        yield Pick(trial, repeat)
        repeat += 1
