"""AutoCCL's search as an online tuner: coordinate descent in every subspace.

Algorithm 1 (Xu et al., NSDI 2025): visit the subspaces one after the other, descend in each
(algorithm 2), keep the fastest config of all. Each call runs one candidate until the search is
over: no prediction, no limit on the cost of a probe, no spreading over time. It never searches
again.
"""

from collections.abc import Generator
from statistics import median
from typing import Final, Literal

import numpy as np

from dynamiccl.serve.search.space import AXES, SearchSpace
from dynamiccl.serve.search.tuner import Key, SpaceOf, State, check_time

#: Where the descent in a subspace begins: at what NCCL's own choice would set, or anywhere.
Start = Literal["default", "random"]
#: Calls of which the median is compared; more than one only pays under noise.
REPEATS: Final = 1


class _Task:
    """The search of one task key."""

    def __init__(self, space: SearchSpace, start: Start, random: np.random.Generator) -> None:
        self.incumbent = space.default
        #: Median of the incumbent's measured calls, us.
        self.incumbent_us = float("inf")
        self.proposal = space.default
        self.state = State.IDLE
        self.samples: list[float] = []
        self._search = _all_subspaces(space, start, random)
        next(self._search)  # it asks for the default first

    def resolve(self, time_us: float) -> None:
        """Record the time of the candidate, and move on to the next."""
        improved = time_us < self.incumbent_us
        if improved:
            self.incumbent, self.incumbent_us = self.proposal, time_us
        try:
            self.proposal = self._search.send(time_us)
        except StopIteration:
            self.proposal, self.state = self.incumbent, State.CONVERGED
        else:
            self.state = State.IMPROVING if improved else State.ADVANCE


class AutoCcl:
    """AutoCCL's search over all task keys of one job."""

    def __init__(
        self,
        space_of: SpaceOf,
        *,
        start: Start = "default",
        repeats: int = REPEATS,
        seed: int = 0,
    ) -> None:
        """Search the space of each key.

        Raises ValueError for fewer than one repeat.
        """
        if repeats < 1:
            raise ValueError(f"a candidate cannot be measured {repeats} times; take 1 or more")
        self._space_of, self._start, self._repeats = space_of, start, repeats
        self._random = np.random.default_rng(seed)
        self._tasks: dict[Key, _Task] = {}

    def ask(self, key: Key) -> int:
        """The candidate that is being measured; the incumbent when there is none."""
        task = self._task(key)
        if task.state is not State.CONVERGED:
            task.state = State.PROBING
        return task.proposal

    def tell(self, key: Key, time_us: float, action: int | None = None) -> None:
        """Record a call; after `repeats` of the candidate, move on to the next."""
        check_time(time_us)
        task = self._task(key)
        ran = task.proposal if action is None else action
        if task.state is State.CONVERGED or ran != task.proposal:
            return
        task.samples.append(time_us)
        if len(task.samples) >= self._repeats:
            taken = median(task.samples)
            task.samples.clear()
            task.resolve(taken)

    def best(self, key: Key) -> int:
        """The fastest action so far."""
        return self._task(key).incumbent

    def state(self, key: Key) -> State:
        """The state of the search of `key`."""
        return self._task(key).state

    def alarm(self, key: Key | None = None) -> None:
        """Do nothing: AutoCCL never searches again."""

    def _task(self, key: Key) -> _Task:
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = _Task(self._space_of(key), self._start, self._random)
        return task


def _all_subspaces(
    space: SearchSpace, start: Start, random: np.random.Generator
) -> Generator[int, float, None]:
    """Algorithm 1, as a generator like `_descend`."""
    known = {space.default: (yield space.default)}
    numbers = list(range(len(space.subspaces)))
    if start == "random":
        random.shuffle(numbers)
    else:
        first = space.default_subspace()
        numbers.sort(key=lambda number: number != first)
    for number in numbers:
        if start == "random":
            begin = int(random.choice(space.subspaces[number]))
        else:
            begin = space.start(number)
        yield from _descend(space, begin, known)


def _descend(space: SearchSpace, start: int, known: dict[int, float]) -> Generator[int, float, int]:
    """Algorithm 2, coordinate descent in one subspace: yields actions to measure, is sent their us.

    Returns the fastest action. Each knob in turn is moved as long as the call gets faster; the step
    is in proportion to the last gain of bandwidth, and the least step after one that did not pay.
    Where the paper leaves something open, this is what its published code does (gbxu/autoccl
    @63acb15): a knob is tried upwards and downwards, a gain starts the count of failures anew, and
    the subspace is done when no knob pays either way. What is in `known`, the times so far by
    action, is not measured again.
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
    return here
