"""How sure a policy must be: by hand, and over many draws."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dynamiccl.belief import LEAST_CAUTION, MIN_GAIN, SLOWER
from dynamiccl.train.cautious import ShapeTable, Tables
from dynamiccl.train.cautious_fit import Calibration, best_of


def calibration(scores: list[float], measured: list[float]) -> Calibration:
    ones = np.ones(len(scores))
    return Calibration(np.array(scores), np.array(measured), ones, 0.0 * ones)


def test_threshold_leaves_as_many_slower_tasks_of_those_that_act_as_the_bound_allows() -> None:
    scores = [float(k) for k in range(3, 1003)]  # of n that act: (slower + 1) / (n + 1) <= alpha
    found = calibration(scores, [-0.1 if s in {90.0, 50.0, 20.0} else 0.1 for s in scores])
    assert found.raised(7.0, 0.0010) == 90.0  # drawn is less, and 912 that act are too few
    assert found.raised(7.0, 0.0011) == 90.0
    assert found.raised(7.0, 0.0022) == 50.0
    assert found.raised(7.0, 0.0031) == 20.0
    assert found.raised(7.0, 0.0040) == LEAST_CAUTION
    # Those that abstain say nothing of those that act.
    idle = calibration([0.5] * 9000 + scores, [0.1] * 9000 + found.measured.tolist())
    assert idle.raised(7.0, 0.0022) == 50.0
    # Too few tasks only raise what drawn worlds ask for.
    few = calibration([3.0] * 98, [0.1] * 98)
    assert few.raised(3.5, 0.01) == 3.5
    assert few.raised(3.5, 0.02) == LEAST_CAUTION
    assert calibration([5.0, 3.0], [-0.1, 0.1]).raised(3.5, 0.01) == 5.0
    assert Calibration.joined([]).raised(3.5, 0.5) == 3.5


def test_what_is_slower_by_noise_or_left_alone_anyway_sets_no_threshold() -> None:
    just_below, below = -0.9 * SLOWER, -1.1 * SLOWER
    scores, fine = [float(k) for k in range(1, 100)], [0.1] * 97
    assert calibration(scores, [*fine, just_below, below]).raised(2.0, 0.01) == 99.0
    assert calibration(scores, [*fine, below, just_below]).raised(2.0, 0.01) == 98.0
    unused = calibration([*scores[:98], 0.9 * MIN_GAIN], [*fine, 0.1, -1.0])
    assert unused.raised(7.0, 0.02) == LEAST_CAUTION
    noisy = replace(unused, measured=np.full(99, -0.1), noise=np.full(99, 0.1))
    assert noisy.raised(7.0, 0.02) == LEAST_CAUTION


def test_the_largest_sure_gain_is_taken_and_coverage_counts_both_spreads() -> None:
    gain = np.array([[0.3, 0.2, 0.9], [0.3, 0.2, 0.9]])
    spread = np.array([[0.2, 0.05, 0.01], [0.2, 0.15, 0.01]])
    known = np.array([True, True, False]) & np.ones((2, 1), dtype=np.bool_)
    assert best_of(gain, spread, known, 2.0).tolist() == [1, 0]  # where none is sure: the largest
    found = Calibration(
        predicted=np.array([0.1, 0.1, 0.1]),
        measured=np.array([0.1, 0.25, 0.4]),
        spread=np.full(3, 0.06),
        noise=np.full(3, 0.08),
    )  # 1.645 x 0.1
    assert found.coverage == pytest.approx(2 / 3)
    assert math.isnan(Calibration.joined([]).coverage)


@pytest.mark.parametrize("alpha", [0.02, 0.1])
def test_bound_holds_over_draws(alpha: float) -> None:
    """Of what acts, over many draws, a share of alpha is slower; predictions know something."""
    random = np.random.default_rng(0)
    wrong = acted = 0
    for _ in range(1_000):
        predicted = np.abs(random.normal(size=800))
        measured = 0.3 * predicted + 0.15 * random.normal(size=800)
        seen = slice(0, 400)
        found = Calibration(predicted[seen], measured[seen], np.full(400, 0.01), np.zeros(400))
        acts = predicted[400:] / 0.01 > found.raised(math.inf, alpha)
        wrong += int((acts & (measured[400:] < -np.log1p(SLOWER))).sum())
        acted += int(acts.sum())
    assert acted > 0.1 * 400 * 1_000
    assert 0.5 * alpha < wrong / acted <= 1.05 * alpha


def test_at_a_new_shape_a_gain_is_over_the_cell_that_nccl_would_choose() -> None:
    """Action 1 gains 0.4 at all shapes; where NCCL's costs say that it is its own, nothing."""
    tables = [
        ShapeTable(
            shape=(nodes, 3.0),
            log2_sizes=np.array([20.0]),
            gain=np.array([[0.0, 0.4, 0.1]]),
            spread=np.full((1, 3), 0.01),
            is_near=np.ones((1, 3), dtype=np.bool_),
            may_act=np.ones((1, 3), dtype=np.bool_),
            relative_cost=np.zeros((1, 3)),
            is_cell=np.array([False, True, True]),
            caution=2.0,
        )
        for nodes in (1.0, 2.0, 4.0)
    ]
    made = Tables(tables, differences=(0.1, 1.0), elsewhere=2.5)
    place = torch.tensor([[20.0, 3.0, 3.0]], dtype=torch.float64)
    unknown = float("nan")
    for costs, wanted in (
        ([0.0, -0.5, 0.0], [0.3, 0.0]),  # its own is action 2
        ([0.0, 0.0, -0.5], [0.0, -0.3]),  # action 1
        ([0.0, -0.001, 0.0], [0.0, -0.3]),  # either
        ([unknown] * 3, [0.4, 0.1]),
        ([0.0, -0.5, -0.5], [0.4, 0.1]),  # none that was measured
    ):
        gain = made(place, torch.tensor([costs], dtype=torch.float64))[0]
        assert gain[0, 1:].tolist() == pytest.approx(wanted, abs=1e-9)
    # Of a shape that was measured its own gains are told.
    place[0, 1] = 2.0
    gain = made(place, torch.tensor([[0.0, 0.0, -0.5]], dtype=torch.float64))[0]
    assert gain[0, 1:].tolist() == pytest.approx([0.4, 0.1])
