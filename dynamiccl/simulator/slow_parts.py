"""Slow parts of a simulated cluster: a GPU, a NIC, a node, or the link between two nodes.

A collective waits for the slowest of its ranks and links, so that one slow part slows every
communicator that it is in by its whole factor, and no other. Stated factors, fitted to nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from dynamiccl.errors import UserError
from dynamiccl.simulator.parts import Surroundings
from dynamiccl.simulator.toml_table import Table

#: A rank by its node and its GPU on it.
Place = tuple[int, int]


class SlowPart(Table):
    """One slow part; nodes and GPUs count from 0."""

    #: gpu: its links inside the node; nic: the one of a GPU; node: both of all its GPUs; link: what
    #: joins two nodes.
    kind: Literal["gpu", "nic", "node", "link"]
    node: int = Field(ge=0)
    gpu: int | None = Field(default=None, ge=0)
    to_node: int | None = Field(default=None, ge=0)
    #: Bytes take so many times as long.
    factor: float = Field(gt=1)

    @model_validator(mode="after")
    def _names_its_place(self) -> Self:
        if (self.kind in {"gpu", "nic"}) != (self.gpu is not None):
            raise ValueError("kinds 'gpu' and 'nic' name a gpu of the node, and no other kind does")
        if (self.kind == "link") != (self.to_node is not None):
            raise ValueError("kind 'link' names a second node, to_node, and no other kind does")
        return self

    @property
    def slows_inside(self) -> bool:
        """Whether it slows transfers inside a node."""
        return self.kind in {"gpu", "node"}

    @property
    def slows_between(self) -> bool:
        """Whether it slows transfers between nodes."""
        return self.kind != "gpu"

    def is_in(self, ranks: Sequence[Place]) -> bool:
        """Whether a communicator of these ranks uses it."""
        nodes = {node for node, _ in ranks}
        if self.kind == "link":
            return {self.node, self.to_node} <= nodes
        return self.node in nodes if self.gpu is None else (self.node, self.gpu) in ranks


def around(slow: Iterable[SlowPart], ranks: Sequence[Place]) -> Surroundings:
    """The slowdowns of a communicator of these ranks; 1 where none of it is slow."""
    inside, between = [1.0], [1.0]
    for part in slow:
        if part.is_in(ranks):
            inside += [part.factor] if part.slows_inside else []
            between += [part.factor] if part.slows_between else []
    return Surroundings(intra=max(inside), inter=max(between))


def parse_slow(text: str) -> SlowPart:
    """Read KIND:NODE[:GPU or node]:FACTOR; raises UserError.

    >>> parse_slow("nic:3:1:1.3").gpu, parse_slow("link:0:3:2").to_node
    (1, 3)
    """
    kind, *numbers = text.split(":")
    names = {"gpu": ("node", "gpu"), "nic": ("node", "gpu"), "link": ("node", "to_node")}
    keys = (*names.get(kind, ("node",)), "factor")
    try:
        return SlowPart.model_validate({"kind": kind, **dict(zip(keys, numbers, strict=True))})
    except ValueError as error:  # Pydantic's is one, too
        raise UserError(
            f"'{text}' is no slow part; write gpu:NODE:GPU:FACTOR, nic:NODE:GPU:FACTOR, "
            "node:NODE:FACTOR or link:NODE:NODE:FACTOR with a factor above 1, like nic:3:1:1.3"
        ) from error
