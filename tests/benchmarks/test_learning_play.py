"""Rollouts in a world whose truth is plain: two states, and a config that is right in each."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from learning_play import (
    Exploring,
    Fixed,
    KnowsState,
    Played,
    Seen,
    World,
    figures,
    play,
)

from dynamiccl.datasets.features import HISTORY_SLICE, WINDOW_LENGTH
from dynamiccl.datasets.schema import TASK_COLUMNS
from dynamiccl.datasets.scoring import ENVIRONMENT_COLUMNS
from dynamiccl.evaluate.policies import Actions

SIZES = (1 << 20, 1 << 24)
#: (S, K, A): NCCL's default, a config for the quiet network, one for the congested, one missing.
TIMES = np.array(
    [
        [[100.0, 80.0, 120.0, np.nan], [100.0, 80.0, 120.0, np.nan]],
        [[300.0, 400.0, 200.0, np.nan], [100.0, 80.0, 120.0, np.nan]],
    ]
)


def world(*, dwell: float = 20.0, noise: float = 0.0, switch_us: float = 0.0) -> World:
    plain = dict.fromkeys((*TASK_COLUMNS, *ENVIRONMENT_COLUMNS)) | {
        "system": "s",
        "collective": "AllReduce",
        "num_ranks": 8,
        "num_nodes": 1,
        "ranks_per_node": 8,
        "launch_profile": "default",
        "noise_band": 0.01,
    }
    stay = 1.0 - 1.0 / dwell
    kinds = np.array([[1, 0, 1, 2]] * 2, dtype=np.int8)
    return World(
        tasks=pl.DataFrame([plain | {"size_bytes": size} for size in SIZES]),
        times_us=TIMES,
        algorithm=kinds,
        protocol=np.array([[0, 0, 2, 0]] * 2, dtype=np.int8),
        num_channels=np.full((2, 4), 8, dtype=np.int16),
        transitions=np.array([[stay, 1.0 - stay], [1.0 - stay, stay]]),
        noise_sigma=noise,
        switch_us=switch_us,
    )


class Recorder:
    """Takes what it is told to, and keeps what it was shown."""

    def __init__(self, actions: list[int]) -> None:
        self.actions = iter(actions)
        self.seen: list[Seen] = []

    def act(self, seen: Seen) -> Actions:
        self.seen.append(seen)
        return np.full(len(seen.key), next(self.actions))


def run(of: World, player: object, rounds: int = 400, seed: int = 0) -> Played:
    return play(of, player, ["default"], jobs=3, rounds=rounds, seed=seed)  # type: ignore[arg-type]


def test_states_and_noise_are_the_same_for_every_player() -> None:
    noisy = world(noise=0.1)
    default, one = run(noisy, Fixed(np.zeros(2, int))), run(noisy, Fixed(np.ones(2, int)))
    assert (default.state == one.state).all()
    key = np.arange(2)
    factors = [
        played.measured_us / TIMES[played.state[:, :, None], key, played.action]
        for played in (default, one)
    ]
    assert factors[0] == pytest.approx(factors[1], rel=1e-5)
    assert np.log(factors[0]).std() == pytest.approx(0.1, rel=0.1)
    assert not (run(noisy, Fixed(np.zeros(2, int)), seed=1).state == default.state).all()
    assert np.diff(default.state, axis=0).astype(bool).mean() == pytest.approx(1 / 20, rel=0.4)


def test_the_window_holds_the_last_calls_of_the_key_and_no_more() -> None:
    player = Recorder([0, 1, 2, *[1] * 20])
    run(world(), player, rounds=20)
    assert not player.seen[0].observations.window.any()
    assert not player.seen[0].observations.context[:, HISTORY_SLICE].any()
    third = player.seen[2].observations.window
    assert third[:, :, 0].sum(axis=1).tolist() == [2.0] * 6
    assert np.exp2(third[0, -1, 1]) == pytest.approx(80.0, rel=1e-5)
    assert player.seen[15].observations.window[:, :, 0].sum(axis=1).tolist() == [WINDOW_LENGTH] * 6
    assert player.seen[0].mask.tolist() == [[True, True, True, False]] * 6


def test_a_change_of_config_costs_once() -> None:
    # Action 2 runs the algorithm of NCCL's default with another protocol.
    played = run(world(switch_us=7.0), Recorder([0, 0, 1, 1, 2, 0]), rounds=6)
    assert played.changed[:, 0, 0].tolist() == [False, False, True, False, True, True]
    quiet = played.state[:, 0] == 0
    key = played.measured_us[:, 0, 1] - TIMES[0, 1, [0, 0, 1, 1, 2, 0]]
    assert key.tolist() == pytest.approx([0, 0, 7, 0, 7, 7])
    assert quiet[0]


def test_the_oracle_has_no_regret_and_the_default_what_it_must() -> None:
    calm = world()
    oracle = figures(calm, run(calm, KnowsState(calm)))
    assert (oracle.mean_regret, oracle.p95_regret, oracle.share_worse_than_default) == (0, 0, 0)
    assert (oracle.adaptation_calls, oracle.never_adapted) == (1.0, 0.0)
    played = run(calm, Fixed(np.zeros(2, int)))
    default = figures(calm, played)
    congested = float((played.state == 1).mean())
    assert default.mean_regret == pytest.approx((0.25 + 0.25 + 0.25 * congested) / 2, abs=0.002)
    assert (default.ratio_to_default, default.switches_per_1000_calls) == (1.0, 0.0)
    assert (default.adaptation_calls, default.never_adapted) == (None, 1.0)
    quiet = figures(calm, run(calm, Fixed(np.ones(2, int))))
    assert quiet.share_worse_than_default == pytest.approx(congested / 2)


class Late:
    """Knows the state that was three rounds ago."""

    def __init__(self, of: World) -> None:
        self.knows = KnowsState(of)
        self.states = [np.zeros(6, int)] * 3

    def act(self, seen: Seen) -> Actions:
        self.states.append(seen.state)
        return self.knows.act(replace(seen, state=self.states[-4]))


def test_adaptation_is_counted_from_the_change() -> None:
    calm = world(dwell=100.0)
    found = figures(calm, run(calm, Late(calm), rounds=3000))
    assert found.adaptation_calls == 4.0
    assert found.never_adapted is not None
    assert found.never_adapted < 0.1  # changes that came back within three rounds
    assert found.switches_per_1000_calls == pytest.approx(1000 / 100 / 2, rel=0.3)


def test_exploration_draws_among_what_there_is() -> None:
    calm = world()
    player = Exploring(Fixed(np.ones(2, int)), 0.3, np.random.default_rng(0))
    action = run(calm, player, rounds=1000).action
    shares = np.bincount(action.ravel(), minlength=4) / action.size
    assert shares.tolist() == pytest.approx([0.1, 0.8, 0.1, 0.0], abs=0.02)
