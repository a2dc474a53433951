"""Several communicators at once: how NCCL_TESTS_SPLIT divides the processes of nccl-tests.

With `NCCL_TESTS_SPLIT="<operation> <value>"` (nccl-tests 2.14, `src/common.cu`, run) the colour of
a process is its number in the job, operation, value; processes of one colour make a communicator.
All of them run the same calls at the same time, and what is printed is the mean over all ranks.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, Self

_OPERATIONS: Final[Mapping[str, Callable[[int, int], int]]] = {
    "AND": lambda process, value: process & value,
    "OR": lambda process, value: process | value,
    "MOD": lambda process, value: process % value,
    "DIV": lambda process, value: process // value,
}
_SYMBOLS: Final = {"&": "AND", "|": "OR", "%": "MOD", "/": "DIV"}
_SPLIT: Final = re.compile(
    r"\s*(AND|OR|MOD|DIV|[&|%/])\s*(0x[0-9a-f]+|0b[01]+|0|[1-9]\d*)\s*", re.I
)
#: A colour is an `int` of C.
_MOST: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Comms:
    """The communicators of one launch: each of them has this shape."""

    num_nodes: int
    ranks_per_node: int
    #: The processes of each communicator, ascending; shape [communicator][rank].
    members: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """How many run at the same time."""
        return len(self.members)


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """An operation on the number of a process, and its operand."""

    operation: str
    value: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what nccl-tests reads; raises ValueError.

        >>> Split.parse("MOD 8").text, Split.parse("&0x7").text
        ('MOD 8', 'AND 0x7')
        """
        match = _SPLIT.fullmatch(text)
        value = int(match[2], 0) if match else 0
        if match is None or value > _MOST:
            raise ValueError(
                f"'{text}' is no split; write AND, OR, MOD or DIV and a number, like 'MOD 8'"
            )
        split = cls(_SYMBOLS.get(match[1], match[1].upper()), value)
        if split.operation in {"MOD", "DIV"} and not value:
            raise ValueError(f"'{text}' divides by 0; give a number of processes")
        return split

    @property
    def text(self) -> str:
        """As nccl-tests reads it, one spelling for each split: masks in hexadecimal."""
        is_mask = self.operation in {"AND", "OR"}
        return f"{self.operation} {self.value:#x}" if is_mask else f"{self.operation} {self.value}"

    def colour(self, process: int) -> int:
        """The number of the communicator that a process belongs to."""
        return _OPERATIONS[self.operation](process, self.value)

    def comms(self, num_nodes: int, ranks_per_node: int, *, spare: bool = False) -> Comms:
        """The communicators of a job of so many nodes, one process for each GPU, node by node.

        Raises ValueError where they are not of one shape, or are less than two; with `spare`
        single processes may be left over, which are in none.

        >>> Split.parse("MOD 8").comms(4, 8).members[1]
        (1, 9, 17, 25)
        """
        return _comms(self, num_nodes, ranks_per_node, spare)


@cache
def _comms(split: Split, num_nodes: int, ranks_per_node: int, spare: bool) -> Comms:
    groups: dict[int, list[int]] = defaultdict(list)
    for process in range(num_nodes * ranks_per_node):
        groups[split.colour(process)].append(process)
    job = f"{num_nodes}x{ranks_per_node}"
    several = (
        [group for group in groups.values() if len(group) > 1] if spare else [*groups.values()]
    )
    shapes = {_shape(group, ranks_per_node) for group in several}
    if len(shapes) != 1 or None in shapes:
        listed = ", ".join(f"{n} of {k}" for k, n in sorted(Counter(map(len, several)).items()))
        raise ValueError(
            f"split '{split.text}' makes no equal communicators of {job} processes "
            f"({listed or 'none'} ranks); give one that shares nodes out evenly, like "
            f"'MOD {ranks_per_node}' or 'DIV {ranks_per_node}'"
        )
    (shape,) = shapes
    assert shape is not None
    if len(several) < 2 and not spare:
        raise ValueError(f"split '{split.text}' leaves the {job} processes one communicator")
    if shape == (1, 1):
        raise ValueError(f"split '{split.text}' leaves each of the {job} processes alone")
    return Comms(*shape, tuple(map(tuple, several)))


def _shape(group: list[int], ranks_per_node: int) -> tuple[int, int] | None:
    """Nodes and ranks on each of them; None where these differ."""
    on_node = Counter(process // ranks_per_node for process in group)
    counts = set(on_node.values())
    return (len(on_node), counts.pop()) if len(counts) == 1 else None
