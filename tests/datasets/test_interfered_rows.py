"""What was measured beside others teaches interference, and nothing about the quiet."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from dynamiccl.datasets.cells import interfered, noise_bands, quiet
from dynamiccl.datasets.features import CONTEXT_COLUMN, HISTORY_SLICE
from dynamiccl.datasets.history import WINDOW_COLUMN
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.steps import training_noise, with_interfered_reference, with_reference
from dynamiccl.train.trigger import TriggerModule
from tests.datasets.test_episodes import build, grid, tag, trained, window_times
from tests.rows import default, forced, frame, split_of

LOUD: dict[str, Any] = {"interference_kind": "congestion", "interference_level": 1.0}
KNOWN, LEVEL = CONTEXT_COLUMN["interference_known"], CONTEXT_COLUMN["interference"]


def slowed(by: float = 1.5, **columns: Any) -> list[dict[str, Any]]:
    """The grid beside a disturbance; the longer a call took, the more it is slowed."""
    rows = grid(**{**LOUD, **columns})
    for number, row in enumerate(rows):
        row["time_us"] *= by * 1.003**number
    return rows


def default_us(rows: list[dict[str, Any]], like: dict[str, Any]) -> float:
    """NCCL's default of the same size and run."""
    (found,) = [
        row["time_us"]
        for row in rows
        if row["is_default"] and all(row[k] == like[k] for k in ("size_bytes", "run"))
    ]
    return float(found)


def test_quiet_rows_are_as_without_them() -> None:
    loud = slowed()
    alone, both = build(grid()), build([*loud, *grid()])
    cold, quiet = alone.counts["cold"], len(alone)
    np.testing.assert_array_equal(both.context[:cold], alone.context[:cold])
    np.testing.assert_array_equal(both.reward[:cold], alone.reward[:cold])
    warm = slice(both.counts["cold"], both.counts["cold"] + alone.counts["warm"])
    for name in ("window", "context", "mask", "action", "reward"):
        wanted = getattr(alone, name)[cold:quiet]
        np.testing.assert_array_equal(getattr(both, name)[warm], wanted)
    assert training_noise(frame(*grid(), *loud)).equals(training_noise(frame(*grid())))
    # Every held-out time beside a disturbance is another one, and nothing that is trained on.
    for row in loud:
        if split_of(row["size_bytes"]) is not Split.TRAIN:
            row["time_us"] = 7.0
    again = build([*loud, *grid()])
    for name in ("window", "context", "mask", "action", "reward"):
        np.testing.assert_array_equal(getattr(again, name), getattr(both, name))
    # However much ran beside, at least half is cold; of an unknown strength it belongs together.
    strengths = [row for level in (1.0, 2.0, None) for row in slowed(interference_level=level)]
    most = build([*grid(), *strengths])
    assert most.counts["cold"] >= most.counts["warm"] > 3 * len(trained(grid()))
    assert most.counts["interfered_used"] == 3 * len(trained(grid()))
    assert not most.window[most.is_cold].any()
    assert not most.context[most.is_cold][:, HISTORY_SLICE].any()


def test_they_are_warm_know_their_interference_and_see_what_ran_beside_the_same() -> None:
    quiet, loud = grid(), [*slowed(), *slowed(3.0, interference_level=2.0)]
    found = build([*quiet, *loud])
    used = trained(loud)
    assert found.counts["interfered"] == len(loud)
    assert (found.counts["interfered_used"], found.counts["interfered_without_level"]) == (
        len(used),
        0,
    )
    first = len(found) - len(used)
    assert not found.is_cold[first:].any()
    by_group: dict[tuple[Any, ...], set[float]] = {}
    for row in used:
        by_group.setdefault(group(row), set()).add(tag(row))
    levels = {tag(row): level_of(row, quiet, loud) for row in used}
    seen = 0
    for index in range(first, len(found)):
        times = window_times(found.window[index])
        (others,) = [members for members in by_group.values() if times <= members]
        assert 0 < len(times) < len(others)
        (level,) = {levels[each] for each in others}
        assert (found.context[index, KNOWN], found.context[index, LEVEL]) == (
            1.0,
            pytest.approx(level, rel=1e-5),
        )
        valid = found.window[index, :, WINDOW_COLUMN["valid"]] > 0.0
        told = found.window[index, valid, WINDOW_COLUMN["interference"]]
        np.testing.assert_allclose(told, level, rtol=1e-5)
        seen += level > 0.5
    assert seen > len(used) // 2


