"""The tests that `compare` rests on, on numbers whose law is known."""

import numpy as np
import pytest

from dynamiccl.evaluate.compare.judging import (
    Scales,
    judge,
    moments,
    more_than_chance,
    permuted_spread,
    prior_freedom,
)

CELLS = 300


def scales(limit: float = 4.0, freedom: float = 50.0) -> Scales:
    return Scales(np.full(CELLS, limit), np.ones(CELLS), freedom)


@pytest.mark.parametrize(("true", "low", "high"), [(3.0, 2.0, 4.5), (10.0, 6.0, 18.0)])
def test_the_priors_freedom_is_that_by_which_variances_scatter(
    true: float, low: float, high: float
) -> None:
    random = np.random.default_rng(1)
    ratios = 2.0 * random.f(8.0, true, 2000)
    scale, freedom = prior_freedom(ratios, np.full(2000, 8.0))
    assert low < freedom < high
    assert scale == pytest.approx(2.0, rel=0.1)


def test_alike_variances_count_for_as_many_runs_as_there_may_be() -> None:
    ratios = np.random.default_rng(2).chisquare(8.0, 1000) / 8.0
    assert prior_freedom(ratios, np.full(1000, 8.0))[1] > 50.0


def test_a_time_far_from_its_median_counts_for_nothing() -> None:
    side = np.array([[1.0, 1.1, 0.9, 9.0], [1.0, 9.0, np.nan, np.nan]])
    mean, squares, count = moments(side, np.array([2.0, 2.0]))
    # Of two times far apart nobody knows which is wrong.
    np.testing.assert_allclose(mean, [1.0, 5.0])
    np.testing.assert_allclose(squares, [0.02, 32.0])
    np.testing.assert_array_equal(count, [3.0, 2.0])


def test_differences_of_like_cells_are_normal_within_their_errors() -> None:
    random = np.random.default_rng(3)
    old, new = random.standard_normal((2, CELLS, 5))
    difference, error, freedom = judge(old, new, scales())
    assert np.std(difference / error) == pytest.approx(1.0, abs=0.12)
    np.testing.assert_allclose(freedom, 58.0, atol=1.0)


def test_a_few_slower_cells_are_more_than_chance_and_one_wild_cell_is_not() -> None:
    random = np.random.default_rng(4)
    old, new = random.standard_normal((2, CELLS, 5))
    levels = (0.004, 0.002)
    assert more_than_chance(old, new, scales(), levels) == (0, 0)
    wild = new.copy()
    wild[0] += 50.0
    assert more_than_chance(old, wild, scales(), levels) == (0, 0)
    few = new.copy()
    few[:20] += 2.0
    slower, faster = more_than_chance(old, few, scales(), levels)
    assert 10 < slower < 35
    assert faster == 0
    assert more_than_chance(few, old, scales(), levels)[0] == 0


def test_permuted_runs_scatter_by_the_noise_of_a_cell() -> None:
    random = np.random.default_rng(5)
    old, new = random.standard_normal((2, CELLS, 5))
    spread = permuted_spread(old, new, scales())
    assert np.sqrt(np.mean(spread**2)) == pytest.approx(np.sqrt(2.0 / 5.0), rel=0.06)
