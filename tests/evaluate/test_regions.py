"""Regions of sizes: the best cut of all, and what it says between the sizes."""

from itertools import combinations

import numpy as np
import pytest

from dynamiccl.evaluate.baselines.regions import fit_regions


@pytest.mark.parametrize("seed", range(5))
def test_no_other_cut_costs_less(seed: int) -> None:
    costs = np.random.default_rng(seed).normal(size=(8, 4))
    for most in (1, 2, 3, 8):
        starts, actions = fit_regions(costs, most)
        assert starts[0] == 0
        assert len(starts) <= most
        ends = np.append(starts[1:], len(costs))
        found = sum(
            costs[a:b, action].sum() for a, b, action in zip(starts, ends, actions, strict=True)
        )
        every = [
            sum(costs[a:b].sum(axis=0).min() for a, b in zip((0, *cut), (*cut, 8), strict=True))
            for count in range(most)
            for cut in combinations(range(1, 8), count)
        ]
        assert found == pytest.approx(min(every))


def test_equal_totals_take_fewer_regions() -> None:
    starts, actions = fit_regions(np.array([[0.0, 1.0]] * 5), 4)
    assert (starts.tolist(), actions.tolist()) == ([0], [0])
