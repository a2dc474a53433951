"""Ablation of sequence learning: recurrence, algorithm (CQL, DQN, BC), discount.

The world is `learning_world.py`'s. Every replicate has logs of its own: four jobs each that leave
NCCL alone but for 30 % of exploration, that follow the best quiet table but for 30 %, and that draw
every config at random, 500 calls of 26 task keys each. A policy is trained on these and on a quiet
sweep, and plays 8 jobs of 1,000 rounds on the test sizes, in states and noise that are the same for
all policies. Figures are true times; intervals are Student's over replicates.

FQE is judged by rollouts of the same policies on the logs' own sizes, 100 rounds, gamma 0.9.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from learning_figures import Number, parallel, student
from learning_fqe import fitted_value
from learning_play import (
    Exploring,
    Figures,
    Fixed,
    KnowsState,
    Learned,
    Player,
    Seen,
    World,
    figures,
    play,
)
from learning_world import make_world, measure_quiet, write_calls
from sklearn.ensemble import HistGradientBoostingRegressor

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import tuned, usable
from dynamiccl.datasets.episodes import training_noise
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.steps import Steps
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.policies import Actions
from dynamiccl.train.data import load_data
from dynamiccl.train.fit import fit
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipes import make_recipe

PROFILES: Final = ["default"]
STEPS: Final = 3_000
ALONE: Final = ("gamma=0", "num_steps=1", "entropy_start=0")
AHEAD: Final = ("gamma=0.5", "num_steps=3", "entropy_start=0")
#: Row of the table -> recipe, settings.
ARMS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "DDQN, sweeps only": ("ddqn-dueling", (*ALONE, "use_calls=false")),
    "DDQN": ("ddqn-dueling", ALONE),
    "DDQN, 9,000 gradient steps": ("ddqn-dueling", (*ALONE, "steps=9000")),
    "DDQN, 3-step": ("ddqn-dueling", AHEAD),
    "DRQN-LSTM": ("drqn-lstm", ALONE),
    "DRQN-LSTM, 3-step": ("drqn-lstm", AHEAD),
    "CQL": ("cql", ALONE),
    "CQL, 3-step": ("cql", AHEAD),
    "CQL-LSTM": ("cql", (*ALONE, "window_encoder=lstm")),
    "BC": ("bc", ()),
}
EVALUATED: Final = ("DDQN", "CQL", "BC")
DATA_SET: Final = "h100-ib-congested, calls"
GAMMA: Final = 0.9
ROLLOUT: Final = 100


@dataclass(frozen=True, slots=True)
class Boosted:
    """Boosted trees over the networks' observations, one model for all actions."""

    model: Any
    num_actions: int

    @classmethod
    def fitted(cls, steps: Steps, limit: int = 60_000) -> "Boosted":
        """Fit the log of time over reference on some of the steps."""
        rows = np.sort(np.random.default_rng(0).permutation(len(steps))[:limit])
        found, _, _ = steps.observe(rows, steps.episode_of(rows))
        flat = np.hstack([found.context, found.window.reshape(len(rows), -1)])
        inputs = np.hstack([flat, np.eye(steps.num_actions)[steps.action[rows]]])
        model = HistGradientBoostingRegressor(max_iter=300, random_state=0, early_stopping=False)
        return cls(model.fit(inputs, np.log(-steps.reward[rows])), steps.num_actions)

    def act(self, seen: Seen) -> Actions:
        """The least predicted time."""
        count = len(seen.key)
        window = seen.observations.window.reshape(count, -1)
        flat = np.repeat(np.hstack([seen.observations.context, window]), self.num_actions, axis=0)
        inputs = np.hstack([flat, np.tile(np.eye(self.num_actions), (count, 1))])
        predicted = self.model.predict(inputs).reshape(count, self.num_actions)
        least: Actions = np.where(seen.mask, predicted, np.inf).argmin(axis=1)
        return least


