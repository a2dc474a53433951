"""The off-policy estimators tried on a report's own data, and how that is shown."""

import re
from dataclasses import replace

import numpy as np
import pytest

from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.blocks import FigureBlock, TableBlock
from dynamiccl.evaluate.ope.calibration import ESTIMATORS, LOGS, Calibration, calibrate
from dynamiccl.evaluate.ope.estimators import NO_INTERVAL, NO_OVERLAP, Estimate
from dynamiccl.evaluate.ope.shown import calibration_blocks
from tests.evaluate.grids import grid

TASKS, ACTIONS = 12, 5
ROWS = np.arange(TASKS)


@pytest.fixture(name="world")
def world_fixture() -> TaskGrid:
    """Five runs a cell, skewed, so that their mean is not their median."""
    random = np.random.default_rng(4)
    times = 100.0 * np.exp(random.uniform(-0.4, 0.4, (TASKS, ACTIONS)))
    times[:, 0] = 100.0
    exact = grid([1 << (10 + t) for t in range(TASKS)], times.tolist())
    runs = {
        cell: values[0] * np.array([0.98, 0.99, 1.0, 1.01, 1.3])
        for cell, values in exact.samples.items()
    }
    return replace(exact, samples=runs, repeats=np.full((TASKS, ACTIONS), 5))


def policies(world: TaskGrid) -> dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    return {
        "default": np.zeros(TASKS, dtype=np.int64),
        "oracle": np.nanargmin(world.times_us, axis=1).astype(np.int64),
    }


def test_truth_is_the_mean_of_the_runs_and_is_held(world: TaskGrid) -> None:
    default, oracle = calibrate(world, ROWS, policies(world))
    # By hand: the mean of a cell's runs over that of the default's.
    assert default.truth == pytest.approx(-1.0)
    best = world.times_us.min(axis=1)
    assert oracle.truth == pytest.approx(-(best / 100.0).mean())
    for found in (default, oracle):
        for name in ("SNIPS", "DR"):
            held, intervals = found.held(name)
            assert intervals == LOGS
            assert held >= 0.7 * LOGS
        for name in ("IPS", "SNIPS", "DR"):
            bias = found.bias(name)
            assert bias is not None
            assert abs(bias) < 0.02
        assert found.held("DM") == (0, 0)


def test_tasks_without_runs_are_left_out(world: TaskGrid) -> None:
    repeats = world.repeats.copy()
    repeats[6:, 1] = 2
    few = replace(world, repeats=repeats)
    chosen = policies(world)
    half = calibrate(few, ROWS, chosen)
    assert [c.truth for c in half] == [c.truth for c in calibrate(world, ROWS[:6], chosen)]
    assert calibrate(few, ROWS[6:], chosen) == []
    assert list(calibration_blocks("box", [])) == []


def test_block_names_truth_estimates_and_how_often_they_held(world: TaskGrid) -> None:
    found = calibrate(world, ROWS, policies(world))
    figure, table = calibration_blocks("Box 7", found)
    assert isinstance(figure, FigureBlock)
    assert isinstance(table, TableBlock)
    assert figure.name == "box-7-estimates"
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", figure.svg)
    assert {"truth", *ESTIMATORS, "default", "oracle"} <= {text.strip() for text in texts}
    row = dict(zip(table.heads, table.rows[1], strict=True))
    oracle = found[1]
    assert (row["policy"], row["truth"]) == ("oracle", f"{-oracle.truth:.4f}")
    first = oracle.estimates["DR"][0]
    assert first.value is not None
    assert first.low is not None
    assert first.high is not None
    assert row["DR"] == f"{-first.value:.4f} ({-first.high:.4f} to {-first.low:.4f})"
    assert row["DR, truth held"] == f"{oracle.held('DR')[0]} of {LOGS}"
    assert row["DM, truth held"] == "-"


def test_what_cannot_be_estimated_says_why() -> None:
    none = [Estimate("IPS", None, None, None, 3.0, NO_OVERLAP)] * 2
    known = [Estimate("DM", -1.5, None, None, 9.0, NO_INTERVAL)] * 2
    estimates = {"DM": known, "IPS": none, "SNIPS": none, "DR": none}
    figure, table = calibration_blocks("box", [Calibration("p", -1.0, estimates)])
    assert isinstance(figure, FigureBlock)
    assert isinstance(table, TableBlock)
    assert "DM" in figure.svg
    row = dict(zip(table.heads, table.rows[0], strict=True))
    assert (row["IPS"], row["IPS, bias"], row["IPS, truth held"]) == (NO_OVERLAP, "-", "-")
    assert (row["DM"], row["DM, bias"]) == ("1.5000", "+0.5000")
