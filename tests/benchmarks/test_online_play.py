"""The small world of the online benchmarks: rounds, moves on channels, scores."""

from dataclasses import replace
from functools import partial

import numpy as np
import online_play as play
import pytest
from bench_mvfst import CHANNELS, MOVES, MovingEnv, best_fixed, moving, threshold_rule
from online_play import Judge, recipe_of
from online_world import RoundEnv, Setting

RECIPE = recipe_of(jobs=4, steps=4)


def test_an_oracle_scores_1_nccl_0_and_a_rule_that_looks_more_than_a_table() -> None:
    judge = Judge.of(Setting(), RECIPE)
    oracle = judge.play(lambda env: env.costs().argmin(2))
    assert judge.score_of(oracle) == pytest.approx(1.0)
    assert judge.score_of(judge.play(lambda env: np.zeros(env.shape, dtype=np.int64))) == 0.0
    table = judge.score_of(judge.play(partial(best_fixed, 0.0)))
    assert table < judge.score_of(judge.play(partial(threshold_rule, 0.15, 32, {}))) < 1.0


def test_a_decision_is_in_force_as_late_as_the_setting_says() -> None:
    env = RoundEnv(Setting(delay=3), 2, replace(RECIPE, vary=1.0))
    env.reset(0)
    ran = [env.step(np.full(env.shape, each))[1]["in_force"][0, 0] for each in (1, 2, 3, 4, 5)]
    assert ran == [0, 0, 0, 1, 2]


def test_moves_halve_and_double_counts_of_channels_from_what_was_decided_last() -> None:
    env = moving(2).env(1, replace(RECIPE, vary=1.0))
    assert isinstance(env, MovingEnv)
    env.reset(0)
    first = int(env.world.num_channels[0, 0])
    counts = []
    for move in ("/2", "-1", "0", "+1", "*2", "*2"):
        env.step(np.full(env.shape, MOVES.index(move)))
        counts.append(CHANNELS.ladder[env.configs[-1][0, 0] - 1])
    half = first // 2
    assert counts == [half, half - 1, half - 1, half, min(first, 32), 32]


def test_threads_make_as_many_updates_as_the_recipe_has() -> None:
    recipe = replace(RECIPE, actors=3)
    network = play.make_network(Setting(), recipe, 0)
    before = {name: each.clone() for name, each in network.state_dict().items()}
    marks = play.train(play.players_of(Setting(), recipe, 0), network, 2)
    assert [each.updates for each in marks] == [2, 4]
    assert any((marks[-1].weights[name] != each).any() for name, each in before.items())
