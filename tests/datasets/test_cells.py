from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.datasets.cells import (
    cell_times,
    comparable,
    independent,
    is_unwell,
    left_out,
    noise_bands,
    pair_spread,
    usable,
)
from tests.rows import default, forced, frame

TIMES = st.lists(st.floats(1.0, 1e6), min_size=2, max_size=12)


def repeats(*times: float, **columns: Any) -> list[dict[str, Any]]:
    return [forced("Ring", "LL", t, repeat=i, **columns) for i, t in enumerate(times)]


def test_time_of_a_cell_is_the_median_of_its_repeats() -> None:
    [cell] = cell_times(frame(*repeats(1.0, 100.0, 3.0, 4.0))).to_dicts()
    assert (cell["time_us"], cell["repeats"]) == (3.5, 4)


def test_one_measurement_printed_twice_counts_once() -> None:
    rows = [*repeats(1.0, 5.0), forced("Ring", "LL", 9.0, repeat=1)]
    [cell] = cell_times(frame(*rows)).to_dicts()
    assert (cell["time_us"], cell["repeats"]) == (3.0, 2)


@pytest.mark.parametrize("column", ["run", "sweep"])
def test_the_same_repeat_of_another_run_or_sweep_is_independent(column: str) -> None:
    rows = [{**forced("Ring", "LL", t), column: name} for name, t in (("a", 1.0), ("b", 3.0))]
    [cell] = cell_times(frame(*rows)).to_dicts()
    assert (cell["time_us"], cell["repeats"], cell["spread"]) == (2.0, 2, 2.0)


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
    ],
)
def test_other_task_or_request_is_another_cell(change: dict[str, object]) -> None:
    row = forced("Ring", "LL", 1.0)
    read_back = {"driver_version": "1", "actual_algorithm": "Tree", "repeat": 1}
    assert cell_times(frame(row, {**row, **read_back})).height == 1
    assert cell_times(frame(row, {**row, **change, "time_us": 2.0})).height == 2


def test_rows_that_did_not_work_are_not_usable() -> None:
    rows = [
        default(1.0),
        default(None),
        default(0.0),
        *(default(1.0, status=s) for s in ("failed", "infeasible", "timed_out", "wrong_values")),
    ]
    assert usable(frame(*rows))["time_us"].to_list() == [1.0]


WELL: tuple[dict[str, object], ...] = (
    {},
    {"throttled": False, "ecc_errors": 0},
    {"throttled": None, "ecc_errors": None},
)
UNWELL: tuple[dict[str, object], ...] = (
    {"throttled": True},
    {"ecc_errors": 2},
    {"throttled": True, "ecc_errors": 1},
)


def test_rows_of_gpus_that_were_unwell_are_not_usable() -> None:
    rows = [default(float(i), **flags) for i, flags in enumerate((*WELL, *UNWELL), start=1)]
    assert usable(frame(*rows))["time_us"].to_list() == [1.0, 2.0, 3.0]
    assert [is_unwell(row) for row in rows] == [False] * 3 + [True] * 3


def test_rows_left_out_are_counted_by_their_reason() -> None:
    rows = [default(2.0, **flags) for flags in (*WELL, *UNWELL)]
    assert left_out(frame(*rows)) == {"throttled": 2, "ecc_errors": 2}
    # It has no time that could be used.
    assert left_out(frame(default(None, throttled=True))) == {"throttled": 0, "ecc_errors": 0}


def test_a_frame_without_a_usable_row_has_no_cell() -> None:
    assert cell_times(frame(default(None))).height == 0
    assert noise_bands(frame(default(None))).height == 0


def test_single_measurement_has_no_spread() -> None:
    assert cell_times(frame(default(1.0)))["spread"].to_list() == [None]
    assert pair_spread([5.0]) is None
    assert pair_spread([]) is None


def test_spread_is_the_median_over_all_pairs() -> None:
    # Pairs 1.1, 1.2, 1.2/1.1: their median is 1.1.
    assert pair_spread([120.0, 100.0, 110.0]) == pytest.approx(0.1)


@given(times=TIMES, factor=st.floats(1e-3, 1e3))
@settings(deadline=None, max_examples=100)
def test_spread_has_no_unit(times: list[float], factor: float) -> None:
    scaled = pair_spread([time * factor for time in times])
    assert scaled == pytest.approx(pair_spread(times), rel=1e-6, abs=1e-9)


