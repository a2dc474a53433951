import pyarrow as pa
import pytest

from dynamiccl.datasets.schema import (
    CALLS,
    CALLS_COLUMNS,
    CALLS_VERSION,
    MEASUREMENT_COLUMNS,
    MEASUREMENTS,
    META_SCHEMA,
    META_VERSION,
    PARTITION_COLUMNS,
    REQUESTED_COLUMNS,
    SCHEMA_VERSION,
    STEPS,
    STEPS_COLUMNS,
    STEPS_VERSION,
    TASK_COLUMNS,
)
from dynamiccl.datasets.store import check_schema
from dynamiccl.errors import SchemaMismatch

COLUMNS = (*MEASUREMENT_COLUMNS, *CALLS_COLUMNS, *STEPS_COLUMNS)
#: Unit -> what a column of that unit must end in.
SUFFIXES = {
    "us": "_us",
    "%": "_percent",
    "GB/s": "_gbytes_per_s",
    "Gbit/s": "_gbits_per_s",
    "TFLOP/s": "_tflops",
    "MHz": "_mhz",
}


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_column_says_what_it_is(column: object) -> None:
    assert getattr(column, "meaning").strip()  # noqa: B009


def test_names_carry_their_units() -> None:
    wrong = [
        column.name
        for column in COLUMNS
        if column.unit in SUFFIXES and not column.name.endswith(SUFFIXES[column.unit])
    ]
    assert wrong == []


def test_names_are_unique() -> None:
    for columns in (MEASUREMENT_COLUMNS, CALLS_COLUMNS, STEPS_COLUMNS):
        assert len({column.name for column in columns}) == len(columns)


@pytest.mark.parametrize(
    ("schema", "version"),
    [(MEASUREMENTS, SCHEMA_VERSION), (CALLS, CALLS_VERSION), (STEPS, STEPS_VERSION)],
)
def test_units_and_meanings_travel_in_the_file(schema: pa.Schema, version: int) -> None:
    assert all(field.metadata[b"meaning"] for field in schema)
    assert schema.metadata[META_VERSION] == str(version).encode()
    assert {field.name for field in schema} >= set(PARTITION_COLUMNS)


def test_keys_are_columns() -> None:
    names = {field.name for field in MEASUREMENTS}
    assert names >= {*TASK_COLUMNS, *REQUESTED_COLUMNS, *PARTITION_COLUMNS}


def test_calls_share_the_vocabulary_of_measurements() -> None:
    measured = {column.name: (column.type, column.unit) for column in MEASUREMENT_COLUMNS}
    shared = [column for column in CALLS_COLUMNS if column.name in measured]
    assert len(shared) > 20
    assert all(measured[column.name] == (column.type, column.unit) for column in shared)


def test_own_schema_passes_with_and_without_partition_columns() -> None:
    check_schema(MEASUREMENTS, MEASUREMENTS, where="a.parquet")
    bare = pa.schema([f for f in MEASUREMENTS if f.name not in PARTITION_COLUMNS])
    check_schema(bare.with_metadata(MEASUREMENTS.metadata), MEASUREMENTS, where="a.parquet")


def refused(schema: pa.Schema) -> str:
    with pytest.raises(SchemaMismatch) as caught:
        check_schema(schema, MEASUREMENTS, where="dir/a.parquet")
    assert "dir/a.parquet" in str(caught.value)
    return str(caught.value)


def test_another_version_names_both() -> None:
    other = MEASUREMENTS.with_metadata({META_SCHEMA: "measurements", META_VERSION: "7"})
    said = refused(other)
    assert "measurements version 7" in said
    assert f"measurements version {SCHEMA_VERSION}" in said


def test_another_table_is_refused() -> None:
    assert f"calls version {CALLS_VERSION}" in refused(CALLS)


@pytest.mark.parametrize("metadata", [None, {META_VERSION: b"\xff"}])
def test_foreign_file_is_refused(metadata: dict[bytes, bytes] | None) -> None:
    assert "holds schema none version" in refused(MEASUREMENTS.with_metadata(metadata))


def test_missing_column_is_named() -> None:
    index = MEASUREMENTS.get_field_index("time_us")
    assert "no column 'time_us' (double)" in refused(MEASUREMENTS.remove(index))


def test_wrong_type_is_named() -> None:
    index = MEASUREMENTS.get_field_index("size_bytes")
    changed = MEASUREMENTS.set(index, pa.field("size_bytes", pa.string()))
    assert "'size_bytes' as string, not int64" in refused(changed)
