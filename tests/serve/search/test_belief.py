"""What a probe says of what was not probed, and how sure that is."""

import numpy as np
import pytest

from dynamiccl.nccl import Algorithm, Config, Protocol, Transport
from dynamiccl.serve.search.autoccl import DEFAULT, Choice, SearchSpace
from dynamiccl.serve.search.policy_search import Belief, Prior, Watch
from tests.serve.search.worlds import grid

SPACE = grid(default_runs=None)
ONE, NEIGHBOUR = SPACE.subspaces[1][0], SPACE.subspaces[1][1]
ELSEWHERE = SPACE.subspaces[2][0]


#: The drawn worlds' covariance around nothing, small enough that a tenth of the time matters.
DRAWN = Prior.drawn(SPACE, 1 << 20)
PRIOR = Prior(np.zeros(len(SPACE.choices)), 0.1 * DRAWN.covariance)


def belief() -> Belief:
    return Belief(SPACE, PRIOR)


def spread_of(found: Belief, action: int) -> float:
    return float(found.gain_over(SPACE.default, np.array([action]))[1, 0])


def test_one_observation_is_weighed_against_the_prior_as_normals_are() -> None:
    found = belief()
    prior = float(PRIOR.covariance[ONE, ONE])
    assert spread_of(found, ONE) == pytest.approx(prior**0.5)
    found.observe(ONE, SPACE.default, -0.2, 0.03)
    assert found.mean[ONE] == pytest.approx(-0.2 * prior / (prior + 0.03))
    assert spread_of(found, ONE) == pytest.approx((1 / (1 / prior + 1 / 0.03)) ** 0.5)
    found.observe(ONE, SPACE.default, -0.2, 0.03)  # a repeat is one observation that gets surer
    assert spread_of(found, ONE) == pytest.approx((1 / (1 / prior + 2 / 0.03)) ** 0.5)


def test_what_ncclss_own_choice_runs_is_known_without_a_probe() -> None:
    space = grid()
    twin = space.twin()
    assert twin is not None
    action, is_same = twin
    assert is_same
    expected = np.where(np.arange(len(space.choices)) == space.default, 0.0, 0.5)
    found = Belief(space, Prior(expected, PRIOR.covariance))
    assert found.mean[action] == pytest.approx(0.0, abs=0.01)
    neighbour = space.neighbours(action)[0]
    assert abs(found.mean[neighbour]) < 0.2 < found.mean[ELSEWHERE]


def test_a_probe_says_more_of_a_neighbour_than_of_another_subspace() -> None:
    found = belief()
    found.observe(ONE, SPACE.default, -0.2, 0.0001)
    assert found.mean[ONE] < found.mean[NEIGHBOUR] < found.mean[ELSEWHERE] < 0.0
    assert found.mean[SPACE.default] == 0.0
    assert spread_of(found, NEIGHBOUR) < spread_of(found, ELSEWHERE)
    # A comparison with another incumbent says nothing of the level.
    apart = belief()
    apart.observe(ONE, ELSEWHERE, -0.2, 0.0001)
    assert apart.mean[ONE] < 0.0 < apart.mean[ELSEWHERE]
    assert apart.gain_over(ELSEWHERE, np.array([ONE]))[0, 0] == pytest.approx(0.2, rel=0.01)
    # What lies far out counts less.
    near, far = belief(), belief()
    near.observe(ONE, SPACE.default, 0.2, 0.01)
    far.observe(ONE, SPACE.default, 5.0, 0.01)
    assert far.mean[ONE] / 5.0 < 0.5 * near.mean[ONE] / 0.2


def test_age_takes_certainty_but_not_what_was_learned_and_never_more_than_the_prior_had() -> None:
    found = belief()
    found.observe(ONE, SPACE.default, -0.2, 0.0001)
    sure, mean = spread_of(found, ONE), found.mean
    found.age(0.1)
    assert spread_of(found, ONE) > 5 * sure
    assert np.array_equal(found.mean, mean)
    for _ in range(100):
        found.age(0.5)
    assert spread_of(found, ONE) == pytest.approx(float(PRIOR.covariance[ONE, ONE]) ** 0.5)


def test_a_policy_is_one_observation_and_ncclss_own_choice_is_what_all_is_compared_with() -> None:
    said = np.full(len(SPACE.choices), -0.3)
    said[SPACE.default] = 0.2
    prior = Prior.of_policy(SPACE, 1 << 20, said)
    between = np.delete((prior.mean - DRAWN.mean) / (-0.5 - DRAWN.mean + 1e-12), SPACE.default)
    assert between == pytest.approx(between[0])
    assert 0.0 < between[0] < 1.0
    assert prior.covariance == pytest.approx((1.0 - between[0]) * DRAWN.covariance)
    for each in (prior, DRAWN):
        assert each.mean[SPACE.default] == 0.0
        assert not each.covariance[SPACE.default].any()


def test_a_transport_moves_what_has_it_together() -> None:
    configs = [Config(Algorithm.Ring, Protocol.Simple, count) for count in (1, 2, 4)]
    choices = [Choice(config, transport=how) for config in configs for how in (None, Transport.SHM)]
    space = SearchSpace([DEFAULT, *choices])
    found = Belief(space, Prior.drawn(space, 1 << 20))
    slow, same, other = (
        space.choices.index(choice) for choice in (choices[1], choices[3], choices[2])
    )
    before = found.mean
    found.observe(slow, space.choices.index(choices[0]), 0.3, 0.0001)
    moved = found.mean - before
    assert moved[same] - moved[other] > 0.1


def test_scatter_is_seen_beside_a_level_that_wanders_and_stragglers() -> None:
    random = np.random.default_rng(0)
    watch = Watch()
    for call in range(64):
        slow = 3.0 if call % 10 == 9 else 0.0
        watch.add(0.002 * call + slow + random.normal(0.0, 0.05))
    assert watch.sigma() == pytest.approx(0.05, rel=0.4)
    assert watch.level() == pytest.approx(0.002 * 48, abs=0.05)
    watch.restart()
    assert len(watch) == 0
    assert watch.sigma() == pytest.approx(0.05, rel=0.4)
