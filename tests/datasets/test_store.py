import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamiccl.datasets import store
from dynamiccl.datasets.call_columns import CALLS_ADDED_IN_2, CALLS_ADDED_IN_3
from dynamiccl.datasets.rows import measurements_table
from dynamiccl.datasets.schema import BESIDE_COLUMNS, CALLS, META_VERSION
from dynamiccl.errors import CorruptFile, MissingPath, NotEnoughData, SchemaMismatch, UserError
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
    write(tmp_path)
    read = store.read(tmp_path)
    assert read.to_arrow().cast(measurements_table(ROWS).schema) == measurements_table(ROWS)


def test_one_part_lies_in_its_partition_and_nothing_else(tmp_path: Path) -> None:
    [path] = write(tmp_path)
    [name] = files_below(tmp_path)
    assert name == f"measurements/system=box/sweep=grid/{path.name}"
    assert path.name.startswith("part-")


def test_the_same_part_twice_is_one_file(tmp_path: Path) -> None:
    assert write(tmp_path) == write(tmp_path)
    assert store.read(tmp_path).height == len(ROWS)


def test_other_content_is_another_part(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, default(11.0))
    assert store.read(tmp_path)["time_us"].drop_nulls().sort().to_list() == [10.0, 11.0, 12.5]


def test_systems_and_sweeps_become_folders(tmp_path: Path) -> None:
    keys = [("a", "s"), ("a", "t"), ("007", "s")]
    paths = write(
        tmp_path,
        *(default(float(i + 1), system=a, sweep=s) for i, (a, s) in enumerate(keys)),
    )
    assert len(paths) == len(files_below(tmp_path)) == 3
    read = store.read(tmp_path).select("system", "sweep", "time_us").rows()
    assert sorted(read) == [("007", "s", 3.0), ("a", "s", 1.0), ("a", "t", 2.0)]


@pytest.mark.parametrize("name", ["run=3/system=x/sweep=y", "data[1]", "a*b?", "with space"])
def test_data_directory_may_have_any_name(name: str, tmp_path: Path) -> None:
    write(tmp_path / name)
    read = store.read(tmp_path / name)
    assert set(read.select("system", "sweep", "run").rows()) == {("box", "grid", "cycle-0")}


@pytest.mark.parametrize("column", ["system", "sweep"])
def test_name_that_is_no_folder_is_refused(column: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{column} name '\.\./x' .* example 'x'"):
        write(tmp_path, {**default(), column: "../x"})
    assert files_below(tmp_path) == []


def test_table_of_another_schema_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(SchemaMismatch, match="table to be written"):
        store.write_part(tmp_path, measurements_table(ROWS).drop_columns(["run"]), provenance={})
    with pytest.raises(SchemaMismatch):
        store.write_part(tmp_path, CALLS.empty_table(), provenance={})
    assert files_below(tmp_path) == []


def test_telemetry_of_an_older_release_is_not_in_the_way(tmp_path: Path) -> None:
    write(tmp_path)
    digest = store.content_hash(tmp_path)
    folder = tmp_path / "telemetry" / "system=box" / "sweep=grid"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"value": [1.5]}), folder / "part-0123456789abcdef.parquet")
    assert store.read(tmp_path).height == len(ROWS)
    assert store.content_hash(tmp_path) == digest


def test_missing_directory_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(MissingPath, match=r"no data directory at .*gone; make one with"):
        store.read(tmp_path / "gone")


