"""AutoCCL's search as a baseline: without model or data, it probes configs of the test task.

A probe is one measured time of a cell, drawn from its independent repeats. Reports give the regret
of the config that it ends with, and beside it the probes of a task that it took to get there: calls
that ran some other config in the meantime. It probes the very runs that it is scored on, so that
even its cross-fitted regret flatters it, as the oracle's does.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.policies import Actions
from dynamiccl.serve.search.autoccl import AutoCcl, Choice, Key, SearchSpace, State

#: Probes of which the median is compared, as in a job's brain (serve/brain_policies.py, MIN_CALLS).
REPEATS: Final = 3


class CoordinateDescent:
    """AutoCCL's search (serve/search/autoccl.py) on what was measured, each task by itself.

    Threads and transport are set at launch, not by call. NCCL's own choice is probed first, and
    stays unless something is faster.
    """

    name = "coordinate-descent"
    #: (T,) of the grid that was last searched.
    probes: npt.NDArray[np.int64]

    def __init__(self, catalogue: Catalogue) -> None:
        """Take the catalogue's configs."""
        self._choices = [Choice(config) for config in catalogue.configs]

    def choose(self, grid: TaskGrid) -> Actions:
        """The action that each task's search ends with; equal grids give equal searches."""
        spaces: dict[Key, SearchSpace] = {
            task: SearchSpace(self._choices, np.flatnonzero(mask).tolist())
            for task, mask in enumerate(grid.mask)
        }
        tuner = AutoCcl(spaces.__getitem__, repeats=REPEATS)
        chosen: Actions = np.empty(grid.tasks.height, dtype=np.int64)
        self.probes = np.zeros_like(chosen)
        for task in range(len(chosen)):
            random = np.random.default_rng((task, 0))
            while tuner.state(task) is not State.CONVERGED:
                action = tuner.ask(task)
                tuner.tell(task, float(random.choice(grid.samples[task, action])), action)
                self.probes[task] += 1
            chosen[task] = tuner.best(task)
        return chosen
