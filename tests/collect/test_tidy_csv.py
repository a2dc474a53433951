"""Tidy CSV sweeps: what a row becomes, and what is refused."""

import csv
from pathlib import Path

import polars as pl
import pytest

from dynamiccl.collect import csv_files
from dynamiccl.collect.csv_files import CSV_COLUMNS
from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.datasets import store

HEADER = (
    "source,system,gpu,num_nodes,ranks_per_node,nccl_version,collective,size_bytes,algorithm,"
    "protocol,num_channels,mode,launch_profile,in_place,run,repeat,statistic,time_us,"
    "busbw_gbytes_per_s,is_default,note"
)
LINE = (
    'page,"One node, NVLink",H100,1,8,2.29.7,allreduce,1048576,RING,LL128,16,isolated,default,true,'
    "r1,0,mean,100,18.35,false,"
)
[ROW] = csv.DictReader([HEADER, LINE])


def write(path: Path, *changes: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS)
        writer.writeheader()
        writer.writerows(ROW | change for change in changes)
    return path


def load(tmp_path: Path, *changes: dict[str, str]) -> pl.DataFrame:
    import_files([write(tmp_path / "sweep one.csv", *changes)], tmp_path / "out")
    return store.read(tmp_path / "out").sort("source_line")


def refusal(tmp_path: Path, change: dict[str, str]) -> str:
    summary = import_files([write(tmp_path / "s.csv", {}, change)], tmp_path / "out")
    assert summary.measurements_written == 1
    assert [(reject.line, Path(reject.path).name) for reject in summary.rejected] == [(3, "s.csv")]
    return summary.rejected[0].reason


def test_default_row_keeps_what_was_read_back_as_actual(tmp_path: Path) -> None:
    change = {"is_default": "true", "launch_profile": "buff8m", "note": "requested size 1000000"}
    row = load(tmp_path, change).row(0, named=True)
    assert row["requested_algorithm"] is None
    assert (row["actual_algorithm"], row["actual_num_channels"]) == ("Ring", 16)
    assert (row["is_default"], row["verified"], row["default_scope"]) == (True, False, "profile")


def test_notes_tell_whether_channels_were_requested(tmp_path: Path) -> None:
    limit, back, other = "channels = upper limit", "channels: read back", "algorithm read back"
    rows = load(tmp_path, *({"note": note, "run": note} for note in (limit, back, other)))
    assert rows["requested_num_channels"].to_list() == [None, None, 16]
    assert rows["actual_num_channels"].to_list() == [None, 16, None]


@pytest.mark.parametrize(
    ("note", "status"),
    [
        ("no result: HANG (>30s timeout)", "timed_out"),
        ("no result: Message truncation crash", "failed"),
        ("no result: the plug-in changes nothing", "failed"),
    ],
)
def test_attempt_without_a_result(note: str, status: str, tmp_path: Path) -> None:
    change = {"time_us": "", "busbw_gbytes_per_s": "", "statistic": "none", "note": note}
    row = load(tmp_path, change).row(0, named=True)
    assert (row["status"], row["statistic"], row["reason"]) == (status, "none", note)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("algorithm", "mscclpp kernel 1", "unknown algorithm 'mscclpp kernel 1'; choose from Tree"),
        ("collective", "alreduce", "did you mean 'AllReduce'"),
        ("size_bytes", "", "size_bytes: Field required"),
        ("size_bytes", str(1 << 62), "size_bytes: Input should be less than"),
        ("num_nodes", "0", "num_nodes: Input should be greater than or equal to 1 (got '0')"),
        ("time_us", "nan", "finite number"),
        ("time_us", "0", "greater than 0"),
        ("in_place", "maybe", "in_place: Input should be a valid boolean"),
        ("nccl_version", "new", "unknown NCCL version"),
        ("statistic", "target", "statistic: Input should be 'mean', 'median'"),
    ],
)
def test_refused_cell(column: str, value: str, message: str, tmp_path: Path) -> None:
    assert message in refusal(tmp_path, {column: value})


