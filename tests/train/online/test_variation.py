"""Worlds that are drawn anew for each episode."""

import numpy as np
import pytest

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.simulator.scenario import MarkovLink, Scenario
from dynamiccl.train.environment import DecisionEnv, Rounds, Variation, make_vector


def markov(scenario: Scenario) -> MarkovLink:
    (link,) = [each for each in scenario.link if isinstance(each, MarkovLink)]
    return link


def varied(most: float, times: float) -> DecisionEnv:
    env = make_vector(workload="lora", scenario="busy-host")
    rounds = Rounds(period_calls=8, delay_rounds=1, episode_rounds=5)
    return DecisionEnv(env.world, env.tables, 2, rounds, variation=Variation(most, times))


def test_strengths_and_dwell_times_are_drawn_within_the_factor() -> None:
    env = varied(1.5, 0.0)
    usual = markov(env.world.scenario)
    found = []
    for seed in range(40):
        env.reset(seed=seed)
        link = markov(env.world.scenario)
        strength = {
            (now - 1) / (s - 1)
            for now, s in zip(link.slowdowns, usual.slowdowns, strict=True)
            if s > 1
        }
        dwell = {round(now / d, 9) for now, d in zip(link.dwell_us, usual.dwell_us, strict=True)}
        found.append((max(strength), min(strength), dwell.pop()))
        assert not dwell  # one factor for all
    high, low, dwells = (np.array(part) for part in zip(*found, strict=True))
    assert np.allclose(high, low)
    for drawn in (high, dwells):
        assert 1 / 1.5 <= drawn.min() < 0.8
        assert 1.25 < drawn.max() <= 1.5


def test_times_of_a_cell_move_together_and_what_data_say_stays() -> None:
    env = varied(1.0, 0.2)
    before = make_vector(workload="lora", scenario="busy-host")
    env.reset(seed=3)
    world, usual = env.world, before.world
    ratio = world.quiet_us / usual.quiet_us
    cells = {
        (a, p): ratio[(world.algorithm == a) & (world.protocol == p)]
        for a, p in zip(world.algorithm.flat, world.protocol.flat, strict=True)
        if a >= 0
    }
    assert all(np.allclose(each, each[0]) for each in cells.values())
    assert len({round(float(each[0]), 9) for each in cells.values()}) == len(cells)
    assert markov(world.scenario) == markov(usual.scenario)
    assert env.tables.reference_us == pytest.approx(world.quiet_us[:, ABSTAIN_ACTION])
    assert np.array_equal(env.tables.context, before.tables.context)
    assert np.array_equal(env.tables.mask, before.tables.mask)


def test_every_episode_is_another_world_and_a_seed_repeats_it() -> None:
    env = varied(1.5, 0.1)
    drawn = []
    for seed in (1, None, 1):
        env.reset(seed=seed)
        drawn.append((markov(env.world.scenario).slowdowns, env.world.quiet_us[0, 0]))
    assert drawn[0] != drawn[1]
    assert drawn[0] == drawn[2]
    same = varied(1.0, 0.0)
    before = same.world
    same.reset(seed=1)
    assert markov(same.world.scenario) == markov(before.scenario)
    assert np.array_equal(same.world.quiet_us, before.quiet_us, equal_nan=True)
