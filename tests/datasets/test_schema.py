import pyarrow as pa
import pytest

from dynamiccl.datasets.schema import (
    CALLS,
    MEASUREMENTS,
    META_SCHEMA,
    META_VERSION,
    SCHEMA_VERSION,
    SCHEMAS,
)
from dynamiccl.datasets.store import check_schema
from dynamiccl.errors import SchemaMismatch

SUFFIXES = ("_us", "_percent", "_bytes", "_gbytes_per_s", "_gbits_per_s", "_tflops", "_mhz")


@pytest.mark.parametrize("name", SCHEMAS)
def test_names_units_and_meanings_travel_in_the_file(name: str) -> None:
    schema = SCHEMAS[name]
    assert schema.metadata[META_SCHEMA] == name.encode()
    assert len(set(schema.names)) == len(schema)
    assert all(field.metadata[b"meaning"] for field in schema)
    units = {field.name: field.metadata[b"unit"].decode() for field in schema}
    assert all(bool(unit) == name.endswith(SUFFIXES) for name, unit in units.items())
    shared = [field for field in schema if field.name in MEASUREMENTS.names]
    assert len(shared) >= 6
    assert all(MEASUREMENTS.field(field.name).type == field.type for field in shared)


def without(name: str) -> pa.Schema:
    return MEASUREMENTS.remove(MEASUREMENTS.get_field_index(name))


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (
            MEASUREMENTS.with_metadata({META_SCHEMA: "measurements", META_VERSION: "99"}),
            f"measurements version 99, this release reads measurements version {SCHEMA_VERSION}",
        ),
        (CALLS, "calls version 3"),
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
