"""Parts of a data set: written, read back, of other versions and damaged; and their columns."""

import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamiccl.datasets import store
from dynamiccl.datasets.schema import (
    ADDED,
    MEASUREMENTS,
    META_SCHEMA,
    META_VERSION,
    SCHEMA_VERSION,
    SCHEMAS,
)
from dynamiccl.datasets.store import columns_table, measurements_table, trial_id
from dynamiccl.errors import CorruptFile, MissingPath, NotEnoughData, SchemaMismatch
from tests.calls import call, calls_table
from tests.rows import default, forced

ROWS = [default(10.0), forced("Ring", "LL", 12.5, channels=4), forced("Tree", None, None)]


def write(directory: Path, *rows: dict[str, object], **provenance: object) -> list[Path]:
    return store.write_part(
        directory, measurements_table(rows or ROWS), provenance={"tool": "test", **provenance}
    )


def files_below(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    [path] = write(tmp_path, note="a")
    read = store.read(tmp_path)
    assert read.to_arrow().cast(measurements_table(ROWS).schema) == measurements_table(ROWS)
    # It lies in its partition, and the same part twice is one file; half of one is not seen.
    assert write(tmp_path, note="a") == [path]
    assert files_below(tmp_path) == [f"measurements/system=box/sweep=grid/{path.name}"]
    path.with_name(".writing-1.parquet").write_bytes(path.read_bytes()[:100])
    write(tmp_path, default(11.0), note="b")
    write(tmp_path, default(13.0), note="b")
    times = store.read(tmp_path)["time_us"].drop_nulls().sort().to_list()
    assert times == [10.0, 11.0, 12.5, 13.0]
    assert sorted(record["note"] for record in store.provenance_of(tmp_path)) == ["a", "b"]
    # Systems and sweeps become folders.
    keys, folder = [("a", "s"), ("a", "t"), ("007", "s")], tmp_path / "three"
    rows = [default(float(i + 1), system=a, sweep=s) for i, (a, s) in enumerate(keys)]
    assert len(write(folder, *rows)) == len(files_below(folder)) == 3
    found = store.read(folder).select("system", "sweep", "time_us").rows()
    assert sorted(found) == [("007", "s", 3.0), ("a", "s", 1.0), ("a", "t", 2.0)]


@pytest.mark.parametrize("name", ["run=3/system=x/sweep=y", "data[1]", "a*b?", "with space"])
def test_data_directory_may_have_any_name(name: str, tmp_path: Path) -> None:
    write(tmp_path / name)
    read = store.read(tmp_path / name)
    assert set(read.select("system", "sweep", "run").rows()) == {("box", "grid", "cycle-0")}


def test_missing_directory_says_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("gone", "file"):
        with pytest.raises(MissingPath, match=rf"no data directory at .*{name}; make one with"):
            store.read(tmp_path / name)
    with pytest.raises(NotEnoughData, match="fill it with"):
        store.read(tmp_path)


def rewrite(path: Path, table: pa.Table) -> None:
    """Put `table` where `path` was, under the name that its own bytes give."""
    pq.write_table(table, path)
    path.replace(path.with_name(store._part_name(path.read_bytes())))


def older(path: Path, version: int, lacks: Sequence[str]) -> None:
    """Make a part one of another version, without some columns."""
    table = pq.read_table(path, partitioning=None).drop_columns(lacks)
    meta = {**table.schema.metadata, META_VERSION: str(version).encode()}
    rewrite(path, table.replace_schema_metadata(meta))


@pytest.mark.parametrize(
    ("kind", "version", "refusal"),
    [
        ("measurements", SCHEMA_VERSION + 1, r"part-\w+\.parquet holds schema measurements vers"),
        ("measurements", SCHEMA_VERSION, "has no column 'gpu'"),
        ("measurements", SCHEMA_VERSION - 1, None),
        *(
            ("measurements", old, f"version {old}, this .*import the raw output again")
            for old in (2, 3, 4)
        ),
        ("calls", 1, "calls version 1, this release reads"),
        ("calls", 2, None),
    ],
)
def test_older_parts_are_read(kind: str, version: int, refusal: str | None, tmp_path: Path) -> None:
    rows = calls_table(call(0), call(1)) if kind == "calls" else measurements_table(ROWS)
    [path] = store.write_part(tmp_path, rows, kind=kind, provenance={})
    new = [name for name, since in ADDED[kind].items() if since == version + 1]
    before, lacks = store.read(tmp_path, kind), new if refusal is None else ["time_us", "gpu"]
    older(path, version, lacks)
    if refusal is not None:
        with pytest.raises(SchemaMismatch, match=refusal):
            store.read(tmp_path, kind)
        return
    found = store.read(tmp_path, kind)
    assert found.select(lacks).null_count().row(0) == (len(rows),) * len(lacks)
    assert found.drop(lacks).equals(before.drop(lacks))
    assert found.schema == before.schema


@pytest.mark.parametrize("column", ["status", "mig", "throttled"])
def test_an_older_version_must_have_what_it_had(column: str, tmp_path: Path) -> None:
    """Else a null would be taken for what was not measured: a GPU that nothing slowed, say."""
    [path] = write(tmp_path)
    older(path, SCHEMA_VERSION - 1, [column])
    with pytest.raises(SchemaMismatch, match=f"no column '{column}'"):
        store.scan(tmp_path)
    part = next(tmp_path.rglob("part-*"))
    schema = measurements_table(ROWS).schema
    numbers = schema.set(schema.names.index("sweep"), pa.field("sweep", pa.int64()))
    for table, said in (
        (pa.table({"x": [1]}), "schema none version none"),
        (schema.with_metadata({META_VERSION: b"\xff"}).empty_table(), "schema none version"),
        (numbers.empty_table(), "'sweep' as int64, not string"),
    ):
        rewrite(part, table)
        part = next(tmp_path.rglob("part-*"))
        with pytest.raises(SchemaMismatch, match=said):
            store.read(tmp_path)


@given(data=st.data())
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_damage_anywhere_is_found(data: st.DataObject, tmp_path: Path) -> None:
    """A flipped bit in a page makes Polars abort the process, so no page of it may be decoded."""
    [path] = write(tmp_path)
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    bad = data.draw(st.sampled_from(["flip", "cut", "empty", "noise"]))
    damaged = {
        "flip": whole[:at]
        + bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))])
        + whole[at + 1 :],
        "cut": whole[:at],
        "empty": b"",
        "noise": random.Random(at).randbytes(at + 1),
    }[bad]
    path.write_bytes(damaged)
    with pytest.raises((CorruptFile, SchemaMismatch), match=path.name):
        store.read(tmp_path)


