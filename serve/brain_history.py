"""The input of a brain: the communicator, and the latest calls of its task keys."""

from dataclasses import dataclass

from dynamiccl.datasets.history import WINDOW_LENGTH, Call
from dynamiccl.nccl import Collective
from dynamiccl.serve.table import MAX_BINS, DecisionTable


@dataclass(frozen=True, slots=True)
class BrainConfig:
    """The communicator that asks."""

    #: Its artifact's directory, on the leader's machine.
    artifact: str
    system: str
    #: NCCL's own nNodes.
    num_nodes: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class KeyCalls:
    """One task key of a communicator, (collective, size bin), and its latest calls.

    Raises ValueError for what no communicator has.
    """

    collective: Collective
    bin: int
    #: Oldest first, at most WINDOW_LENGTH.
    calls: tuple[Call, ...]
    #: Calls of the key that have been timed so far, of which `calls` are the last; modulo 256, as a
    #: message has it, is enough to tell new ones from those that were shown before. None: the
    #: leader does not say.
    num_timed: int | None = None

    def __post_init__(self) -> None:
        if not self.collective.tunable or not 0 <= self.bin < MAX_BINS:
            raise ValueError(f"{self.collective.wire} at bin {self.bin} is in no table")
        if len(self.calls) > WINDOW_LENGTH:
            raise ValueError(f"{len(self.calls)} calls are more than a window's {WINDOW_LENGTH}")


@dataclass(frozen=True, slots=True)
class History:
    """A communicator's task keys with their latest calls."""

    #: Task keys with at least one timed call.
    tasks: tuple[KeyCalls, ...]
    #: In force now; None while NCCL's own choice stands everywhere.
    table: DecisionTable | None
