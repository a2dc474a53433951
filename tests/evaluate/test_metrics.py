"""Summaries against figures by hand; cross-fitted regret where the truth is known."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.evaluate.metrics import (
    INDEPENDENT,
    OPTIMISTIC,
    cross_fit,
    fitted_rows,
    result_rows,
    summarise,
)
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from tests.evaluate.grids import NAN, grid, noise

CATALOGUE = Catalogue(
    (ABSTAIN, Config(Algorithm.Ring, Protocol.LL), Config(Algorithm.Ring, Protocol.Simple))
)
GRID = grid([1 << 10, 1 << 20], [[10.0, 8.0, 16.0], [100.0, 400.0, 100.0]])
CHOICES = {
    "policy": np.array([1, 0]),
    "nccl-default": np.array([0, 0]),
    "best-fixed": np.array([2, 2]),
}


def summaries(
    band: float | None = 0.05, of: TaskGrid = GRID, **probes: list[int]
) -> dict[str, dict[str, Any]]:
    tried = {name: np.array(each) for name, each in probes.items()}
    choices = {name: each[: of.tasks.height] for name, each in CHOICES.items()}
    return summarise(result_rows(of, CATALOGUE, choices, noise(band), tried), of, choices)


def test_figures_by_hand() -> None:
    found = summaries()
    default, ours, fixed = (found[name] for name in ("nccl-default", "policy", "best-fixed"))
    assert default["mean"] == pytest.approx(0.125)  # 10/8 - 1 and 0
    assert default["max"] == pytest.approx(0.25)
    assert default["p95"] == pytest.approx(0.95 * 0.25)
    assert (default["ratio_to_default"], default["noise_band"]) == (1.0, 0.05)
    assert ours["mean"] == 0.0
    assert ours["ratio_to_default"] == pytest.approx(np.sqrt(0.8))
    assert ours["gain"] == pytest.approx(1 - np.sqrt(0.8))
    assert ours["abstained"] == 0.5
    assert fixed["slower_than_default"] == 0.5  # 16 against 10
    assert summaries(0.7)["best-fixed"]["slower_than_default"] == 0.0
    assert summaries(None)["best-fixed"]["slower_than_default"] is None
    assert summaries(None)["policy"]["noise_band"] is None


def test_every_collective_has_its_own_noise_band() -> None:
    times = [[10.0, 8.0, 11.0], [10.0, 8.0, 11.0]]
    both = grid([1, 1], times)
    both = replace(
        both, tasks=both.tasks.with_columns(collective=np.array(["AllReduce", "Reduce"]))
    )
    rows = result_rows(both, CATALOGUE, CHOICES, noise(0.2, Reduce=0.05))
    assert rows.filter(policy="policy")["noise_band"].to_list() == [0.2, 0.05]
    assert summarise(rows, both, CHOICES)["best-fixed"]["slower_than_default"] == 0.5
    # Of one task alone nothing is said of both.
    partly = summarise(result_rows(both, CATALOGUE, CHOICES, noise(0.2)), both, CHOICES)
    for each in partly.values():
        assert (each["noise_band"], each["slower_than_default"]) == (None, None)


def test_interval_holds_the_mean_and_needs_independent_repeats() -> None:
    noisy = {key: times * np.array([0.9, 1.0, 1.1]) for key, times in GRID.samples.items()}
    ours = summaries(0.05, replace(GRID, samples=noisy), policy=[3, 5])["policy"]
    low, high = ours["interval"]
    assert low <= ours["crossfit"] <= high
    low, high = ours["gain_interval"]
    assert low <= ours["gain"] <= high
    assert ours["tasks_with_interval"] == 2
    assert ours["probes"] == 4.0
    single = grid([1 << 10], [[10.0, 8.0, 16.0]])
    single.repeats[0, 2] = 2
    alone = summaries(0.05, single)["policy"]
    assert (alone["interval"], alone["gain_interval"], alone["crossfit"]) == (None, None, None)
    assert alone["tasks_with_interval"] == 0


def test_rows_mark_cells_without_independent_runs_and_compare_channels_that_were_read() -> None:
    mixed = grid([1 << 10, 1 << 20], GRID.times_us.tolist())
    mixed.repeats[1, 1] = 1
    mixed = replace(mixed, channels=np.array([[16.0, 4.0, 32.0], [16.0, 2.0, np.nan]]))
    rows = result_rows(mixed, CATALOGUE, CHOICES, noise(0.05))
    fixed = rows.filter(policy="best-fixed")
    assert fixed["channels"].to_list() == [32.0, None]
    assert fixed["default_channels"].to_list() == [16.0, 16.0]
    # Where it chose the same at the second, nobody knows.
    assert summaries(0.05, mixed)["best-fixed"]["channels"] == 2.0
    ours = rows.filter(policy="policy")
    assert ours["evidence"].to_list() == [INDEPENDENT, OPTIMISTIC]
    assert ours["chosen_config"].to_list() == ["Ring/LL", "ABSTAIN"]
    assert ours["oracle_us"].to_list() == [8.0, 100.0]
    assert ours["noise_band"].to_list() == [0.05, 0.05]
    assert ours["gain"].to_list() == [pytest.approx(0.2), 0.0]


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


def regret_of(tasks: TaskGrid, action: int) -> tuple[float, list[float], float]:
    """Cross-fitted regret, its interval, and gain of one config throughout."""
    count = tasks.tasks.height
    rows = fitted_rows(tasks, np.arange(count))
    found = cross_fit(tasks, rows, {"any": np.full(count, action)})["any"]
    return found["crossfit"], found["interval"], found["gain_crossfit"]


def test_a_real_difference_is_found_and_of_configs_that_are_alike_none() -> None:
    """Against the best of ten noisy medians any of them seems to lose; none does."""
    alike = measured([100.0] * 10, tasks=200, runs=5, spread=0.05, seed=0)
    assert alike.regret(np.full(200, 3)).mean() > 0.03
    regret, (low, high), _ = regret_of(alike, 3)
    assert abs(regret) < 0.005
    assert low < 0.0 < high
    tasks = measured([110.0, 100.0, 150.0], tasks=100, runs=6, spread=0.02, seed=1)
    regret, (low, high), gain = regret_of(tasks, 0)
    assert regret == pytest.approx(0.10, abs=0.01)
    assert low < 0.10 < high
    assert gain == 0.0
    regret, _, gain = regret_of(tasks, 1)
    assert regret == pytest.approx(0.0, abs=0.005)
    assert gain == pytest.approx(1 - 1 / 1.1, abs=0.01)


def test_equal_twins_are_one() -> None:
    """Broadcast and Reduce of a simulated system count once; other sizes and times do not."""
    rows = [[10.0, NAN, 8.0], [10.0, NAN, 8.0], [10.0, 9.0, 8.0], [10.0, NAN, 8.0]]
    twins = grid([1, 1, 1, 2], rows)
    assert fitted_rows(twins, np.arange(4)).tolist() == [0, 2, 3]
    twins.repeats[0] = 2  # too few runs
    assert fitted_rows(twins, np.arange(4)).tolist() == [1, 2, 3]
