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
    Column,
)
from dynamiccl.datasets.store import check_schema
from dynamiccl.errors import SchemaMismatch

#: Unit -> what a column of that unit must end in.
SUFFIXES = {
    "us": "_us",
    "%": "_percent",
    "GB/s": "_gbytes_per_s",
    "Gbit/s": "_gbits_per_s",
    "TFLOP/s": "_tflops",
    "MHz": "_mhz",
}


@pytest.mark.parametrize("columns", [MEASUREMENT_COLUMNS, CALLS_COLUMNS, STEPS_COLUMNS])
def test_columns_say_what_they_are_in_names_of_their_own_that_carry_units(
    columns: tuple[Column, ...],
) -> None:
    assert len({column.name for column in columns}) == len(columns)
    assert all(column.meaning.strip() for column in columns)
    told = [column for column in columns if column.unit in SUFFIXES]
    assert [c.name for c in told if not c.name.endswith(SUFFIXES[c.unit])] == []


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


def without(name: str) -> pa.Schema:
    return MEASUREMENTS.remove(MEASUREMENTS.get_field_index(name))


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (
            MEASUREMENTS.with_metadata({META_SCHEMA: "measurements", META_VERSION: "99"}),
            f"measurements version 99, this release reads measurements version {SCHEMA_VERSION}",
        ),
        (CALLS, f"calls version {CALLS_VERSION}"),
        (MEASUREMENTS.with_metadata(None), "holds schema none version none"),
        (MEASUREMENTS.with_metadata({META_VERSION: b"\xff"}), "holds schema none version"),
        (without("time_us"), r"no column 'time_us' \(double\)"),
        (
            without("size_bytes").append(pa.field("size_bytes", pa.string())),
            "'size_bytes' as string, not int64",
        ),
    ],
)
def test_what_is_not_the_schema_is_refused(schema: pa.Schema, said: str) -> None:
    with pytest.raises(SchemaMismatch, match=rf"dir/a\.parquet .*{said}"):
        check_schema(schema, MEASUREMENTS, where="dir/a.parquet")
