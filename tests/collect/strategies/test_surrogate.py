import math
from dataclasses import replace

import numpy as np
import pytest

from dynamiccl.collect.grid import Trial
from dynamiccl.collect.strategies.kernel import Kernel, matern, points
from dynamiccl.collect.strategies.samples import Floats
from dynamiccl.collect.strategies.surrogate import (
    Observed,
    choose_kernel,
    fit,
    robust_variance,
)
from dynamiccl.nccl import Algorithm
from tests.collect.strategies.worlds import hockney, sweep

TRIALS = [t for t in sweep().trials if t.config.key.startswith("Ring/Simple")]


def observed(trials: list[Trial], sigma: float = 0.02, repeats: float = 1.0) -> Observed:
    random = np.random.default_rng(1)
    times = np.log([hockney(trial) for trial in trials])
    return Observed(
        points(trials),
        times + random.normal(0.0, sigma, len(trials)),
        np.full(len(trials), sigma**2),
        np.full(len(trials), repeats),
    )


def brute_force(kernel: Kernel, seen: Observed, places: Floats) -> tuple[Floats, Floats]:
    """The posterior from the joint normal's precision matrix, without any kernel algebra."""
    count = len(seen.log_us)
    both = np.vstack([seen.places, places])
    joint = kernel.matrix(both, both)
    joint[:count, :count] += np.diag(seen.variance + 1e-9)
    precision = np.linalg.inv(joint)
    covariance = np.linalg.inv(precision[count:, count:])
    centre = float(np.median(seen.log_us))
    mean = centre - covariance @ precision[count:, :count] @ (seen.log_us - centre)
    return mean, covariance


def test_points_are_octaves_and_auto_is_nan() -> None:
    auto, eight = (next(t for t in TRIALS if t.config.num_channels == n) for n in (None, 8))
    found = points([auto, eight])
    assert found.shape == (2, 3)
    assert list(found[:, 0]) == [16.0, 16.0]
    assert np.isnan(found[0, 1:]).all()
    assert found[1, 1] == 3.0
    assert points([]).shape == (0, 3)


def test_the_kernel_is_a_covariance() -> None:
    places = points([t for t in sweep().trials if t.config.algorithm is Algorithm.Ring])
    # Two protocols share these places: in one subspace every place is there once.
    places = np.unique(np.nan_to_num(places, nan=-9.0), axis=0)
    places[places == -9.0] = np.nan
    for kernel in (Kernel(), Kernel(1.0, 0.7, 0.1, 0.6, 0.0), Kernel(8.0, 6.0, 0.8, 0.02, 0.1)):
        matrix = kernel.matrix(places, places)
        assert np.allclose(matrix, matrix.T)
        assert np.linalg.eigvalsh(matrix).min() > -1e-8
    assert matern(np.array([0.0, 1.0, 100.0])) == pytest.approx([1.0, 0.523994, 0.0], abs=1e-6)


def test_nearer_configs_are_more_alike_and_auto_is_like_auto() -> None:
    def place(size: float, channels: float) -> Floats:
        return np.array([[size, channels, math.nan]])

    def alike(a: Floats, b: Floats) -> float:
        return float(Kernel().matrix(a, b)[0, 0])

    here = place(20.0, 3.0)
    assert alike(here, place(20.0, 4.0)) > alike(here, place(20.0, 5.0))
    assert alike(here, place(20.5, 3.0)) > alike(here, place(22.0, 3.0))
    auto = place(20.0, math.nan)
    assert alike(auto, place(20.0, math.nan)) > alike(auto, here) == alike(auto, place(20.0, 0.0))


def test_the_posterior_is_that_of_the_joint_normal() -> None:
    seen = observed(TRIALS[::5], repeats=3.0)
    places = points(TRIALS[1:30:3])
    mean, covariance = fit(Kernel(), seen).predict(places)
    wanted_mean, wanted_covariance = brute_force(Kernel(), seen, places)
    assert mean == pytest.approx(wanted_mean, abs=1e-5)
    assert covariance == pytest.approx(wanted_covariance, abs=1e-5)


def test_nothing_observed_leaves_the_prior() -> None:
    places = points(TRIALS[:4])
    mean, covariance = fit(Kernel(), observed([])).predict(places)
    assert not mean.any()
    assert covariance == pytest.approx(Kernel().matrix(places, places))


def test_a_slow_outlier_is_doubted_and_a_fast_one_and_repeats_are_not() -> None:
    seen = observed(TRIALS, sigma=0.01)
    slow = seen.log_us.copy()
    slow[30] += 1.0
    variance = robust_variance(Kernel(), replace(seen, log_us=slow))
    assert math.sqrt(variance[30]) > 0.2
    assert np.delete(variance, 30) == pytest.approx(np.delete(seen.variance, 30), rel=5)
    mean, _ = fit(Kernel(), replace(seen, log_us=slow)).predict(seen.places)
    truth = np.log([hockney(trial) for trial in TRIALS])
    assert np.abs(mean - truth).max() < 0.05
    fast = seen.log_us.copy()
    fast[30] -= 1.0
    assert robust_variance(Kernel(), replace(seen, log_us=fast))[30] == seen.variance[30]
    repeated = replace(seen, log_us=slow, repeats=np.full(len(slow), 3.0))
    assert np.array_equal(robust_variance(Kernel(), repeated), seen.variance)


def test_the_chosen_kernel_explains_better_than_the_first_and_fills_gaps() -> None:
    seen = observed(TRIALS[::3], sigma=0.01)
    kernel = choose_kernel([seen])
    mean, covariance = fit(kernel, seen).predict(points(TRIALS))
    error = mean - np.log([hockney(trial) for trial in TRIALS])
    first, _ = fit(Kernel(), seen).predict(points(TRIALS))
    worse = first - np.log([hockney(trial) for trial in TRIALS])
    assert np.sqrt((error**2).mean()) < min(0.05, 1.05 * np.sqrt((worse**2).mean()))
    standard = error / np.sqrt(np.diag(covariance))
    assert 0.2 < np.sqrt((standard**2).mean()) < 2.5


def test_a_rough_world_is_not_taken_for_a_smooth_one() -> None:
    seen = observed(TRIALS, sigma=0.01)
    rough = seen.log_us + np.random.default_rng(5).normal(0.0, 0.2, len(TRIALS))
    assert choose_kernel([replace(seen, log_us=rough)]).own == 0.1
    assert choose_kernel([seen]).own < 0.05
    assert choose_kernel([observed([]), observed(TRIALS[:1])]) == Kernel()
