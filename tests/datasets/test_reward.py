from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.datasets.steps import reward, with_reference
from tests.rows import default, forced, frame

KB64 = 1 << 16
UNKNOWN = ("nccl_version", "gpu", "num_nodes", "in_place")


def reference(row: dict[str, object], *training: dict[str, object]) -> tuple[float | None, bool]:
    [found] = with_reference(frame(row), frame(*training)).to_dicts()
    return found["reference_us"], found["reference_measured"]


def test_same_run_comes_before_other_runs() -> None:
    training = [
        default(10.0, run="a"),
        default(30.0, run="a", repeat=1),
        default(99.0, run="b"),
        default(99.0, run="c"),
    ]
    assert reference(forced("Ring", run="a"), *training) == (20.0, True)


def test_other_runs_stand_in_where_the_run_has_no_default() -> None:
    training = [default(t, run=r) for t, r in ((10.0, "a"), (20.0, "b"), (90.0, "c"))]
    assert reference(forced("Ring", run="z"), *training) == (20.0, True)


def test_run_of_the_same_name_in_another_sweep_is_another_run() -> None:
    training = [default(10.0, sweep="a"), default(20.0, sweep="b"), default(40.0, sweep="c")]
    assert reference(forced("Ring", sweep="b"), *training) == (20.0, True)
    assert reference(forced("Ring", sweep="z"), *training) == (20.0, True)


@pytest.mark.parametrize(
    "change",
    [
        {"launch_profile": "tuned"},
        {"interference_kind": "congestion", "interference_level": 1.0},
        {"status": "wrong_values"},
        {"throttled": True},
        {"ecc_errors": 1},
        {"system": "other"},
        {"nccl_version": "2.28.9"},
        {"in_place": True},
        {"datatype": "half"},
        {"num_nodes": 2},
        {"size_bytes": 1 << 30},
        {"is_default": False, "requested_algorithm": "Tree"},
    ],
)
def test_default_of_other_conditions_is_no_reference(change: dict[str, object]) -> None:
    assert reference(forced("Ring"), default(10.0, **change)) == (None, False)


@pytest.mark.parametrize(
    ("row", "beside"),
    [
        # The quiet default, and that of the untouched environment, are those compared with.
        ({"interference_kind": "congestion", "interference_level": 1.0}, {}),
        ({"launch_profile": "tuned"}, {}),
        # Unknown conditions are equal to each other.
        (dict.fromkeys(UNKNOWN), dict.fromkeys(UNKNOWN)),
    ],
)
def test_what_a_row_is_compared_with(row: dict[str, Any], beside: dict[str, Any]) -> None:
    own = default(7.0, launch_profile="tuned")
    assert reference(forced("Ring", **row), default(10.0, **beside), own) == (10.0, True)


def inside(time_us: float, **columns: object) -> dict[str, object]:
    """NCCL's default as measured under our plugin."""
    return default(time_us, default_scope="profile", **columns)


def test_default_under_our_plugin_is_no_reference() -> None:
    rows = [default(10.0), inside(14.0), inside(16.0, repeat=1)]
    assert reference(forced("Ring"), *rows) == (10.0, True)
    assert reference(forced("Ring"), *rows[::-1]) == (10.0, True)
    assert reference(forced("Ring"), inside(14.0), inside(14.0, run="b")) == (None, False)


@given(
    latency=st.floats(0.5, 100.0),
    power=st.floats(-0.5, 2.0),
    low=st.integers(1000, 1 << 30),
    up=st.floats(1.01, 2.0),
    share=st.floats(0.0, 1.0),
)
@settings(deadline=None, max_examples=60)
def test_interpolation_is_exact_on_a_power_law(
    latency: float, power: float, low: int, up: float, share: float
) -> None:
    high = min(int(low * up) + 2, 2 * low)
    size = min(max(int(low + share * (high - low)), low + 1), high - 1)
    training = [default(latency * n**power / low**power, size_bytes=n) for n in (low, high)]
    found, measured = reference(forced("Ring", size_bytes=size), *training)
    assert not measured
    assert found == pytest.approx(latency * size**power / low**power, rel=1e-9)


@pytest.mark.parametrize("power", range(10, 36))
def test_one_octave_to_each_side_is_near_enough(power: int) -> None:
    size = 1 << power
    training = [default(1.0, size_bytes=size // 2), default(4.0, size_bytes=size * 2)]
    found, measured = reference(forced("Ring", size_bytes=size), *training)
    assert not measured
    assert found == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("below", "above"),
    [(KB64 // 2 - 1, KB64 * 2), (KB64 // 2, KB64 * 2 + 1), (None, KB64 * 2), (KB64 // 2, None)],
)
def test_more_than_an_octave_or_one_side_alone_is_no_reference(
    below: int | None, above: int | None
) -> None:
    training = [default(1.0, size_bytes=size) for size in (below, above) if size]
    assert reference(forced("Ring", size_bytes=KB64), *training) == (None, False)


def test_nearest_sizes_are_taken() -> None:
    sizes = {KB64 // 2: 1000.0, KB64 - 100: 8.0, KB64 + 100: 8.0, KB64 * 2: 0.001}
    training = [default(time, size_bytes=size) for size, time in sizes.items()]
    found, _ = reference(forced("Ring", size_bytes=KB64), *training)
    assert found == pytest.approx(8.0)


def test_references_come_from_the_training_rows_only() -> None:
    held_out = [default(50.0), forced("Ring")]
    found = with_reference(frame(*held_out), frame(default(10.0, run="other")))
    assert found["reference_us"].to_list() == [10.0, 10.0]


def test_rows_and_their_order_stay() -> None:
    rows = frame(*(forced("Ring", None, float(i + 1), repeat=i) for i in range(20)))
    found = with_reference(rows, frame(default(10.0), default(20.0, size_bytes=64)))
    assert found["repeat"].to_list() == list(range(20))
    assert set(found.columns) - set(rows.columns) == {
        "reference_us",
        "reference_measured",
    }


def test_reward_is_minus_time_in_units_of_the_default() -> None:
    assert pl.select(reward(pl.lit(15.0), pl.lit(10.0))).item() == -1.5
    assert pl.select(reward(pl.lit(10.0), pl.lit(10.0))).item() == -1.0
