"""Selects the settings of a baseline on the validation bins."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.policies import Actions, Policy, probes_of

S = TypeVar("S")


class Picked:
    """For each system the setting with the least mean regret on its validation tasks.

    Each on its own, since one noisy system would else decide for all. The first of equals, and for
    systems without validation tasks the one that is best for most systems (the first, if none has).
    """

    def __init__(
        self,
        make: Callable[[S], Policy],
        settings: Sequence[S],
        validation: TaskGrid,
        again: Callable[[S], Policy] | None = None,
    ) -> None:
        """Make a policy of every setting and judge it; `again` makes those that are picked anew."""
        if not settings:
            raise ValueError("there are no settings to pick from")
        policies = [make(setting) for setting in settings]
        self.name = policies[0].name
        systems = validation.tasks["system"].to_numpy()
        regrets = [validation.regret(policy.choose(validation)) for policy in policies]
        self._of_system = {
            str(system): int(np.argmin([float(r[systems == system].mean()) for r in regrets]))
            for system in np.unique(systems)
        }
        counts = np.bincount(list(self._of_system.values()), minlength=1)
        self._of_others = int(np.argmax(counts))
        picked = {*self._of_system.values(), self._of_others}
        self._policies = {i: again(settings[i]) if again else policies[i] for i in picked}
        self.setting_of = {system: settings[i] for system, i in self._of_system.items()}

    def choose(self, grid: TaskGrid) -> Actions:
        """The actions of each task's selected policy."""
        systems = grid.tasks["system"].to_list()
        picked = np.array([self._of_system.get(str(s), self._of_others) for s in systems])
        chosen: Actions = np.empty(len(picked), dtype=np.int64)
        self.probes = np.zeros(len(picked), dtype=np.int64)
        for index in np.unique(picked):
            rows = picked == index
            chosen[rows] = self._policies[index].choose(grid)[rows]
            self.probes[rows] = probes_of(self._policies[index], grid)[rows]
        return chosen
