"""Q-learning over a table: what Pensieve compares its A3C with (Mao et al. 2017, section 5.1).

The state of a task key is how slow its last call was, in `EDGES` bins, and what config ran it; the
table holds what each config earned in each state. One table for all jobs.

N jobs, K task keys, A actions, S = len(EDGES) + 1 levels of slowdown.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
from scenario_rivals import Deciding

from dynamiccl.datasets.reward import reward
from dynamiccl.evaluate.simulate.players import Actions
from dynamiccl.evaluate.simulate.rollout import roll_out
from dynamiccl.simulator.world import CallResults
from dynamiccl.train.environment import CollectiveEnv

#: Slowdowns over the quiet time of NCCL's choice, between which a level lies.
EDGES: Final = (-0.3, -0.1, 0.05, 0.15, 0.3, 0.6, 1.0)
#: Weight of what is new, share of decisions at random, and discount of the next decision.
RATE: Final = 0.05
EPSILON: Final = 0.1
GAMMA: Final = 0.9


class Tabular(Deciding):
    """Decides by a table, and learns it where `epsilon` is above 0."""

    def __init__(
        self,
        env: CollectiveEnv,
        values: npt.NDArray[np.float64],
        epsilon: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Take a table (K, S, A of the last call, A), which is written where it learns."""
        super().__init__(env)
        self._values, self._epsilon = values, epsilon
        self._random = np.random.default_rng(seed)
        shape = self._decided.shape
        self._state = np.zeros((*shape, 2), dtype=np.int64)
        #: Of the decision that is being paid for: its state, and its action, -1 = none.
        self._from = np.zeros((*shape, 2), dtype=np.int64)
        self._taken = np.full(shape, -1, dtype=np.int64)
        self._earned = np.zeros((*shape, 2))

    def choose(self, key: Actions, env: CollectiveEnv) -> Actions:
        """The best of the table, or any config that there is."""
        mask = env.world.mask[key]
        level, last = self._state[self._job, key].T
        q = np.where(mask, self._values[key, level, last], -np.inf)
        chosen: Actions = q.argmax(axis=1)
        if self._epsilon > 0.0:
            due = self._calls - self._asked_at[self._job, key] >= self._period
            self._learn(self._job[due], key[due], q[due].max(axis=1))
            drawn = (self._random.random(mask.shape) * mask).argmax(axis=1)
            explores = self._random.random(len(key)) < self._epsilon
            chosen = np.where(explores, drawn, chosen)
            self._from[self._job[due], key[due]] = self._state[self._job[due], key[due]]
            self._taken[self._job[due], key[due]] = chosen[due]
        return chosen

    def learn(self, ran: CallResults, env: CollectiveEnv) -> None:
        """Keep how slow the call was, and what it earned if it ran what was decided last."""
        usual_us = env.tables.reference_us[ran.key]
        slow = np.searchsorted(EDGES, ran.measured_us / usual_us - 1.0)
        self._state[self._job, ran.key] = np.column_stack([slow, ran.action])
        paid = ran.action == self._taken[self._job, ran.key]
        earned = reward(ran.measured_us, usual_us)
        self._earned[self._job[paid], ran.key[paid]] += np.column_stack(
            [earned[paid], np.ones(paid.sum())]
        )

    def _learn(self, job: Actions, key: Actions, best: npt.NDArray[np.float64]) -> None:
        total, count = self._earned[job, key].T
        self._earned[job, key] = 0.0
        paid = (count > 0) & (self._taken[job, key] >= 0)
        job, key, best = job[paid], key[paid], best[paid]
        at = (key, *self._from[job, key].T, self._taken[job, key])
        target = total[paid] / count[paid] + GAMMA * best
        np.add.at(self._values, at, RATE * (target - self._values[at]))


def train_table(env: CollectiveEnv, episodes: int, seed: int) -> npt.NDArray[np.float64]:
    """A table learned over so many episodes of the environment's course."""
    keys, actions = env.world.mask.shape
    # What NCCL's own choice earns for ever: from 0, all configs would be tried in all states.
    values = np.full((keys, len(EDGES) + 1, actions, actions), -1.0 / (1.0 - GAMMA))
    for episode in range(episodes):
        player = Tabular(env, values, EPSILON, seed * 1000 + episode)
        roll_out(env, player, seed=2_000_000 + seed * 1000 + episode)
    return values
