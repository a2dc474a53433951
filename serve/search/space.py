"""The search space: subspaces by categorical knobs, with ordered knobs as axes.

After AutoCCL (Xu et al., NSDI 2025, section 3): algorithm, protocol and transport make the
*subspace*; channels, threads and chunk size are its *axes*, whose values are ordered. Threads and
transport are fixed when a process starts: a space for a running job is made of configs alone.

A space is made of the choices that exist, which need not fill a grid. A **hole** is a combination
that is not among them (invalid, or nobody measured it): it can never run, so a step along an axis
passes over it to the next choice there is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol, Transport


@dataclass(frozen=True, slots=True)
class Choice:
    """What may run: a config, and what a launch profile sets beside it; None leaves it to NCCL."""

    config: Config = ABSTAIN
    num_threads: int | None = None
    transport: Transport | None = None


#: NCCL's own choice.
DEFAULT: Final = Choice()
#: Names of the axes, in the order in which they are searched.
AXES: Final = ("num_channels", "num_threads", "chunk_bytes")

SubspaceName = tuple[Algorithm | None, Protocol | None, Transport | None]
_Values = tuple[int | None, int | None, int | None]


class SearchSpace:
    """Choices by action index. Actions that may not be played keep their index and are left out.

    Attributes, of A actions:
        choices: what each action stands for.
        default: the action that is NCCL's own choice.
        actions: those that may be played, in ascending order, the default among them.
        subspaces: the actions of each subspace; the default is in none.
        subspace_of: (A,) number of the subspace, -1 for the default and what may not be played.
        places: (A, 3) index of the value along each axis of its subspace.
        default_runs: what NCCL's own choice comes to, where that is known.
        begin: the action that runs before anything was tried.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        playable: Iterable[int] | None = None,
        *,
        default_runs: Choice | None = None,
        begin: Choice = DEFAULT,
    ) -> None:
        """Order choices; `default_runs` is what NCCL's own choice comes to, where that is known.

        Raises ValueError without NCCL's own choice, with one twice, and for a beginning that may
        not be played.
        """
        self.choices = tuple(choices)
        if len(set(self.choices)) != len(self.choices):
            raise ValueError("a choice stands in the search space twice")
        if DEFAULT not in self.choices:
            raise ValueError("a search space must hold NCCL's own choice, to fall back on")
        self.default = self.choices.index(DEFAULT)
        chosen = set(range(len(self.choices)) if playable is None else playable)
        self.actions = tuple(sorted(chosen | {self.default}))
        self.default_runs = default_runs
        self.begin = self.choices.index(begin)
        if self.begin not in self.actions:
            raise ValueError(f"a search cannot begin at {begin.config.key}: it may not be played")
        self._names, self.subspaces = self._group()
        self.subspace_of: npt.NDArray[np.int64] = np.full(len(self.choices), -1)
        self.places: npt.NDArray[np.int64] = np.zeros((len(self.choices), len(AXES)), np.int64)
        for number, actions in enumerate(self.subspaces):
            self.subspace_of[list(actions)] = number
            self._place(actions)
        self._lines = self._make_lines()

    def step(self, action: int, axis: int, count: int) -> int | None:
        """The choice `count` steps along an axis (down where negative), or the last on the way.

        None where there is no further one. Holes are passed over.
        """
        line, index = self._lines[axis][action]
        there = min(max(index + count, 0), len(line) - 1)
        return None if there == index else line[there]

    def line_length(self, action: int, axis: int) -> int:
        """How many choices lie on the line through `action` along an axis."""
        return len(self._lines[axis][action][0])

    def neighbours(self, action: int) -> list[int]:
        """Choices one step away along one axis; none of the default."""
        if action == self.default:
            return []
        steps = (self.step(action, axis, by) for axis in range(len(AXES)) for by in (1, -1))
        return [there for there in steps if there is not None]

    def start(self, number: int) -> int:
        """The action of a subspace with knobs nearest to what the default runs.

        A knob that is not known is taken as left to NCCL, else as the largest.
        """
        actions = self.subspaces[number]
        wanted = _values(self.default_runs) if self.default_runs else (None, None, None)
        return min(actions, key=lambda a: (_distance(_values(self.choices[a]), wanted), a))

    def twin(self) -> tuple[int, bool] | None:
        """The action closest to what NCCL's own choice runs, and whether it is identical.

        None where that is not known, or nothing of its subspace may be played.
        """
        number = self.default_subspace()
        if number is None or self.default_runs is None:
            return None
        action = self.start(number)
        found, wanted = _values(self.choices[action]), _values(self.default_runs)
        return action, all(a == b for a, b in zip(found, wanted, strict=True))

    def default_subspace(self) -> int | None:
        """The subspace of NCCL's own choice, or None if not known."""
        if self.default_runs is None:
            return None
        ran = self.default_runs
        for number, (algorithm, protocol, transport) in enumerate(self._names):
            same = (algorithm, protocol) == (ran.config.algorithm, ran.config.protocol)
            if same and transport in {None, ran.transport}:
                return number
        return None

    def _group(self) -> tuple[tuple[SubspaceName, ...], tuple[tuple[int, ...], ...]]:
        grouped: dict[SubspaceName, list[int]] = {}
        for action in self.actions:
            if action != self.default:
                grouped.setdefault(_subspace(self.choices[action]), []).append(action)
        return tuple(grouped), tuple(map(tuple, grouped.values()))

    def _place(self, actions: Sequence[int]) -> None:
        """Order the values of a subspace's knobs."""
        for axis in range(len(AXES)):
            values = {_values(self.choices[action])[axis] for action in actions}
            order = {value: i for i, value in enumerate(sorted(values, key=_rank))}
            for action in actions:
                self.places[action, axis] = order[_values(self.choices[action])[axis]]

    def _make_lines(self) -> tuple[Mapping[int, tuple[tuple[int, ...], int]], ...]:
        """For each axis: action -> (the actions on its line in order, its index there)."""
        found: list[dict[int, tuple[tuple[int, ...], int]]] = []
        for axis in range(len(AXES)):
            others = [other for other in range(len(AXES)) if other != axis]
            grouped: dict[tuple[int, ...], list[int]] = {}
            for action in self.actions:
                if action != self.default:
                    place = self.places[action]
                    at = (int(self.subspace_of[action]), *(int(place[other]) for other in others))
                    grouped.setdefault(at, []).append(action)
            lines: dict[int, tuple[tuple[int, ...], int]] = {}
            for actions in grouped.values():
                line = tuple(sorted(actions, key=lambda a: int(self.places[a, axis])))
                lines |= {action: (line, index) for index, action in enumerate(line)}
            found.append(lines)
        return tuple(found)


def _subspace(choice: Choice) -> SubspaceName:
    return choice.config.algorithm, choice.config.protocol, choice.transport


def _values(choice: Choice) -> _Values:
    return choice.config.num_channels, choice.num_threads, choice.config.chunk_bytes


def _rank(value: int | None) -> float:
    # What is left to NCCL goes last: for the large messages that are worth searching for, its own
    # channels, threads and chunk are the most that it opens.
    return float("inf") if value is None else value


def _distance(values: _Values, wanted: _Values) -> float:
    """Distance in doublings; AUTO has distance 0 to AUTO, and else counts as the largest value."""
    total = 0.0
    for value, want in zip(values, wanted, strict=True):
        if value == want or value is None:
            continue
        # Nothing is known of the wish: the larger, the nearer.
        total += abs(float(np.log2(value / want))) if want else 64.0 - float(np.log2(value))
    return total