@given(times=TIMES, seed=st.integers(0, 99))
@settings(deadline=None, max_examples=100)
def test_spread_lies_between_nothing_and_the_range(times: list[float], seed: int) -> None:
    spread = pair_spread(times)
    assert spread is not None
    assert 0.0 <= spread <= max(times) / min(times) - 1.0 + 1e-9
    assert pair_spread(np.random.default_rng(seed).permutation(times).tolist()) == spread


def test_noise_band_holds_nine_cells_of_ten() -> None:
    rows = [
        row
        for cell in range(11)
        for row in repeats(100.0, 100.0 + cell, size_bytes=1 << (10 + cell))
    ]
    [band] = noise_bands(frame(*rows, default(1.0))).to_dicts()
    assert band["noise_band"] == pytest.approx(0.09)


def test_noise_is_unknown_where_nothing_was_repeated() -> None:
    rows = [*repeats(1.0, 2.0, system="known"), default(1.0, system="unknown")]
    assert noise_bands(frame(*rows))["system"].to_list() == ["known"]


def test_spread_of_very_many_repeats_is_that_of_their_distribution() -> None:
    random = np.random.default_rng(0)
    few, many = (np.exp(random.normal(0.0, 0.02, size=n)) for n in (200, 20_000))
    spread = pair_spread(many.tolist())
    assert spread == pytest.approx(pair_spread(few.tolist()), rel=0.15)
    # The median of |x - y| of two normal draws is 0.6745 * sqrt(2) standard deviations.
    assert spread == pytest.approx(0.02 * 0.6745 * 2**0.5, rel=0.03)


def inside(time_us: float | None, **columns: Any) -> dict[str, Any]:
    """NCCL's default as measured under our plugin."""
    return default(time_us, default_scope="profile", **columns)


def times(*rows: dict[str, Any]) -> list[float]:
    found: list[float] = comparable(frame(*rows))["time_us"].to_list()
    return found


@pytest.mark.parametrize("make", [default, lambda t, **c: forced("Ring", "LL", t, **c)])
def test_shared_nodes_and_mig_instances_are_not_compared(make: Any) -> None:
    rows = [
        make(1.0),
        make(2.0, exclusive_node=True, mig=False),
        make(3.0, exclusive_node=False),
        make(4.0, mig=True),
        make(5.0, exclusive_node=False, mig=True),
    ]
    assert times(*rows) == [1.0, 2.0]


def test_default_under_our_plugin_gives_way_to_the_untouched_one() -> None:
    assert times(inside(1.0), default(2.0), forced("Ring", "LL", 3.0)) == [2.0, 3.0]
    assert times(inside(1.0), forced("Ring", "LL", 3.0)) == [1.0, 3.0]
    # Forced configs of any scope stay.
    assert times(default(2.0), forced("Ring", "LL", 3.0, default_scope="profile")) == [2.0, 3.0]


@pytest.mark.parametrize(
    "out",
    [
        {"time_us": None, "status": "failed"},
        {"status": "wrong_values"},
        {"time_us": 0.0},
        *UNWELL,
        {"exclusive_node": False},
        {"mig": True},
        {"is_default": False, "requested_algorithm": "Ring"},
    ],
)
def test_only_a_usable_untouched_default_displaces_the_other(out: dict[str, Any]) -> None:
    assert 1.0 in times(inside(1.0), {**default(2.0), **out})


@pytest.mark.parametrize(
    "other",
    [
        {"size_bytes": 64},
        {"launch_profile": "net"},
        {"in_place": True},
        {"datatype": "half"},
        {"system": "other"},
        {"interference_kind": "cpu", "interference_level": 0.5},
    ],
)
def test_untouched_default_of_another_task_displaces_nothing(other: dict[str, Any]) -> None:
    assert times(inside(1.0), default(2.0, **other)) == [1.0, 2.0]


def test_untouched_default_of_unknown_conditions_displaces_that_of_the_same() -> None:
    unknown = {"nccl_version": None, "num_nodes": None, "in_place": None}
    assert times(inside(1.0, **unknown), default(2.0, **unknown)) == [2.0]


def test_both_defaults_of_one_run_are_measurements_of_their_own() -> None:
    rows = [inside(1.0), inside(2.0, repeat=1), default(3.0), default(4.0, repeat=1)]
    for ordered in (rows, rows[::-1]):
        assert sorted(independent(frame(*ordered))["time_us"]) == [1.0, 2.0, 3.0, 4.0]


def test_noise_is_not_what_the_two_defaults_differ_by() -> None:
    rows = [inside(10.0), inside(10.0, repeat=1), default(20.0), default(22.0, repeat=1)]
    for ordered in (rows, rows[::-1]):
        [band] = noise_bands(frame(*ordered)).to_dicts()
        assert band["noise_band"] == pytest.approx(0.1)
