"""Which communicator a process belongs to: `NCCL_TESTS_SPLIT` (`src/common.cu`, run).

The mask is read first. An operation is looked for in the order AND, OR, MOD, DIV, by its name or
its symbol; a value that is no number leaves all processes one colour. Releases before 2.14 know the
mask only, and a build without MPI takes each process for the only one.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

from dynamiccl.nccl import NcclVersion
from tests.fakes.nccl_tests.world import World

_SINCE: Final = NcclVersion(2, 14)
_OPERATIONS: Final[tuple[tuple[str, str, Callable[[int, int], int]], ...]] = (
    ("AND", "&", lambda process, value: process & value),
    ("OR", "|", lambda process, value: process | value),
    ("MOD", "%", lambda process, value: process % value),
    ("DIV", "/", lambda process, value: process // value),
)


def colours(world: World, environment: Mapping[str, str], tests: NcclVersion) -> list[int]:
    """The colour of each process."""
    mask = environment.get("NCCL_TESTS_SPLIT_MASK")
    if mask is not None:
        bits = _number(mask, 16) or 0
        return [process & bits for process in range(world.size)]
    split = environment.get("NCCL_TESTS_SPLIT", "") if tests >= _SINCE else ""
    for name, symbol, operation in _OPERATIONS:
        for word in (name, symbol):
            if split[: len(word)].upper() == word:
                value = _number(split[len(word) :].strip(), 0)
                if value is not None:
                    return [operation(process, value) for process in range(world.size)]
    return [0] * world.size


def group_world(world: World, colour_of: list[int]) -> World:
    """The processes of one's own colour, as one's communicator sees them."""
    members = [p for p in range(world.size) if colour_of[p] == colour_of[world.rank]]
    return World(
        rank=members.index(world.rank),
        size=len(members),
        local_rank=world.local_rank,
        hosts=tuple(world.hosts[process] for process in members),
        has_host_id=world.has_host_id,
    )


def slowdowns(world: World, colour_of: list[int], environment: Mapping[str, str]) -> list[float]:
    """By what factor the communicator of each process is slower: FAKE_SLOW, `PROCESS:FACTOR`.

    A communicator waits for its slowest process.
    """
    slow: dict[int, float] = {}
    for part in filter(None, environment.get("FAKE_SLOW", "").split(",")):
        process, _, factor = part.partition(":")
        colour = colour_of[int(process)]
        slow[colour] = max(slow.get(colour, 1.0), float(factor))
    return [slow.get(colour, 1.0) for colour in colour_of][: world.size]


def _number(text: str, base: int) -> int | None:
    """As strtoul reads the start of a text, and `0b` before it."""
    match = re.match(r"0[bB]([01]+)|0[xX]([0-9a-fA-F]+)|([0-9a-fA-F]+)", text)
    if match is None:
        return None
    binary, hexadecimal, plain = match.groups()
    if binary and not base:
        return int(binary, 2)
    if hexadecimal:
        return int(hexadecimal, 16)
    if base == 16:
        return int(plain or binary, 16)
    digits = re.match(r"\d+", plain or "")
    return int(digits[0], 8 if digits[0][0] == "0" else 10) if digits else None
