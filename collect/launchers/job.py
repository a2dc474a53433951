"""Input and output of a launcher: a job in, a command out."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Job:
    """A program to run on nodes: `ranks_per_node` processes on each of `num_nodes`."""

    #: The program and its arguments, as they are inside the container where there is one.
    argv: tuple[str, ...]
    #: What must be set on every rank.
    env: Mapping[str, str] = field(default_factory=dict)
    num_nodes: int = 1
    ranks_per_node: int = 1
    #: Variables that must be absent on every rank.
    unset: tuple[str, ...] = ()
    #: Whether it runs beside another step of the same allocation.
    overlap: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes together."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True)
class Command:
    """What to start on this machine: an argument vector, and changes to our environment."""

    argv: tuple[str, ...]
    #: Set in the environment of the started process, over what is there.
    env: Mapping[str, str] = field(default_factory=dict)
    #: Taken out of the environment of the started process.
    unset: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The equivalent POSIX shell line, for logs and `plan`."""
        changes = [word for name in self.unset for word in ("-u", name)]
        changes += [f"{name}={value}" for name, value in sorted(self.env.items())]
        return shlex.join([*(["env"] if changes else []), *changes, *self.argv])
