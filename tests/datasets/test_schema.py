import pytest

from dynamiccl.datasets.schema import MEASUREMENTS, META_SCHEMA, SCHEMAS

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
