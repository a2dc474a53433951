"""What online searches share, the space and the interface; and AutoCCL's search (docs/search.md).

A space is made of the choices that exist, which need not fill a grid: a step along an axis, an
ordered knob of a *subspace*, passes over a **hole** (invalid, or not measured).

A tuner decides one call after the other, each task key on its own, and is told what calls took:

* `ask` changes nothing: until it is told, a tuner answers the same.
* Where a decision takes effect some calls later, say what ran: `tell(key, time_us, action)`. Times
  of another action than the one last asked for are no answer to it; the tuner goes on asking.
* `best` is the *incumbent*, what the tuner would settle on now; first it is NCCL's own choice, or
  ours begins at `SearchSpace.begin`. A call that ran something else was a *probe*.
* Equal times give equal answers. No clock, no thread, no chance, no torch.

**AutoCCL** (Xu et al., NSDI 2025, algorithms 1 and 2) begins in the subspace of NCCL's own choice.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol, Transport

SubspaceName = tuple[Algorithm | None, Protocol | None, Transport | None]
_Knobs = tuple[int | None, int | None, int | None]
#: In the order in which they are searched.
AXES: Final = ("num_channels", "num_threads", "chunk_bytes")


@dataclass(frozen=True, slots=True)
class Choice:
    """A config, and what a launch profile sets beside it; None leaves it to NCCL."""

    config: Config = ABSTAIN
    num_threads: int | None = None
    transport: Transport | None = None

    @property
    def subspace(self) -> SubspaceName:
        """The subspace that it lies in."""
        return self.config.algorithm, self.config.protocol, self.transport

    @property
    def knobs(self) -> _Knobs:
        """Its values along AXES."""
        return self.config.num_channels, self.num_threads, self.config.chunk_bytes


DEFAULT: Final = Choice()


class SearchSpace:
    """Choices by action index. Actions that may not be played keep their index and are left out.

    Attributes:
        choices: what each action stands for.
        default: the action that is NCCL's own choice.
        actions: those that may be played, in ascending order, the default among them.
        subspaces: the actions of each subspace; the default is in none.
        default_runs: what NCCL's own choice comes to, where that is known.
        begin: the action, one of these, that runs before anything was tried.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        playable: Iterable[int] | None = None,
        *,
        default_runs: Choice | None = None,
        begin: Choice = DEFAULT,
    ) -> None:
        """Raises ValueError without NCCL's own choice."""
        self.choices = tuple(choices)
        self.default = self.choices.index(DEFAULT)
        chosen = set(range(len(self.choices)) if playable is None else playable)
        self.actions = tuple(sorted(chosen | {self.default}))
        self.default_runs = default_runs
        self.begin = self.choices.index(begin)
        grouped: dict[SubspaceName, list[int]] = {}
        for action in self.actions:
            if action != self.default:
                grouped.setdefault(self.choices[action].subspace, []).append(action)
        self._names = tuple(grouped)
        self.subspaces = tuple(map(tuple, grouped.values()))
        self._lines = [self._lines_along(axis) for axis in range(len(AXES))]

    def _lines_along(self, axis: int) -> Mapping[int, tuple[list[int], int]]:
        """Action -> (the actions on its line in order, its index there)."""
        found: dict[int, tuple[list[int], int]] = {}
        for actions in self.subspaces:
            lines: dict[tuple[int | None, ...], list[int]] = {}
            for action in sorted(actions, key=lambda a: _rank(self.choices[a].knobs[axis])):
                knobs = self.choices[action].knobs
                lines.setdefault((*knobs[:axis], *knobs[axis + 1 :]), []).append(action)
            for line in lines.values():
                found |= {action: (line, index) for index, action in enumerate(line)}
        return found

    def step(self, action: int, axis: int, count: int) -> int | None:
        """The choice `count` steps away, or the last on the way; None: no further one."""
        line, index = self._lines[axis][action]
        there = min(max(index + count, 0), len(line) - 1)
        return None if there == index else line[there]

    def line_length(self, action: int, axis: int) -> int:
        """Choices on the line through `action` along an axis."""
        return len(self._lines[axis][action][0])

    def neighbours(self, action: int) -> list[int]:
        """Choices one step away along one axis; none of the default."""
        if action == self.default:
            return []
        steps = (self.step(action, axis, by) for axis in range(len(AXES)) for by in (1, -1))
        return [there for there in steps if there is not None]

    def start(self, number: int) -> int:
        """A subspace's action with knobs nearest to what the default runs."""
        wanted = self.default_runs.knobs if self.default_runs else (None, None, None)
        actions = self.subspaces[number]
        return min(actions, key=lambda a: (_distance(self.choices[a].knobs, wanted), a))

    def twin(self) -> tuple[int, bool] | None:
        """The action closest to what NCCL's choice runs, and whether identical; None: not known."""
        number = self.default_subspace()
        if number is None or self.default_runs is None:
            return None
        action = self.start(number)
        return action, self.choices[action].knobs == self.default_runs.knobs

    def default_subspace(self) -> int | None:
        """The subspace of NCCL's own choice; None: not known."""
        if self.default_runs is None:
            return None
        *cell, transport = self.default_runs.subspace
        for number, name in enumerate(self._names):
            if [*name[:2]] == cell and name[2] in {None, transport}:
                return number
        return None


