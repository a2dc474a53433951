import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.datasets.rows import columns_table, measurements_table, trial_id
from dynamiccl.datasets.schema import MEASUREMENTS
from tests.rows import default, forced

#: Columns that say when, how often and with what result: no part of what a trial is.
NOT_IDENTITY = {
    "run": "cycle-9",
    "repeat": 7,
    "time_us": 1.0,
    "status": "failed",
    "actual_algorithm": "Tree",
    "sweep": "other",
}
IDENTITY = {
    "system": "other",
    "size_bytes": 64,
    "in_place": True,
    "launch_profile": "tuned",
    "interference_level": 1.0,
    "num_nodes": 2,
    "requested_algorithm": "Tree",
    "requested_chunk_bytes": 4096,
    "nccl_version": "2.28.9",
}


def test_trial_id_is_frozen() -> None:
    """It is written into files: another release must give the same one."""
    assert trial_id(default()) == trial_id(dict(reversed(default().items())))
    assert trial_id({"collective": "AllReduce", "size_bytes": 8}) == "395fddaf6126e3cd"


@pytest.mark.parametrize("name", NOT_IDENTITY)
def test_result_does_not_change_the_trial(name: str) -> None:
    row = forced("Ring", "LL")
    assert trial_id({**row, name: NOT_IDENTITY[name]}) == trial_id(row)


@pytest.mark.parametrize("name", IDENTITY)
def test_workload_and_request_change_the_trial(name: str) -> None:
    row = forced("Ring", "LL")
    assert trial_id({**row, name: IDENTITY[name]}) != trial_id(row)


def test_table_has_the_trial_of_its_row() -> None:
    table = measurements_table([default(), forced("Ring")])
    assert table["trial"].to_pylist() == [
        trial_id({"launch_profile": "default", "interference_kind": "none", **row})
        for row in (default(), forced("Ring"))
    ]


def test_missing_columns_are_neutral_or_null() -> None:
    bare = {"system": "a", "sweep": "b", "source": "tidy-csv", "collective": "AllReduce"}
    [row] = measurements_table([{**bare, "size_bytes": 8}]).to_pylist()
    assert (row["status"], row["run"], row["repeat"]) == ("ok", "single", 0)
    assert (row["launch_profile"], row["interference_kind"]) == ("default", "none")
    assert (row["is_default"], row["verified"], row["time_derived"]) == (False, False, False)
    assert (row["statistic"], row["default_scope"]) == ("mean", "untouched")
    assert row["time_us"] is row["gpu"] is row["requested_algorithm"] is None


def test_unknown_column_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError, match="time_ms"):
        measurements_table([default(time_ms=1.0)])
    with pytest.raises(KeyError, match="time_ms"):
        columns_table({"time_ms": pa.array([1.0])}, 1)


def test_no_rows_are_an_empty_table_of_the_schema() -> None:
    table = measurements_table([])
    assert (table.num_rows, table.schema) == (0, MEASUREMENTS)


@given(times=st.lists(st.floats(0.1, 1e6), max_size=5))
@settings(deadline=None, max_examples=30)
def test_columns_and_rows_make_the_same_table(times: list[float]) -> None:
    by_row = measurements_table([default(time) for time in times])
    columns = {name: by_row[name].combine_chunks() for name in (*default(), "trial")}
    assert columns_table(columns, len(times)) == by_row
