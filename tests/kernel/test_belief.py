"""The belief on worlds whose times are known: algebra, caution, and what a probe is worth."""

from dataclasses import replace

import numpy as np
import pytest

from dynamiccl.belief import ALPHA, SLOWER, Belief, Prior, prior_of
from dynamiccl.drawn_worlds import Floats, Grid, Ints, draw_worlds
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol

RING, TREE = Algorithm.Ring, Algorithm.Tree
CONFIGS = (
    ABSTAIN,
    *(Config(a, p, n) for a in (RING, TREE) for p in Protocol for n in (None, 4, 16)),
)
SIZES = tuple(float(each) for each in range(12, 29))
OWN = tuple((RING, Protocol.LL if size < 17 else Protocol.Simple) for size in SIZES)
GRID = Grid(SIZES, CONFIGS, OWN)
NOISE = 0.02
GAINS = len(SIZES), len(CONFIGS)


@pytest.fixture(scope="module")
def prior() -> Prior:
    return prior_of(GRID)


def every(columns: range | list[int], sizes: range | list[int] = range(17)) -> Ints:
    """The places of some configs at some sizes."""
    return np.array([size * len(CONFIGS) + column for size in sizes for column in columns])


def measured(prior: Prior, world: Floats, places: Ints, seed: int = 0) -> Belief:
    noise = NOISE * np.random.default_rng(seed).standard_normal(len(places))
    return Belief(prior, places, world.ravel()[places] + noise, np.full(len(places), NOISE**2))


def test_it_is_a_gaussian_conditioned_on_what_was_measured(prior: Prior) -> None:
    world = draw_worlds(GRID, 1, np.random.default_rng(5))[0][0]
    places = every([0, 2, 7], [3, 4, 9])
    found = measured(prior, world, places)
    covariance = found.widened * (prior.factors @ prior.factors.T + np.diag(found.own))
    noise = NOISE * np.random.default_rng(0).standard_normal(len(places))
    off = world.ravel()[places] + noise - prior.mean[places]
    among = covariance[np.ix_(places, places)] + NOISE**2 * np.eye(len(places))
    weights = covariance[:, places] @ np.linalg.inv(among)
    mean = (prior.mean + weights @ off).reshape(len(SIZES), -1)
    left = covariance - weights @ covariance[places]
    assert np.allclose(found.gain, mean[:, :1] - mean, atol=1e-6)
    own, config = 4 * len(CONFIGS), 4 * len(CONFIGS) + 7
    variance = left[own, own] + left[config, config] - 2.0 * left[own, config]
    assert found.spread[4, 7] == pytest.approx(found.stretch * np.sqrt(variance), rel=1e-6)
    draws = found.draws(4000, np.random.default_rng(1))[:, 4, 7]
    assert draws.mean() == pytest.approx(found.gain[4, 7], abs=0.05 * found.spread[4, 7])
    assert draws.std() == pytest.approx(found.spread[4, 7], rel=0.05)


def test_it_acts_only_between_measurements_of_nccls_choice_and_near_the_cell(prior: Prior) -> None:
    world = prior.mean.reshape(len(SIZES), -1).copy()
    world[:, 4] = world[:, 0] - 0.7  # Ring/LL128 is twice as fast everywhere
    assert not measured(prior, world, np.empty(0, dtype=np.int64)).decide().any()
    assert not measured(prior, world, every([4])).decide().any()  # not NCCL's own choice
    acts = measured(prior, world, every([0, 4], [5, 7])).decide()
    assert set(np.flatnonzero(acts)) <= {5, 6, 7}
    assert acts[5] == acts[7] == 4
    # NCCL's choice is as fast at one of the sizes around: what lies between is not known.
    places = every([0, 4], [5, 7])
    jumps = world.copy()
    jumps[7, 0] = jumps[7, 4]
    found = measured(prior, jumps, places)
    assert found.decide()[5] == 4
    assert not found.decide()[[6, 7]].any()
    assert not found.may_act[6, 4]
    far = measured(prior, world, np.concatenate([every([0]), every([4], [5])])).decide()
    assert far[5] == 4
    assert not far[[0, 1, 2, 3, 8, 12]].any()


def test_in_worlds_like_those_drawn_few_sizes_are_slower(prior: Prior) -> None:
    """Fresh draws of half of the configs at every other size; the bound is on their mean."""
    worlds, _ = draw_worlds(GRID, 30, np.random.default_rng(77))
    places = every([0, 2, 4, 7, 9], range(0, len(SIZES), 2))
    acts = slower = 0
    for seed, world in enumerate(worlds):
        found = measured(prior, world, places, seed).decide()
        gain = world[:, 0] - world[np.arange(len(SIZES)), found]
        acts += int(np.count_nonzero(found))
        slower += int(np.count_nonzero(gain < -np.log1p(SLOWER)))
    assert acts > 100
    assert slower <= 2.0 * ALPHA * acts


