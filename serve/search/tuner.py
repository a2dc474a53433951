"""The interface of online searches.

A tuner decides one call after the other, each task key on its own, and is told what the calls took:

    tuner = AutoCcl(lambda key: space)          # or PolicySearch(lambda key: space, prior_of)
    while job:
        action = tuner.ask(key)                 # index into space.choices; any hashable key
        tuner.tell(key, time_of(action))        # us, of the call that ran what was asked

* `ask` changes nothing: until it is told, a tuner answers the same.
* Where a decision takes effect some calls later, say what ran: `tell(key, time_us, action)`. Times
  of another action than the one last asked for are no answer to it; the tuner goes on asking.
* `best` is the *incumbent*, what the tuner would settle on now. A call that ran something else was
  a *probe*. The first incumbent is NCCL's own choice, or ours begins at `SearchSpace.begin`.
* `alarm` says that the surroundings changed (the Trigger agent): what was measured is old.
* Equal seeds and equal times give equal answers. No clock, no thread, no torch.

Keys are opened by the first `ask` or `tell`. A settled key costs a few microseconds a call.
"""

from collections.abc import Callable, Hashable
from enum import StrEnum
from typing import Final, Protocol

from dynamiccl.serve.search.space import SearchSpace

Key = Hashable
#: Levels of interference are continuous and seldom quite zero. A disturbance begins where calls
#: take so much longer than quiet, the smallest slowdown that a Trigger looks for, and it ends below
#: the other.
DISTURBED_FROM: Final = 0.15
DISTURBED_UNTIL: Final = 0.05
#: What may be tried for a task key.
SpaceOf = Callable[[Key], SearchSpace]


class State(StrEnum):
    """The state of the search of a task key (AutoCCL's names)."""

    #: Nothing was measured yet, or nothing may be tried for now: the incumbent runs.
    IDLE = "idle"
    #: A probe was asked for and its time is awaited.
    PROBING = "probing"
    #: The last probe was better: it is the incumbent now, and the search goes on from it.
    IMPROVING = "improving"
    #: The last probe was no better: the search turns to the next direction, knob or subspace.
    ADVANCE = "advance"
    #: Nothing is left to try; the incumbent runs until an alarm.
    CONVERGED = "converged"


class Tuner(Protocol):
    """An online search over configs."""

    def ask(self, key: Key) -> int:
        """The action that the next call of `key` should run."""
        ...

    def tell(self, key: Key, time_us: float, action: int | None = None) -> None:
        """Record that a call of `key` with `action` took `time_us`; None: the action of `ask`.

        Raises ValueError for a time that is not above zero.
        """
        ...

    def best(self, key: Key) -> int:
        """The incumbent: the action to settle on now."""
        ...

    def state(self, key: Key) -> State:
        """The state of the search of `key`."""
        ...

    def alarm(self, key: Key | None = None) -> None:
        """Interference of `key`, or of every key, changed."""
        ...


def check_time(time_us: float) -> None:
    """Raises ValueError for a time that is not above zero."""
    if not time_us > 0.0:
        raise ValueError(f"a call cannot have taken {time_us} us")


def is_disturbed(level: float, *, before: bool) -> bool:
    """Whether a task key is disturbed at an interference level; -1, unknown, changes nothing.

    A tuner's `alarm` is due when this changes, either way.

    >>> is_disturbed(0.1, before=False), is_disturbed(0.1, before=True)
    (False, True)
    """
    if level < 0.0:
        return before
    return level >= (DISTURBED_UNTIL if before else DISTURBED_FROM)
