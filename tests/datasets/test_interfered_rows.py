"""What was measured beside others teaches interference, and nothing about the quiet."""

import math
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from dynamiccl.datasets.cells import cell_times, interfered, noise_bands, quiet
from dynamiccl.datasets.features import CONTEXT_COLUMN, HISTORY_SLICE
from dynamiccl.datasets.history import WINDOW_COLUMN
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.steps import training_noise, with_interfered_reference, with_reference
from dynamiccl.train.trigger.module import TriggerModule
from tests.datasets.test_episodes import build, grid, tag, trained, window_times
from tests.rows import default, forced, frame
from tests.splits import split_of

LOUD: dict[str, Any] = {"interference_kind": "congestion", "interference_level": 1.0}
KNOWN, LEVEL = CONTEXT_COLUMN["interference_known"], CONTEXT_COLUMN["interference"]


AT_ONCE: dict[str, Any] = {"num_comms": 4, "comm_split": "DIV 8"}


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
    alone, both = build(grid()), build([*slowed(), *grid()])
    cold, quiet = alone.counts["cold"], len(alone)
    np.testing.assert_array_equal(both.context[:cold], alone.context[:cold])
    np.testing.assert_array_equal(both.reward[:cold], alone.reward[:cold])
    warm = slice(both.counts["cold"], both.counts["cold"] + alone.counts["warm"])
    for name in ("window", "context", "mask", "action", "reward"):
        wanted = getattr(alone, name)[cold:quiet]
        np.testing.assert_array_equal(getattr(both, name)[warm], wanted)
    assert training_noise(frame(*grid(), *slowed())).equals(training_noise(frame(*grid())))


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


def test_at_least_half_is_cold_however_much_ran_beside() -> None:
    loud = [row for level in (1.0, 2.0, 3.0) for row in slowed(interference_level=level)]
    found = build([*grid(), *loud])
    assert found.counts["cold"] >= found.counts["warm"] > 3 * len(trained(grid()))
    assert not found.window[found.is_cold].any()
    assert not found.context[found.is_cold][:, HISTORY_SLICE].any()


def test_held_out_sizes_stay_out() -> None:
    """Changing every held-out time beside a disturbance changes nothing that is trained on."""
    loud = slowed()
    other = [
        row if split_of(row["size_bytes"]) is Split.TRAIN else {**row, "time_us": 7.0}
        for row in loud
    ]
    first, second = build([*grid(), *loud]), build([*grid(), *other])
    for name in ("window", "context", "mask", "action", "reward"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert len(first) - len(build(grid())) > 0


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
    ("quiet_us", "loud_us", "level"), [(100.0, 80.0, 0.0), (1.0, 9e9, math.expm1(8.0))]
)
def test_a_level_has_the_bounds_of_the_triggers(
    quiet_us: float, loud_us: float, level: float
) -> None:
    rows = [default(loud_us, **LOUD)]
    found = with_interfered_reference(frame(*rows), frame(default(quiet_us), *rows))
    assert found["interference"].item() == pytest.approx(level)
    assert found["reference_us"].item() == loud_us


def test_a_quiet_default_that_was_not_measured_at_the_size_gives_no_level() -> None:
    loud = [default(160.0, size_bytes=3 << 19, **LOUD)]
    quiet = [default(100.0, size_bytes=1 << 20), default(150.0, size_bytes=1 << 21)]
    found = with_interfered_reference(frame(*loud), frame(*quiet, *loud))
    assert found.select("interference", "reference_us").row(0) == (None, None)


def test_rows_of_an_unknown_strength_belong_together() -> None:
    """An import may know what ran beside, and not how strong it was."""
    found = build([*grid(), *slowed(interference_kind="stress", interference_level=None)])
    assert found.counts["interfered_used"] == len(trained(slowed()))
    assert isinstance(found.context, np.ndarray)
    assert not pl.Series(found.context[-5:, LEVEL]).eq(0.0).any()


def test_they_are_cells_of_their_own() -> None:
    rows = frame(default(100.0), default(140.0, **AT_ONCE), default(150.0, num_comms=2, run="b"))
    cells = cell_times(rows)
    assert sorted(cells["time_us"]) == [100.0, 140.0, 150.0]
    assert rows["trial"].n_unique() == 3


def test_lone_rows_have_the_ids_that_they_had() -> None:
    alone = frame(default())["trial"][0]
    assert alone == frame(default(num_comms=None, comm_split=None))["trial"][0]
    assert alone != frame(default(**AT_ONCE))["trial"][0]


def test_they_are_disturbed_and_no_noise() -> None:
    rows = frame(default(100.0), default(140.0, repeat=1, **AT_ONCE))
    assert quiet(rows)["time_us"].to_list() == [100.0]
    assert interfered(rows)["time_us"].to_list() == [140.0]
    assert noise_bands(quiet(rows)).is_empty()


def test_no_reference_of_a_lone_row_comes_from_them() -> None:
    rows = frame(default(140.0, **AT_ONCE), forced("Ring", time_us=90.0))
    assert with_reference(rows.filter(~rows["is_default"]), rows)["reference_us"].to_list() == [
        None
    ]


def test_their_reference_is_the_default_of_as_many_at_once() -> None:
    rows = frame(
        default(100.0),
        default(150.0, **AT_ONCE),
        default(300.0, num_comms=8, comm_split="DIV 8"),
        forced("Ring", time_us=120.0, **AT_ONCE),
    )
    found = with_interfered_reference(
        interfered(rows).filter(~interfered(rows)["is_default"]), rows
    )
    assert found["reference_us"].to_list() == [150.0]
    assert found["interference"].to_list() == pytest.approx([0.5])
