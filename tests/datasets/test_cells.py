"""Cells, their noise, and which rows count; what is scored is in test_scoring.py."""

from typing import Any

import numpy as np
import pytest

from dynamiccl.datasets import cells
from tests.rows import default, forced, frame

WELL: tuple[dict[str, Any], ...] = ({}, {"throttled": False, "ecc_errors": 0})
UNWELL: tuple[dict[str, Any], ...] = (
    {"throttled": True},
    {"ecc_errors": 2},
    {"throttled": True, "ecc_errors": 1},
)


def repeats(*times: float, **columns: Any) -> list[dict[str, Any]]:
    return [forced("Ring", "LL", t, repeat=i, **columns) for i, t in enumerate(times)]


def ring(time_us: float, **columns: Any) -> dict[str, Any]:
    return {**forced("Ring", "LL", time_us), **columns}


@pytest.mark.parametrize(
    ("rows", "time_us", "count"),
    [
        (repeats(1.0, 100.0, 3.0, 4.0), 3.5, 4),
        # One measurement that was printed twice counts once.
        ([*repeats(1.0, 5.0), ring(9.0, repeat=1)], 3.0, 2),
        ([ring(1.0, run="a"), ring(3.0, run="b")], 2.0, 2),
        ([ring(1.0, sweep="a"), ring(3.0, sweep="b")], 2.0, 2),
        ([ring(1.0), ring(3.0, driver_version="1", actual_algorithm="Tree", repeat=1)], 2.0, 2),
    ],
)
def test_time_is_a_median(rows: list[dict[str, Any]], time_us: float, count: int) -> None:
    [cell] = cells.cell_times(frame(*rows)).to_dicts()
    assert (cell["time_us"], cell["repeats"]) == (time_us, count)


@pytest.mark.parametrize(
    "change",
    [
        {"requested_num_channels": 2},
        {"requested_protocol": None},
        {"is_default": True, "requested_algorithm": None, "requested_protocol": None},
        {"size_bytes": 64},
        {"in_place": True},
        {"launch_profile": "tuned"},
        {"nccl_version": None},
        {"interference_kind": "congestion"},
        {"num_comms": 4, "comm_split": "DIV 8"},
    ],
)
def test_other_task_or_request_is_another_cell(change: dict[str, object]) -> None:
    assert cells.cell_times(frame(ring(1.0), ring(2.0, **change))).height == 2


def test_rows_that_failed_or_whose_gpus_were_unwell_are_not_usable() -> None:
    statuses = ("failed", "infeasible", "timed_out", "wrong_values")
    failed = [default(None), default(0.0), *(default(1.0, status=each) for each in statuses)]
    assert cells.usable(frame(*failed)).is_empty()
    assert cells.cell_times(frame(*failed)).is_empty()
    assert cells.noise_bands(frame(*failed)).is_empty()
    rows = [default(float(i), **flags) for i, flags in enumerate((*WELL, *UNWELL), start=1)]
    assert cells.usable(frame(*rows))["time_us"].to_list() == [1.0, 2.0]
    assert [cells.is_unwell(row) for row in rows] == [False] * 2 + [True] * 3
    # One without a time was not left out for it.
    rows.append(default(None, throttled=True))
    assert cells.left_out(frame(*rows)) == {"throttled": 2, "ecc_errors": 2}


def test_noise_band_holds_nine_cells_of_ten_and_is_unknown_without_repeats() -> None:
    rows = [
        row
        for cell in range(11)
        for row in repeats(100.0, 100.0 + cell, size_bytes=1 << (10 + cell))
    ]
    [band] = cells.noise_bands(frame(*rows, default(1.0, system="once"))).to_dicts()
    assert band["system"] == "box"
    assert band["noise_band"] == pytest.approx(0.09)
    assert cells.pair_spread([5.0]) is cells.pair_spread([]) is None
    # Pairs 1.1, 1.2, 1.2/1.1: their median is 1.1.
    assert cells.pair_spread([120.0, 100.0, 110.0]) == pytest.approx(0.1)
    # Of very many, that of their distribution: the median of |x - y| of two normal draws is
    # 0.6745 * sqrt(2) standard deviations.
    many = np.exp(np.random.default_rng(0).normal(0.0, 0.02, size=20_000))
    assert cells.pair_spread(many.tolist()) == pytest.approx(0.02 * 0.6745 * 2**0.5, rel=0.03)


def inside(time_us: float | None, **columns: Any) -> dict[str, Any]:
    """NCCL's default as measured under our plugin."""
    return default(time_us, default_scope="profile", **columns)


def times(*rows: dict[str, Any]) -> list[float]:
    found: list[float] = cells.comparable(frame(*rows))["time_us"].to_list()
    return found


@pytest.mark.parametrize("make", [default, ring])
def test_shared_nodes_and_mig_instances_are_not_compared(make: Any) -> None:
    flags: tuple[dict[str, bool], ...] = (
        {},
        {"exclusive_node": True, "mig": False},
        {"exclusive_node": False},
        {"mig": True},
        {"exclusive_node": False, "mig": True},
    )
    assert times(*(make(float(i), **each) for i, each in enumerate(flags))) == [0.0, 1.0]


def test_default_under_our_plugin_gives_way_to_the_untouched_one() -> None:
    assert times(inside(1.0), default(2.0), ring(3.0)) == [2.0, 3.0]
    assert times(inside(1.0), ring(3.0)) == [1.0, 3.0]
    # Forced configs of any scope stay.
    assert times(default(2.0), ring(3.0, default_scope="profile")) == [2.0, 3.0]
    # Unknown conditions are equal to each other.
    unknown = {"nccl_version": None, "num_nodes": None, "in_place": None}
    assert times(inside(1.0, **unknown), default(2.0, **unknown)) == [2.0]


@pytest.mark.parametrize(
    "out",
    [
        *({"time_us": None, "status": "failed"}, {"status": "wrong_values"}, {"time_us": 0.0}),
        *UNWELL,
        *({"exclusive_node": False}, {"mig": True}),
        {"is_default": False, "requested_algorithm": "Ring"},
        *({"size_bytes": 64}, {"launch_profile": "net"}, {"in_place": True}),
        *({"datatype": "half"}, {"system": "other"}),
        {"interference_kind": "cpu", "interference_level": 0.5},
    ],
)
def test_only_a_usable_untouched_default_displaces_the_other(out: dict[str, Any]) -> None:
    assert 1.0 in times(inside(1.0), {**default(2.0), **out})


def test_both_defaults_are_measurements_and_their_difference_is_no_noise() -> None:
    rows = [inside(10.0), inside(10.5, repeat=1), default(20.0), default(22.0, repeat=1)]
    for ordered in (rows, rows[::-1]):
        assert sorted(cells.independent(frame(*ordered))["time_us"]) == [10.0, 10.5, 20.0, 22.0]
        [band] = cells.noise_bands(frame(*ordered)).to_dicts()
        assert band["noise_band"] == pytest.approx(0.1)
