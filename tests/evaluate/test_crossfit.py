"""Cross-fitted regret on noise whose truth is known."""

from dataclasses import replace

import numpy as np
import pytest

from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.crossfit import cross_fit, fitted_rows, has_runs
from tests.evaluate.grids import NAN, grid


def measured(true_us: list[float], *, tasks: int, runs: int, spread: float, seed: int) -> TaskGrid:
    """Tasks alike, every cell measured `runs` times with log-normal noise."""
    random = np.random.default_rng(seed)
    exact = grid([1 << 10] * tasks, [true_us] * tasks)
    samples = {
        cell: times[0] * random.lognormal(0.0, spread, runs)
        for cell, times in exact.samples.items()
    }
    times = exact.times_us.copy()
    for (task, action), values in samples.items():
        times[task, action] = np.median(values)
    return replace(exact, times_us=times, samples=samples)


def test_configs_that_are_all_alike_have_no_regret() -> None:
    """Against the best of ten noisy medians any of them seems to lose; none does."""
    tasks = measured([100.0] * 10, tasks=200, runs=5, spread=0.05, seed=0)
    always = {"any": np.full(200, 3)}
    naive = tasks.regret(always["any"]).mean()
    fitted = cross_fit(tasks, np.arange(200), {"any": [always["any"]]})["any"]
    assert fitted is not None
    assert naive > 0.03
    assert abs(fitted.regret.mean) < 0.005
    assert fitted.regret.low < 0.0 < fitted.regret.high


def test_a_real_difference_is_found() -> None:
    tasks = measured([110.0, 100.0, 150.0], tasks=100, runs=6, spread=0.02, seed=1)
    rows = np.arange(100)
    choices = {"default": [np.zeros(100, int)], "best": [np.ones(100, int)]}
    fitted = cross_fit(tasks, rows, choices, band=0.04)
    default, best = fitted["default"], fitted["best"]
    assert default is not None
    assert best is not None
    assert default.regret.mean == pytest.approx(0.10, abs=0.01)
    assert default.regret.low < 0.10 < default.regret.high
    assert default.p95_regret.mean > default.regret.mean
    assert default.ratio_to_default.mean == 1.0
    assert best.regret.mean == pytest.approx(0.0, abs=0.005)
    assert best.ratio_to_default.mean == pytest.approx(1 / 1.1, abs=0.01)
    assert best.share_worse is not None
    assert best.share_worse.mean == 0.0


def test_seeds_that_differ_widen_the_interval() -> None:
    tasks = measured([110.0, 100.0, 150.0], tasks=40, runs=6, spread=0.02, seed=1)
    always = [np.full(40, action) for action in range(3)]
    choices = {"steady": [always[1]] * 4, "luck": [always[1]] * 3 + [always[2]]}
    fitted = cross_fit(tasks, np.arange(40), choices, band=0.04)
    steady, luck = fitted["steady"], fitted["luck"]
    assert steady is not None
    assert luck is not None
    assert luck.regret.mean == pytest.approx(0.5 / 4, abs=0.03)
    assert (luck.regret.low < 0.05, luck.regret.high > 0.2) == (True, True)
    assert steady.regret.high < 0.02
    assert luck.share_worse is not None
    assert luck.share_worse.mean == pytest.approx(0.25, abs=0.05)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    held = 0
    for seed in range(60):
        tasks = measured([108.0, 100.0], tasks=10, runs=6, spread=0.03, seed=seed)
        fitted = cross_fit(tasks, np.arange(10), {"default": [np.zeros(10, int)]})["default"]
        assert fitted is not None
        held += fitted.regret.low <= 0.08 <= fitted.regret.high
    assert held >= 54  # of 60; wider than need be, since halves are parted at random


def test_tasks_without_runs_enough_are_left_out() -> None:
    mixed = grid([1, 2, 3], [[10.0, 20.0], [10.0, NAN], [30.0, 10.0]])
    mixed.repeats[0, 1] = 2
    assert has_runs(mixed).tolist() == [False, True, True]
    choices = {"default": [np.zeros(3, int)]}
    fitted = cross_fit(mixed, np.arange(3), choices)["default"]
    assert fitted is not None
    assert fitted.regret.mean == pytest.approx((0.0 + 2.0) / 2)
    assert cross_fit(mixed, np.array([0]), choices) == {"default": None}


def test_equal_twins_are_one() -> None:
    """Broadcast and Reduce of a simulated system count once; other sizes and times do not."""
    rows = [[10.0, NAN, 8.0], [10.0, NAN, 8.0], [10.0, 9.0, 8.0], [10.0, NAN, 8.0]]
    twins = grid([1, 1, 1, 2], rows)
    assert fitted_rows(twins, np.arange(4)).tolist() == [0, 2, 3]
    twins.repeats[0] = 2
    assert fitted_rows(twins, np.arange(4)).tolist() == [1, 2, 3]