def _rank(value: int | None) -> float:
    # Last: for messages that are worth a search, what NCCL chooses is the most that it opens.
    return math.inf if value is None else value


def _distance(knobs: _Knobs, wanted: _Knobs) -> float:
    """Distance in doublings; AUTO, but to AUTO, counts as the largest value."""
    total = 0.0
    for value, want in zip(knobs, wanted, strict=True):
        if value == want or value is None:
            continue
        # Unknown: the larger, the nearer.
        total += abs(math.log2(value / want)) if want else 64.0 - math.log2(value)
    return total


Key = Hashable
#: A disturbance begins at the smallest slowdown over quiet that a Trigger looks for, and ends
#: lower: levels are continuous and seldom quite zero.
DISTURBED_FROM: Final = 0.15
DISTURBED_UNTIL: Final = 0.05
SpaceOf = Callable[[Key], SearchSpace]


class Task(ABC):
    """The search of one task key."""

    #: The action to settle on, and the one that the next call should run.
    incumbent: int
    proposal: int
    #: Nothing is left to try until an alarm.
    is_over = False

    @abstractmethod
    def tell(self, time_us: float, ran: int) -> None:
        """Record a call of action `ran`."""

    def alarm(self) -> None:  # noqa: B027 - AutoCCL never searches again
        """Interference changed."""


class Tuner:
    """An online search: the tasks of one job, each opened by its first use."""

    def __init__(self, open_task: Callable[[Key], Task]) -> None:
        self._open = open_task
        self._tasks: dict[Key, Task] = {}

    def ask(self, key: Key) -> int:
        """The action that the next call of `key` should run."""
        return self._task(key).proposal

    def tell(self, key: Key, time_us: float, action: int | None = None) -> None:
        """Record a call; None: the action of `ask` ran. Raises ValueError for a time of zero."""
        if not time_us > 0.0:
            raise ValueError(f"a call cannot have taken {time_us} us")
        task = self._task(key)
        task.tell(time_us, task.proposal if action is None else action)

    def best(self, key: Key) -> int:
        """The incumbent."""
        return self._task(key).incumbent

    def is_over(self, key: Key) -> bool:
        """Whether `key` has nothing left to try, until an alarm."""
        return self._task(key).is_over

    def alarm(self, key: Key) -> None:
        """Interference of `key` changed: what was measured is old."""
        self._task(key).alarm()

    def _task(self, key: Key) -> Task:
        if key not in self._tasks:
            self._tasks[key] = self._open(key)
        return self._tasks[key]


def is_disturbed(level: float, *, before: bool) -> bool:
    """Whether calls are disturbed; -1, unknown, keeps `before`. A change is a tuner's `alarm`.

    >>> is_disturbed(0.1, before=False), is_disturbed(0.1, before=True)
    (False, True)
    """
    if level < 0.0:
        return before
    return level >= (DISTURBED_UNTIL if before else DISTURBED_FROM)


class AutoCcl(Tuner):
    """AutoCCL's search by medians of `repeats` calls."""

    def __init__(self, space_of: SpaceOf, *, repeats: int = 1) -> None:
        super().__init__(lambda key: _Descent(space_of(key), repeats))


class _Descent(Task):
    def __init__(self, space: SearchSpace, repeats: int) -> None:
        self.incumbent = self.proposal = space.default
        self._incumbent_us = math.inf
        self._samples: list[float] = []
        self._repeats = repeats
        self._search = _all_subspaces(space)
        next(self._search)  # it asks for the default first

    def tell(self, time_us: float, ran: int) -> None:
        if self.is_over or ran != self.proposal:
            return
        self._samples.append(time_us)
        if len(self._samples) < self._repeats:
            return
        taken = median(self._samples)
        self._samples.clear()
        if taken < self._incumbent_us:
            self.incumbent, self._incumbent_us = self.proposal, taken
        try:
            self.proposal = self._search.send(taken)
        except StopIteration:
            self.proposal, self.is_over = self.incumbent, True


def _all_subspaces(space: SearchSpace) -> Generator[int, float, None]:
    """Algorithm 1, as a generator like `_descend`."""
    known = {space.default: (yield space.default)}
    first = space.default_subspace()
    for number in sorted(range(len(space.subspaces)), key=lambda number: number != first):
        yield from _descend(space, space.start(number), known)


def _descend(
    space: SearchSpace, start: int, known: dict[int, float]
) -> Generator[int, float, None]:
    """Algorithm 2, coordinate descent in one subspace: yields actions, is sent their us.

    A knob moves as long as the call gets faster, by a step in proportion to the last gain of
    bandwidth. As in the published code (gbxu/autoccl @63acb15) a knob is tried up and down, a gain
    restarts the count of failures, and the end is where no knob pays. `known` (action -> us) is
    not measured again.
    """
    here = start
    if here not in known:
        known[here] = yield here
    failures, axis, sign, stride = 0, 0, 1, 1
    while failures < 2 * len(AXES):
        there = space.step(here, axis, sign * stride)
        if there is not None and there not in known:
            known[there] = yield there
        if there is not None and known[there] < known[here]:
            gain = 1.0 - known[there] / known[here]  # of bandwidth, as a share of the new one
            stride = max(1, round(gain * space.line_length(there, axis)))
            here, failures = there, 0
            continue
        failures, stride = failures + 1, 1
        if sign > 0:
            sign = -1
        else:
            axis, sign = (axis + 1) % len(AXES), 1