def ablation(out: Path, seeds: int) -> dict[str, Any]:
    """Rows of the table, and the errors of FQE."""
    found: dict[str, list[Figures]] = {}
    jobs = [(out / f"seed-{seed}", seed) for seed in range(seeds)]
    for _, simple in parallel(_prepare, jobs):
        for name, each in simple.items():
            found.setdefault(name, []).append(each)
    errors: dict[str, list[float]] = {}
    for (_, _, arm), (each, error) in parallel(_run, [(*job, arm) for arm in ARMS for job in jobs]):
        found.setdefault(arm, []).append(each)
        if error is not None:
            errors.setdefault(arm, []).append(error)
    return {
        "data_sets": {DATA_SET: {name: _row(each) for name, each in found.items()}},
        "fqe_relative_error": {arm: student(each) for arm, each in errors.items()},
    }


def _row(replicates: Sequence[Figures]) -> dict[str, Number]:
    row: dict[str, Number] = {}
    for field in fields(Figures):
        values = [getattr(each, field.name) for each in replicates]
        row |= student([v for v in values if v is not None], field.name)
    return row


def _worlds(data: Path) -> tuple[World, World]:
    """The worlds of the logs and of the test."""
    frame = read(data)
    catalogue = Catalogue.from_frame(usable(tuned(frame)))
    noise = training_noise(frame)
    logged, test = (make_world(catalogue, s, noise) for s in (Split.TRAIN, Split.TEST))
    return logged, test


def _steps(data: Path) -> Steps:
    """The training steps of the logs."""
    steps = load_data(data, 0).sequences
    assert steps is not None
    return steps


def _prepare(data: Path, seed: int) -> dict[str, Figures]:
    """Write a replicate's sweep and logs; figures of players without training."""
    measure_quiet(data, seed)
    logged, test = _worlds(data)
    random = np.random.default_rng(seed)
    nccl = Fixed(np.zeros(logged.tasks.height, dtype=np.int64))
    table = Fixed(np.nanargmin(logged.times_us[0], axis=1))
    behaviours = {"observe": (nccl, 0.3), "table": (table, 0.3), "explore": (nccl, 1.0)}
    for index, (name, (player, epsilon)) in enumerate(behaviours.items()):
        exploring = Exploring(player, epsilon, random)
        log = play(logged, exploring, PROFILES, jobs=4, rounds=500, seed=1000 * seed + index)
        write_calls(data, logged, log, name)
    usual = np.linalg.matrix_power(test.transitions, 10_000)[0]
    mean_us = np.tensordot(usual, test.times_us / test.oracle_us[:, :, None], axes=1)
    players: dict[str, Player] = {
        "nccl-default": Fixed(np.zeros(test.tasks.height, dtype=np.int64)),
        "best quiet table (true)": Fixed(np.nanargmin(test.times_us[0], axis=1)),
        "best table of all states (true)": Fixed(np.nanargmin(mean_us, axis=1)),
        "gradient boosting": Boosted.fitted(_steps(data)),
        "oracle": KnowsState(test),
    }
    return {name: _play(test, player, seed) for name, player in players.items()}


def _play(world: World, player: Player, seed: int) -> Figures:
    return figures(world, play(world, player, PROFILES, jobs=8, rounds=1000, seed=seed))


def _run(data: Path, seed: int, arm: str) -> tuple[Figures, float | None]:
    recipe, settings = ARMS[arm]
    made = make_recipe(recipe, [f"steps={STEPS}", *settings])
    made = replace(made, summary=arm)
    uri = f"sqlite:///{data.parent / f'mlflow-{seed}-{list(ARMS).index(arm)}.db'}"
    done = fit(data, made, experiment="sequences", tracking_uri=uri, seed=seed)
    policy = TorchPolicy.load(Path(done.run_directory) / "policy")
    logged, test = _worlds(data)
    error = _fqe_error(data, logged, policy, seed) if arm in EVALUATED else None
    return _play(test, Learned(policy), seed), error


def _fqe_error(data: Path, world: World, policy: TorchPolicy, seed: int) -> float:
    """Estimated / true discounted value - 1."""
    played = play(world, Learned(policy), PROFILES, jobs=32, rounds=ROLLOUT, seed=77 + seed)
    rewards = -played.measured_us / world.times_us[0, :, 0]
    weights = GAMMA ** np.arange(ROLLOUT)
    truth = float((rewards * weights[:, None, None]).sum(axis=0).mean())
    return fitted_value(policy, _steps(data), gamma=GAMMA, seed=seed) / truth - 1.0
