"""Cells of repeats: their median, noise and drift; and which of them a belief doubts."""

import math
from collections.abc import Hashable

import numpy as np
import pytest

from dynamiccl.belief import doubted, prior_of
from dynamiccl.drawn_worlds import Grid
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.repeats import Times, cell_of, cells_of, round_drift


def test_a_cell_is_a_median_with_its_noise() -> None:
    assert cell_of([1.0], 0.1) == pytest.approx((1.0, 0.01, 1))
    assert cell_of([1.0, 1.2], 0.1) == pytest.approx((1.1, 0.005, 2))
    # No pair: 4 standard deviations of a difference are 0.566.
    assert cell_of([1.0, 1.56], 0.1) == pytest.approx((1.28, 0.005, 2))
    assert cell_of([1.57, 1.0], 0.1) == pytest.approx((1.0, 0.01, 1))
    assert cell_of([1.0, 1.1, 1.3], 0.1) == pytest.approx((1.1, math.pi / 2 * 0.01 / 3, 3))
    own = 1.4826 * 0.2
    assert cell_of([1.0, 1.2, 1.4], 0.1) == pytest.approx((1.2, math.pi / 2 * own**2 / 3, 3))


def test_noise_is_that_of_near_sizes_where_they_say_enough() -> None:
    def variances(*sizes: tuple[float, int, float]) -> list[float]:
        """Of a cell of each log2 size, where so many are measured in pairs so far apart."""
        times: Times = {
            (size, i): [(0, 1.0), (1, 1.0 + apart)]
            for size, pairs, apart in sizes
            for i in range(pairs)
        }
        of_size: dict[Hashable, float] = {
            (size, i): size for size, pairs, _ in sizes for i in range(pairs)
        }
        cells = cells_of(times, of_size, [])
        return [cells[size, 0][1] for size, *_ in sizes]

    def variance(apart: float) -> float:
        return (1.4826 * apart / math.sqrt(2)) ** 2 / 2

    quiet, loud = variance(0.02), variance(0.2)
    assert variances((10.0, 12, 0.02), (20.0, 13, 0.2)) == pytest.approx([quiet, loud])
    assert variances((10.0, 11, 0.02), (20.0, 13, 0.2)) == pytest.approx([loud, loud])
    near = variances((10.0, 6, 0.02), (11.5, 6, 0.02), (20.0, 13, 0.2))
    assert near == pytest.approx([quiet, quiet, loud])
    far = variances((10.0, 6, 0.02), (11.6, 6, 0.02), (20.0, 13, 0.2))
    assert far == pytest.approx([loud, loud, loud])
    cells = cells_of({"x": [(0, 1.0)]}, {"x": 10.0, "never": 10.0}, [])
    assert cells.keys() == {"x"}
    assert cells["x"] == pytest.approx((1.0, 0.03**2, 1))
    same = cells_of({"x": [(0, 1.0), (1, 1.0)]}, {"x": 10.0}, [])["x"]
    assert same == pytest.approx((1.0, 0.001**2 / 2, 2))


def test_a_cell_is_without_the_drift_of_its_rounds() -> None:
    """Eight sizes; the second round is slow by a fifth, and only there `x` was measured."""
    defaults: Times = {("default", i): [(0, 1.0), (0, 1.0), (1, 1.2), (1, 1.2)] for i in range(8)}
    times: Times = {**defaults, ("x", 0): [(1, 0.9)]}
    cells = cells_of(times, dict.fromkeys(times, 10.0), defaults)
    assert cells["x", 0][0] - cells["default", 0][0] == pytest.approx(0.9 - 1.2, abs=0.001)


def drifting(
    drifts: list[float], tasks: int, sigma: float, seed: int = 4
) -> list[list[tuple[int, float]]]:
    generator = np.random.default_rng(seed)
    rounds = [(n, drift) for n, drift in enumerate(drifts) for _ in range(2)]
    return [
        [(n, task + drift + float(generator.normal(0.0, sigma))) for n, drift in rounds]
        for task in range(tasks)
    ]


def test_a_slow_round_is_told_from_noise_and_slow_calls() -> None:
    found = round_drift(drifting([0.0, 0.2, 0.0, 0.05], 20, 0.01))
    assert found[1] - found[0] == pytest.approx(0.2, abs=0.02)
    assert found[3] - found[2] == pytest.approx(0.05, abs=0.02)
    # Tasks that are settled have no later rounds.
    every = drifting([0.0, 0.2, 0.0, 0.3, 0.0], 20, 0.005)
    settled = [[pair for pair in task if pair[0] < 2 or at < 12] for at, task in enumerate(every)]
    found = round_drift(settled)
    assert [found[n] - found[0] for n in (1, 3)] == pytest.approx([0.2, 0.3], abs=0.01)
    # The median over eight tasks scatters by this much; the lower of a pair by 0.83 of one.
    by_noise = 0.83 * 0.05 * math.sqrt(math.pi / 2 / 8)
    quiet = [round_drift(drifting([0.0] * 6, 8, 0.05, seed)) for seed in range(40)]
    values = [value for one in quiet for value in one.values()]
    assert float(np.sqrt(np.mean(np.square(values)))) < 0.5 * by_noise
    slow = [
        sorted((n, value + (n == 3 and at % 2)) for at, (n, value) in enumerate(task))
        for task in drifting([0.0] * 5, 8, 0.01)
    ]
    assert max(round_drift(slow).values()) - min(round_drift(slow).values()) < 0.03
    assert round_drift(drifting([0.0, 0.5], 4, 0.01)).keys() == {0, 1}
    # Adaptive rounds see few tasks, most of them once: these say nothing of noise, nor of drift.
    once = [[(n, value)] for n in (0, 1) for value in (0.0, 0.3, 0.6, 0.9)]
    told = [task[::2] for task in drifting([0.0, 0.0], 4, 0.02)]
    assert round_drift([*told, *once]) == round_drift(told)
    assert round_drift(once) == {}
    for few in ([], drifting([0.0, 0.5], 3, 0.01), [[(0, 1.0), (0, 1.1)]] * 5):
        assert round_drift(few) == {}


def test_a_slow_cell_of_few_repeats_alone_is_doubted() -> None:
    configs = [Config(Algorithm.Ring, Protocol.Simple, count) for count in (1, 2, 4, 8, 16)]
    prior = prior_of(Grid(tuple(range(14, 24)), (ABSTAIN, *configs)))
    places, noise = np.arange(len(prior.mean)), np.full(len(prior.mean), 0.01**2)
    times, repeats = prior.worlds[:, 0], np.ones(len(noise))
    moved = times.copy()
    moved[30] += 1.0
    found = doubted(prior, places, moved, noise, repeats)
    assert found[30] > 0.2**2
    assert np.count_nonzero(found > noise) <= 3  # few others are so late by chance
    repeats[30] = 3
    assert doubted(prior, places, moved, noise, repeats)[30] == noise[30]
    moved[30] -= 2.0
    repeats[30] = 1
    assert doubted(prior, places, moved, noise, repeats)[30] == noise[30]
