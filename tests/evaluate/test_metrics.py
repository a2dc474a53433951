"""Summaries and verdicts, against figures worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.evaluate.headline import table_verdict
from dynamiccl.evaluate.metrics import (
    INDEPENDENT,
    OPTIMISTIC,
    Summary,
    default_verdicts,
    result_rows,
    summarise,
)
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from tests.evaluate.grids import grid

CATALOGUE = Catalogue(
    (ABSTAIN, Config(Algorithm.Ring, Protocol.LL), Config(Algorithm.Ring, Protocol.Simple))
)
GRID = grid([1 << 10, 1 << 20], [[10.0, 8.0, 16.0], [100.0, 400.0, 100.0]])
CHOICES = {
    "policy": np.array([1, 0]),
    "nccl-default": np.array([0, 0]),
    "best-fixed": np.array([2, 2]),
}


def summaries(band: float | None = 0.05) -> dict[str, Summary]:
    found = summarise(GRID, np.array([0, 1]), CHOICES, band)
    return {summary.policy: summary for summary in found}


def test_regret_ratio_and_time_weighted_regret() -> None:
    default = summaries()["nccl-default"]
    assert default.mean == pytest.approx(0.125)  # 10/8 - 1 and 0
    assert default.max == pytest.approx(0.25)
    assert default.ratio_to_default == 1.0
    assert default.time_weighted == pytest.approx(110 / 108 - 1)
    ours = summaries()["policy"]
    assert ours.mean == 0.0
    assert ours.ratio_to_default == pytest.approx(np.sqrt(0.8))
    assert ours.abstained == 0.5


def test_share_slower_than_default_counts_beyond_the_band_only() -> None:
    assert summaries()["best-fixed"].slower_than_default == 0.5  # 16 against 10
    assert summaries(band=0.7)["best-fixed"].slower_than_default == 0.0
    assert summaries(band=None)["best-fixed"].slower_than_default is None


def test_interval_holds_the_mean_and_needs_independent_repeats() -> None:
    noisy = {key: times * np.array([0.9, 1.0, 1.1]) for key, times in GRID.samples.items()}
    (ours, *_) = summarise(replace(GRID, samples=noisy), np.array([0, 1]), CHOICES, 0.05)
    assert ours.interval is not None
    low, high = ours.interval
    assert ours.crossfit is not None
    assert low <= ours.crossfit <= high
    single = grid([1 << 10], [[10.0, 8.0, 16.0]])
    single.repeats[0, 2] = 2
    (alone, *_) = summarise(single, np.array([0]), {"policy": np.array([1])}, 0.05)
    assert alone.interval is None
    assert alone.crossfit is None
    assert alone.tasks_with_interval == 0


def test_rows_mark_cells_without_independent_runs() -> None:
    mixed = grid([1 << 10, 1 << 20], GRID.times_us.tolist())
    mixed.repeats[1, 1] = 1
    rows = result_rows(mixed, CATALOGUE, CHOICES, {("s", "AllReduce"): 0.05})
    ours = rows.filter(policy="policy")
    assert ours["evidence"].to_list() == [INDEPENDENT, OPTIMISTIC]
    assert ours["chosen_config"].to_list() == ["Ring/LL", "ABSTAIN"]
    assert ours["oracle_us"].to_list() == [8.0, 100.0]
    assert ours["noise_band"].to_list() == [0.05, 0.05]


def test_verdict_says_that_a_simple_baseline_beats_the_policy() -> None:
    found = summaries()
    swapped = [
        Summary(**{**found["best-fixed"].to_json(), "policy": "policy"}),
        found["nccl-default"],
        Summary(**{**found["policy"].to_json(), "policy": "best-fixed"}),
    ]
    assert "DOES NOT BEAT" in default_verdicts("s", swapped, ["policy"], 0.05)[0]
    assert "better than policy beyond" in table_verdict("policy", swapped, ["policy"], 0.05)


def test_verdict_on_a_default_within_the_noise() -> None:
    text = default_verdicts("s", list(summaries().values()), ["policy"], 0.5)[0]
    assert "within the noise band" in text
    assert "no worse beyond" in text


def test_verdict_without_repeats_claims_nothing() -> None:
    text = default_verdicts("s", list(summaries(None).values()), ["policy"], None)[0]
    assert "proves nothing" in text


def test_searchers_and_the_oracle_are_no_simple_baselines() -> None:
    choices = CHOICES | {"oracle": np.array([1, 0]), "descent": np.array([1, 0])}
    probes = {"descent": np.array([10, 20])}
    worse = choices | {"policy": np.array([0, 0])}
    found = summarise(GRID, np.array([0, 1]), worse, 0.05, probes)
    assert {s.policy: s.probes for s in found if s.probes} == {"descent": 15.0}
    assert table_verdict("policy", found, ["policy"], 0.05).startswith("No simple table is better")
