"""Tidy CSV sweeps: what a row becomes, and what is refused."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect import csv_files
from dynamiccl.collect.csv_files import CSV_COLUMNS
from dynamiccl.collect.imports import ImportSummary
from tests.collect.parsed import imported

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


def load(
    folder: Path, *changes: dict[str, str], **told: Any
) -> tuple[ImportSummary, list[dict[str, Any]]]:
    """A file with a row for each change of the plain one."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(ROW | change for change in changes)
    return imported(folder / "sweep one.csv", text.getvalue(), **{"system": None, **told})


def cells(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


def test_default_row_keeps_what_was_read_back_as_actual(tmp_path: Path) -> None:
    change = {"is_default": "true", "launch_profile": "buff8m", "note": "requested size 1000000"}
    _, [row] = load(tmp_path, change)
    assert row["requested_algorithm"] is None
    assert (row["actual_algorithm"], row["actual_num_channels"]) == ("Ring", 16)
    assert (row["is_default"], row["verified"], row["default_scope"]) == (True, False, "profile")


def test_notes_tell_whether_channels_were_requested(tmp_path: Path) -> None:
    notes = "channels = upper limit", "channels: read back", "algorithm read back"
    _, rows = load(tmp_path, *({"note": note, "run": note} for note in notes))
    found = cells(rows, "requested_num_channels", "actual_num_channels")
    assert found == [(None, None), (None, 16), (16, None)]


def test_attempt_without_a_result(tmp_path: Path) -> None:
    notes = {"HANG (>30s timeout)": "timed_out", "Message truncation crash": "failed"}
    none = {"time_us": "", "busbw_gbytes_per_s": "", "statistic": "none"}
    _, rows = load(tmp_path, *(none | {"note": note, "run": note} for note in notes))
    found = cells(rows, "reason", "status", "statistic")
    assert found == [(note, status, "none") for note, status in notes.items()]


def test_lines_that_are_short_twice_or_two(tmp_path: Path) -> None:
    summary, rows = load(tmp_path, {"note": "two\nlines"}, {"time_us": "101"}, {"repeat": "1"})
    # A record has the line that it ends on.
    assert [row["source_line"] for row in rows] == [3, 5]
    assert (summary.duplicates, summary.measurements_written) == (1, 2)
    text = Path(summary.files[0].path).read_text() + "a,b\n"
    [refused] = imported(tmp_path / "s.csv", text, system=None)[0].rejected
    assert refused.reason == f"2 cells where the header names {len(CSV_COLUMNS)} columns"


def test_rows_without_a_repeat_are_the_next_ones_of_those_alike_in_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_files, "CHUNK_ROWS", 2)
    repeats = ({"repeat": number} for number in ("", "0", "2", ""))
    summary, rows = load(tmp_path, *repeats, {"run": "other"})
    assert len(summary.files[0].parts) == 2
    assert (summary.duplicates, summary.rows_read) == (1, 5)
    assert [row["repeat"] for row in rows] == [0, 2, 3, 0]


def test_size_0_is_dropped_and_a_bandwidth_of_0_has_no_time(tmp_path: Path) -> None:
    nothing = {"time_us": "", "busbw_gbytes_per_s": "0"}
    summary, rows = load(tmp_path, {"size_bytes": "0"}, nothing)
    assert (summary.dropped, summary.files[0].dropped) == (1, {"size 0": 1})
    assert cells(rows, "status", "time_us", "algbw_gbytes_per_s") == [("ok", None, None)]
    assert "a bandwidth of 0 keep no time" in summary.files[0].remarks[0]


def test_four_columns_are_enough_and_rows_alike_are_repeats(tmp_path: Path) -> None:
    text = (
        "collective,size_bytes,algorithm,protocol,time_us\n"
        "allreduce,1048576,,,100\nallreduce,1048576,,,101\nallreduce,1048576,Ring,LL,90\n"
    )
    known: dict[str, Any] = {"num_nodes": 2, "num_ranks": 16}
    summary, rows = imported(tmp_path / "mine.csv", text, **known)
    found = cells(rows, "is_default", "repeat", "requested_algorithm", "num_ranks")
    assert found == [(True, 0, None, 16), (True, 1, None, 16), (False, 0, "Ring", 16)]
    [told] = summary.files[0].remarks
    assert "mode 'isolated', launch_profile 'default'" in told
    again, _ = imported(tmp_path / "mine.csv", **known)
    assert (summary.already_there, again.already_there) == (0, 3)