def test_a_file_is_no_data_directory(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(MissingPath):
        store.read(tmp_path / "f")


def test_empty_directory_is_too_little(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughData, match="fill it with"):
        store.read(tmp_path)


def test_half_written_part_is_not_seen(tmp_path: Path) -> None:
    [path] = write(tmp_path)
    path.with_name(".writing-1.parquet").write_bytes(path.read_bytes()[:100])
    assert store.read(tmp_path).height == len(ROWS)


def rewrite(path: Path, table: pa.Table) -> None:
    """Put `table` where `path` was, under the name that its own bytes give."""
    pq.write_table(table, path)
    path.replace(path.with_name(store._part_name(path.read_bytes())))


def test_another_schema_version_is_refused_by_name(tmp_path: Path) -> None:
    [path] = write(tmp_path)
    table = pq.read_table(path, partitioning=None)
    rewrite(path, table.replace_schema_metadata({**table.schema.metadata, META_VERSION: b"1"}))
    with pytest.raises(SchemaMismatch, match=r"part-\w+\.parquet holds schema measurements vers"):
        store.read(tmp_path)


NEWEST = [column.name for column in BESIDE_COLUMNS]


def test_version_before_hosts_and_jobs_were_columns_is_read_with_nulls(tmp_path: Path) -> None:
    [path] = write(tmp_path)
    later = ["num_comms", "comm_split", "nic_retries", "nic_congestion", "nic_worst", *NEWEST]
    new = ["partial_launch", "hosts", "job_id", "process_times_us", *later]
    table = pq.read_table(path, partitioning=None).drop_columns(new)
    before = store.read(tmp_path)
    rewrite(path, table.replace_schema_metadata({**table.schema.metadata, META_VERSION: b"3"}))
    found = store.read(tmp_path)
    assert found.select(new).null_count().row(0) == (len(ROWS),) * len(new)
    assert found.drop(new).equals(before.drop(new))
    assert found.schema == before.schema


@pytest.mark.parametrize(("tool", "version"), [("import", 1), ("simulator", 1), ("import", 2)])
def test_calls_of_older_versions_are_read_with_nulls_and_what_made_them(
    tool: str, version: int, tmp_path: Path
) -> None:
    added = CALLS_ADDED_IN_3 if version == 2 else CALLS_ADDED_IN_2 | CALLS_ADDED_IN_3
    made = {"tool": tool, "dynamiccl_version": "0.2.0"}
    [path] = store.write_part(
        tmp_path, calls_table(call(0), call(1)), kind="calls", provenance=made
    )
    before = store.read(tmp_path, "calls")
    table = pq.read_table(path, partitioning=None).drop_columns(sorted(added))
    meta = {**table.schema.metadata, META_VERSION: str(version).encode()}
    rewrite(path, table.replace_schema_metadata(meta))
    found = store.read(tmp_path, "calls")
    new = sorted(added - {"source"})
    if version == 1:
        assert set(found["source"]) == {"simulator" if tool == "simulator" else "plugin"}
    assert found.select(new).null_count().row(0) == (2,) * len(new)
    assert found.drop("source", *new).equals(before.drop("source", *new))
    assert found.schema == before.schema


def test_version_before_several_communicators_is_read_as_lone_ones(tmp_path: Path) -> None:
    [path] = write(tmp_path)
    new = ["num_comms", "comm_split", "nic_retries", "nic_congestion", "nic_worst", *NEWEST]
    table = pq.read_table(path, partitioning=None).drop_columns(new)
    before = store.read(tmp_path)
    rewrite(path, table.replace_schema_metadata({**table.schema.metadata, META_VERSION: b"4"}))
    assert store.read(tmp_path).equals(before)


def test_version_before_both_sides_were_measured_is_read_with_nulls(tmp_path: Path) -> None:
    [path] = write(tmp_path)
    table = pq.read_table(path, partitioning=None).drop_columns(NEWEST)
    before = store.read(tmp_path)
    rewrite(path, table.replace_schema_metadata({**table.schema.metadata, META_VERSION: b"5"}))
    assert store.read(tmp_path).equals(before)
    assert set(before.select(NEWEST).null_count().row(0)) == {len(ROWS)}


def test_missing_column_is_refused_by_name(tmp_path: Path) -> None:
    [path] = write(tmp_path)
    rewrite(path, pq.read_table(path, partitioning=None).drop_columns(["status"]))
    with pytest.raises(SchemaMismatch, match="no column 'status'"):
        store.scan(tmp_path)


def test_parquet_of_somebody_else_is_refused(tmp_path: Path) -> None:
    [path] = write(tmp_path)
    rewrite(path, pa.table({"x": [1]}))
    with pytest.raises(SchemaMismatch, match="schema none version none"):
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


def test_provenance_travels_with_the_part(tmp_path: Path) -> None:
    write(tmp_path, note="a")
    write(tmp_path, default(3.0), note="b")
    write(tmp_path, default(4.0), note="b")
    records = store.provenance_of(tmp_path)
    assert sorted(record["note"] for record in records) == ["a", "b"]
    assert {record["tool"] for record in records} == {"test"}


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


@given(text=st.text(max_size=150))
@settings(deadline=None, max_examples=150)
def test_a_slug_is_a_directory_name(text: str) -> None:
    made = store.slug(text)
    assert store.check_slug(made, "system") == made