def test_short_line_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "s.csv", {})
    path.write_text(path.read_text() + "a,b\n")
    [refused] = import_files([path], tmp_path / "out").rejected
    assert refused.reason == f"2 cells where the header names {len(CSV_COLUMNS)} columns"


def test_row_printed_twice_counts_once(tmp_path: Path) -> None:
    path = write(tmp_path / "s.csv", {}, {"time_us": "101"}, {"repeat": "1"})
    summary = import_files([path], tmp_path / "out")
    assert (summary.duplicates, summary.measurements_written) == (1, 2)


def test_rows_without_a_repeat_are_the_next_ones_of_those_alike_in_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_files, "CHUNK_ROWS", 2)
    changes = ({"repeat": ""}, {"repeat": "0"}, {"repeat": "2"}, {"repeat": ""}, {"run": "other"})
    summary = import_files([write(tmp_path / "s.txt", *changes)], tmp_path / "out")
    assert len(summary.files[0].parts) == 2
    rows = store.read(tmp_path / "out").sort("source_line")
    assert (summary.duplicates, summary.rows_read) == (1, 5)
    assert rows["repeat"].to_list() == [0, 2, 3, 0]


def test_size_0_is_dropped_and_a_bandwidth_of_0_has_no_time(tmp_path: Path) -> None:
    nothing = {"time_us": "", "busbw_gbytes_per_s": "0"}
    summary = import_files([write(tmp_path / "s.csv", {"size_bytes": "0"}, nothing)], tmp_path)
    [row] = store.read(tmp_path).to_dicts()
    assert (summary.dropped, summary.files[0].dropped) == (1, {"size 0": 1})
    assert (row["status"], row["time_us"], row["algbw_gbytes_per_s"]) == ("ok", None, None)
    assert "a bandwidth of 0 keep no time" in summary.files[0].remarks[0]


def test_what_the_caller_knows_is_for_empty_cells(tmp_path: Path) -> None:
    path = write(tmp_path / "s.csv", {"gpu": "", "launch_profile": ""}, {"repeat": "1"})
    options = ImportOptions(system="mine", gpu="H200", launch_profile="tuned")
    import_files([path], tmp_path / "out", options=options)
    rows = store.read(tmp_path / "out").sort("source_line")
    assert rows["gpu"].to_list() == ["H200", "H100"]
    assert rows["launch_profile"].to_list() == ["tuned", "default"]
    assert rows["default_scope"].to_list() == ["profile", "untouched"]
    assert rows["system"].unique().to_list() == ["mine"]


def test_a_record_has_the_line_that_it_ends_on(tmp_path: Path) -> None:
    frame = load(tmp_path, {"note": "two\nlines"}, {"repeat": "1"})
    assert frame["source_line"].to_list() == [3, 4]


def test_four_columns_are_enough_and_rows_alike_are_repeats(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(
        "collective,size_bytes,algorithm,protocol,time_us\n"
        "allreduce,1048576,,,100\nallreduce,1048576,,,101\nallreduce,1048576,Ring,LL,90\n"
    )
    options = ImportOptions(system="mine", num_nodes=2, num_ranks=16)
    summary = import_files([path], tmp_path / "out", options=options)
    rows = store.read(tmp_path / "out").sort("source_line")
    assert rows["is_default"].to_list() == [True, True, False]
    assert rows["repeat"].to_list() == [0, 1, 0]
    assert rows["requested_algorithm"].to_list() == [None, None, "Ring"]
    assert set(rows["num_ranks"]) == {16}
    [told] = summary.files[0].remarks
    assert "mode 'isolated', launch_profile 'default'" in told
    again = import_files([path], tmp_path / "out", options=options)
    assert (summary.already_there, again.already_there) == (0, 3)