def group(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["size_bytes"], row["run"], row["interference_level"]


def level_of(row: dict[str, Any], quiet: list[dict[str, Any]], loud: list[dict[str, Any]]) -> float:
    same = [each for each in loud if each["interference_level"] == row["interference_level"]]
    return round(default_us(same, row) / default_us(quiet, row) - 1.0, 9)


def test_their_reward_is_over_the_default_beside_the_same_disturbance() -> None:
    quiet, loud = grid(), slowed()
    found = build([*quiet, *loud])
    used = trained(loud)
    wanted = sorted(-row["time_us"] / default_us(loud, row) for row in used)
    rewards = sorted(found.reward[-len(used) :].tolist())
    assert rewards == pytest.approx(wanted, rel=1e-5)
    assert sum(reward == -1.0 for reward in rewards) == sum(row["is_default"] for row in used)


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param(lambda row: row["is_default"], id="none beside it"),
        pytest.param(
            lambda row: row["is_default"] and row["run"] == "cycle-0", id="none in that run"
        ),
    ],
)
def test_without_the_default_beside_the_same_disturbance_they_are_counted(gone: Any) -> None:
    loud = slowed()
    left = [row for row in loud if not gone(row)]
    found = build([*grid(), *left])
    runs = {row["run"] for row in left if row["is_default"]}
    used = sum(row["run"] in runs for row in trained(left))
    assert found.counts["interfered_used"] == used < len(trained(left))
    assert found.counts["interfered_without_level"] == len(trained(left)) - used
    assert (len(runs) > 0) == (used > 0)


def test_a_level_is_what_a_trigger_that_is_sure_tells() -> None:
    """60 quiet calls and 60 of the same stream that take 1.6 times as long."""
    trigger = TriggerModule()
    state = trigger.new_state(1)
    log_size = np.log(1 << 20, dtype=np.float32)
    for number in range(120):
        time_us = 100.0 * (1.6 if number >= 60 else 1.0)
        facts = torch.tensor([math.log(time_us)]), torch.tensor([log_size])
        with torch.no_grad():
            state, _, told = trigger(state, *facts)
    loud = [default(160.0, **LOUD), forced("Ring", "LL", 150.0, **LOUD)]
    found = with_interfered_reference(frame(*loud), frame(default(100.0), *loud))
    assert found["interference"].to_list() == pytest.approx([0.6, 0.6])
    assert float(told) == pytest.approx(0.6, abs=0.02)


@pytest.mark.parametrize(
    ("quiet", "loud_us", "level"),
    [
        ({"time_us": 100.0}, 80.0, 0.0),
        # The bounds are the Trigger's.
        ({"time_us": 1.0}, 9e9, math.expm1(8.0)),
        # A quiet default that was not measured at the size gives none.
        ({"size_bytes": 1 << 21}, 160.0, None),
    ],
)
def test_levels_are_bounded(quiet: dict[str, Any], loud_us: float, level: float | None) -> None:
    rows = frame(default(loud_us, **LOUD), {**default(100.0), **quiet}, default(size_bytes=1 << 19))
    found = with_interfered_reference(interfered(rows), rows)
    told = found.select("interference", "reference_us").row(0)
    assert told == ((None, None) if level is None else pytest.approx((level, loud_us)))


def test_rows_beside_other_communicators_are_disturbed_cells_of_their_own_and_no_noise() -> None:
    at_once: dict[str, Any] = {"num_comms": 4, "comm_split": "DIV 8"}
    rows = frame(
        default(100.0),
        default(150.0, **at_once),
        default(300.0, num_comms=8, comm_split="DIV 8"),
        forced("Ring", time_us=120.0, **at_once),
    )
    assert rows["trial"].n_unique() == 4
    assert rows["trial"][0] == frame(default(num_comms=None, comm_split=None))["trial"][0]
    assert quiet(rows)["time_us"].to_list() == [100.0]
    assert noise_bands(quiet(rows)).is_empty()
    # Their reference is the default of as many at once, and they are none of a lone row.
    forced_rows = rows.filter(~rows["is_default"])
    found = with_interfered_reference(forced_rows, rows)
    assert found.select("reference_us", "interference").row(0) == pytest.approx((150.0, 0.5))
    alone = frame(forced("Ring", time_us=90.0))
    assert with_reference(alone, interfered(rows))["reference_us"].to_list() == [None]
