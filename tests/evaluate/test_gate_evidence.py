"""The gate's statistics: variances shrunk over bins, and a false discovery rate with weights."""

from typing import Any, Final

import numpy as np
import pytest
from scipy import stats

from dynamiccl.evaluate.evidence import Verdict, passing, shrunk
from dynamiccl.evaluate.gate import pass_gate
from tests.evaluate.test_gate import SIZES, always_ring, runs, verdicts
from tests.rows import frame

Q: Final = 0.01
GATES: Final = 400


def even(count: int) -> np.ndarray[Any, Any]:
    return np.ones(count)


def test_benjamini_and_hochberg_take_the_last_below_the_line() -> None:
    p_values = np.array([0.9, 0.001, 0.03, 0.02, 0.041])
    assert passing(p_values, 0.05, even(5)).tolist() == [False, True, True, True, False]
    assert passing(np.array([0.01, 0.02, 0.03, 0.04, 0.05]), 0.05, even(5)).all()
    assert passing(np.array([0.011, 0.5]), 0.02, even(2)).tolist() == [False, False]
    assert passing(np.zeros(0), 0.05, even(0)).tolist() == []


@pytest.mark.parametrize(
    ("weights", "passed"),
    [([1, 1], [False, False]), ([3, 1], [True, False]), ([1, 3], [False, False])],
)
def test_weights_move_the_rate_and_add_none(weights: list[int], passed: list[bool]) -> None:
    found = passing(np.array([0.006, 0.5]), Q, 100.0 * np.array(weights))
    assert found.tolist() == passed


def false_gates(noise: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], num_runs: int) -> int:
    """Gates of GATES that let anything through, though every gain is exactly the noise band."""
    random = np.random.default_rng(0)
    found = 0
    for _ in range(GATES):
        excess = random.permutation(noise)[:, None] * random.normal(size=(len(noise), num_runs))
        variances, df = shrunk([*excess])
        t = excess.mean(axis=1) / np.sqrt(variances / num_runs)
        found += bool(passing(stats.t.sf(t, df), Q, weights).any())
    return found


@pytest.mark.parametrize(
    ("noise", "num_runs"),
    [
        (np.full(60, 0.01), 3),
        (np.full(60, 0.01), 8),
        # Without the bounds of `shrunk` one gate in ten lets a bin with far more noise through.
        (np.where(np.arange(60) < 3, 0.08, 0.01), 3),
    ],
)
def test_noise_passes_no_more_often_than_the_rate_says(
    noise: np.ndarray[Any, Any], num_runs: int
) -> None:
    assert false_gates(noise, np.linspace(0.2, 2.0, 60), num_runs) <= Q * GATES + 4


def spread(*variances: float) -> list[np.ndarray[Any, Any]]:
    """Gains in three runs, of these variances."""
    return [np.sqrt(each) * np.array([-1.0, 0.0, 1.0]) for each in variances]


def test_a_variance_is_never_shrunk_below_the_bins_own() -> None:
    own = np.array([1e-4, 1.1e-4, 0.9e-4, 1e-4, 0.16])
    variances, _ = shrunk(spread(*own))
    assert (variances >= 0.999 * own).all()
    assert variances[4] == pytest.approx(own[4])
    # Two slow calls in three runs: the mean is twice its error, whatever the other bins say.
    slow = np.array([0.0, 0.4, 0.4])
    variances, df = shrunk([*spread(*[1e-6] * 60), slow])
    t = slow.mean() / np.sqrt(variances[-1] / 3)
    assert stats.t.sf(t, df[-1]) > 0.05


def test_even_bins_lend_each_other_freedom_and_uneven_ones_next_to_none() -> None:
    random = np.random.default_rng(0)
    chance = random.chisquare(2, 40) / 2
    _, calm = shrunk(spread(*1e-4 * chance))
    assert calm == pytest.approx(4.0)
    _, wild = shrunk(spread(*1e-4 * chance * np.exp(random.normal(0.0, 5.0, 40))))
    assert (wild < 2.5).all()
    variances, lone = shrunk(spread(1e-4))
    assert (variances[0], lone[0]) == (pytest.approx(1e-4), 2.0)
    assert shrunk([np.zeros(3)] * 2)[1].max() <= 2.5


def test_three_runs_let_a_clear_gain_through_and_a_slow_call_does_not() -> None:
    policy = always_ring()
    fresh = runs(0.8, count=3, noise=0.015)
    found = verdicts(pass_gate(policy, frame(*fresh)))
    passed = [b for b, verdict in found.items() if verdict is Verdict.PASSED]
    assert len(passed) == len(SIZES)
    # No gain at the first size, but in two runs of three NCCL's own choice took four times as long.
    slow = [
        {**row, "time_us": row["time_us"] * (1.8 if not row["is_default"] else 4.0)}
        if row["size_bytes"] == SIZES[0] and (not row["is_default"] or row["run"] != "fresh-0")
        else row
        for row in fresh
    ]
    again = verdicts(pass_gate(policy, frame(*slow)))
    assert [again[b] for b in passed] == [Verdict.REFUSED] + [Verdict.PASSED] * (len(passed) - 1)