def test_a_stricter_bound_is_more_cautious_and_a_machine_out_of_the_draws_is_wider(
    prior: Prior,
) -> None:
    places = every([0, 2, 4, 7, 9], range(0, len(SIZES), 2))
    world = prior.worlds[:, 3].reshape(len(SIZES), -1)
    usual = measured(prior, world, places)
    assert usual.widened == pytest.approx(1.0)
    assert usual.caution(0.001) >= usual.caution(0.01) >= usual.caution(0.2)
    mean = prior.mean.reshape(world.shape)
    odd = measured(prior, mean + 6.0 * (world - mean), places)
    assert odd.widened > 2.0
    assert odd.spread.mean() > usual.spread.mean()


def test_one_config_that_the_others_do_not_foretell_says_nothing_of_the_rest(prior: Prior) -> None:
    places = every([0, 2, 4, 7, 9])
    world = prior.worlds[:, 3].reshape(len(SIZES), -1).copy()
    usual = measured(prior, world, places)
    world[:, 9] += np.random.default_rng(2).standard_normal(len(SIZES))
    odd = measured(prior, world, places)
    assert odd.widened < 1.5
    assert odd.spread[:, 4].mean() < 1.5 * usual.spread[:, 4].mean()
    assert odd.spread[:, 10].mean() >= usual.spread[:, 10].mean()
    # What is left out says so, too: of the rough one the other octaves tell little.
    left = odd.left_out()
    z = (left.predicted - left.measured) / np.hypot(left.spread, left.noise)
    assert np.sqrt(np.square(z).mean()) < 1.5


def test_what_is_most_worth_a_measurement(prior: Prior) -> None:
    world = draw_worlds(GRID, 1, np.random.default_rng(5))[0][0]
    found = measured(prior, world, every([0, 2, 7], [3, 4, 9]))
    random = np.random.default_rng
    worths = found.most_worth(6, NOISE**2, random(0))
    assert len(worths) == 6
    assert all(place % len(CONFIGS) for place, _ in worths)
    assert found.most_worth(1, NOISE**2, random(0)) == worths[:1]
    # Where NCCL's choice need not be measured again, a config costs half.
    size, away = worths[0][0] // len(CONFIGS), np.ones(GAINS, dtype=np.int64)
    away[(size + 8) % len(SIZES)] = 0
    free = found.most_worth(1, NOISE**2, random(0), 50 * away)[0][0] // len(CONFIGS)
    assert free == (size + 8) % len(SIZES)
    # One so noisy that it tells nothing brings only that the config was measured near.
    assert found.most_worth(1, 1e6, random(0))[0][1] < 0.7 * worths[0][1]
    # What must not be asked is not, and nothing at all where nothing may be.
    allowed = np.zeros(GAINS, dtype=np.bool_)
    told = prior, found._places, world.ravel()[found._places], np.full(9, NOISE**2)
    assert Belief(*told, allowed=allowed).most_worth(6, NOISE**2, random(0)) == []
    allowed[5, 3] = True
    only = Belief(*told, allowed=allowed).most_worth(3, NOISE**2, random(0))
    assert {place for place, _ in only} == {5 * len(CONFIGS) + 3}


def test_nccls_costs_tell_of_cells_that_nobody_measured() -> None:
    worlds, costs = draw_worlds(GRID, 10, np.random.default_rng(9))
    blind: list[float] = []
    told: list[float] = []
    for world, cost in zip(worlds, costs, strict=True):
        grid = replace(GRID, log_costs=tuple(map(tuple, cost.tolist())))
        for errors, prior in ((blind, prior_of(GRID)), (told, prior_of(grid))):
            errors.append(float(np.abs(prior.mean - world.ravel()).mean()))
    assert np.mean(told) < 0.7 * np.mean(blind)


def test_cells_that_the_generator_does_not_know_are_drawn_wide() -> None:
    configs = (
        ABSTAIN,
        Config(RING, Protocol.Simple),
        Config(Algorithm.PAT, Protocol.Simple),
        Config(Algorithm.CollNetChain, Protocol.Simple, 8, 1 << 17),
        Config(Algorithm.NVLSTree),
        Config(None, Protocol.LL),
    )
    times, costs = draw_worlds(Grid(SIZES, configs), 300, np.random.default_rng(0))
    assert times.shape == (300, len(SIZES), len(configs))
    assert np.isfinite(times).all()
    assert np.isfinite(costs).all()
    spread = (times[:, :, 3] - times[:, :, 1]).std(axis=0)
    assert (spread > 0.4).all()
    again, _ = draw_worlds(Grid(SIZES, configs), 300, np.random.default_rng(0))
    assert np.array_equal(times, again)
