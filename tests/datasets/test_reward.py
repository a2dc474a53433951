from typing import Any

import polars as pl
import pytest

from dynamiccl.datasets.steps import reward, with_reference
from tests.rows import default, forced, frame

KB64 = 1 << 16
UNKNOWN = ("nccl_version", "gpu", "num_nodes", "in_place")


def reference(row: dict[str, object], *training: dict[str, object]) -> tuple[float | None, bool]:
    [found] = with_reference(frame(row), frame(*training)).to_dicts()
    return found["reference_us"], found["reference_measured"]


@pytest.mark.parametrize(
    ("row", "training"),
    [
        # The same run comes before others, and another sweep's run of one name is another run.
        ({"run": "a"}, [("a", 10.0), ("a", 30.0), ("b", 99.0), ("c", 99.0)]),
        ({"run": "z"}, [("a", 10.0), ("b", 20.0), ("c", 90.0)]),
        ({"sweep": "b"}, [("sweep a", 10.0), ("sweep b", 20.0), ("sweep c", 40.0)]),
        ({"sweep": "z"}, [("sweep a", 10.0), ("sweep b", 20.0), ("sweep c", 40.0)]),
    ],
)
def test_the_same_run_comes_first(row: dict[str, Any], training: list[tuple[str, float]]) -> None:
    rows = [
        default(us, repeat=i, **{"sweep" if "sweep" in name else "run": name[-1]})
        for i, (name, us) in enumerate(training)
    ]
    assert reference(forced("Ring", **row), *rows) == (20.0, True)


@pytest.mark.parametrize(
    "change",
    [
        {"launch_profile": "tuned"},
        {"interference_kind": "congestion", "interference_level": 1.0},
        {"throttled": True},
        {"system": "other"},
        {"nccl_version": "2.28.9"},
        {"in_place": True},
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


def test_default_under_our_plugin_is_no_reference() -> None:
    rows = [default(10.0), *(default(14.0, repeat=i, default_scope="profile") for i in (1, 2))]
    assert (
        reference(forced("Ring"), *rows) == reference(forced("Ring"), *rows[::-1]) == (10.0, True)
    )
    assert reference(forced("Ring"), *rows[1:]) == (None, False)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({KB64 // 2: 1.0, KB64 * 2: 4.0}, 2.0),
        ({KB64 // 2: 1000.0, KB64 - 100: 8.0, KB64 + 100: 8.0, KB64 * 2: 0.001}, 8.0),
        ({KB64 // 2 - 1: 1.0, KB64 * 2: 4.0}, None),
        ({KB64 // 2: 1.0, KB64 * 2 + 1: 4.0}, None),
        ({KB64 * 2: 1.0}, None),
        ({KB64 // 2: 1.0}, None),
    ],
)
def test_sizes_within_an_octave_are_near_enough(
    sizes: dict[int, float], found: float | None
) -> None:
    training = [default(time, size_bytes=size) for size, time in sizes.items()]
    told, measured = reference(forced("Ring", size_bytes=KB64), *training)
    assert not measured
    assert told == (None if found is None else pytest.approx(found))
    for power in (10, 19, 28, 29, 35):  # an octave is one at every size
        ends = [default(1.0, size_bytes=1 << power - 1), default(4.0, size_bytes=1 << power + 1)]
        assert reference(forced("Ring", size_bytes=1 << power), *ends)[0] == pytest.approx(2.0)


def test_rows_and_their_order_stay_and_references_are_of_training_rows_only() -> None:
    rows = frame(default(50.0), *(forced("Ring", None, i + 1.0, repeat=i) for i in range(20)))
    training = frame(default(10.0, run="other"), default(20.0, size_bytes=64))
    found = with_reference(rows, training)
    assert found["repeat"].to_list() == [0, *range(20)]
    assert set(found["reference_us"]) == {10.0}
    assert set(found.columns) - set(rows.columns) == {"reference_us", "reference_measured"}
    rewards = found.select(reward(pl.col("time_us"), pl.col("reference_us"))).to_series()
    assert rewards.to_list()[:3] == [-5.0, -0.1, -0.2]