def test_content_hash_follows_content_only(tmp_path: Path) -> None:
    first, second, third = default(1.0), default(2.0), default(3.0)
    write(tmp_path / "a", first)
    alone = store.content_hash(tmp_path / "a")
    write(tmp_path / "a", second)
    write(tmp_path / "b", second)
    write(tmp_path / "b", first)
    assert store.content_hash(tmp_path / "a") == store.content_hash(tmp_path / "b") != alone
    write(tmp_path / "c", first)
    write(tmp_path / "c", third)
    assert store.content_hash(tmp_path / "c") != store.content_hash(tmp_path / "a")


@pytest.mark.parametrize("text", ["", "...", "-a-", "Ä b\n", "x" * 200, f"{'x' * 119} y"])
def test_a_slug_is_a_directory_name(text: str) -> None:
    made = store.slug(text)
    assert store.check_slug(made, "system") == made


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
    neutral = {"launch_profile": "default", "interference_kind": "none"}
    made = measurements_table([default()])["trial"].to_pylist()
    assert made == [trial_id(neutral | default())]


@pytest.mark.parametrize("name", [*NOT_IDENTITY, *IDENTITY])
def test_workload_and_request_change_the_trial_and_results_do_not(name: str) -> None:
    row = forced("Ring", "LL")
    changed = {**row, name: {**NOT_IDENTITY, **IDENTITY}[name]}
    assert (trial_id(changed) == trial_id(row)) == (name in NOT_IDENTITY)


def test_unknown_column_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError, match="time_ms"):
        measurements_table([default(time_ms=1.0)])
    with pytest.raises(KeyError, match="time_ms"):
        columns_table({"time_ms": pa.array([1.0])}, 1)


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
