import pyarrow as pa
import pytest

from dynamiccl.datasets.schema import CALLS, MEASUREMENTS, META_SCHEMA, META_VERSION, SCHEMAS
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


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (CALLS, "calls version 3"),
        (MEASUREMENTS.with_metadata({META_VERSION: b"\xff"}), "holds schema none version"),
        (MEASUREMENTS.set(1, pa.field("sweep", pa.int64())), "'sweep' as int64, not string"),
    ],
)
def test_what_is_not_the_schema_is_refused(schema: pa.Schema, said: str) -> None:
    with pytest.raises(SchemaMismatch, match=rf"dir/a\.parquet .*{said}"):
        check_schema(schema, MEASUREMENTS, where="dir/a.parquet")
