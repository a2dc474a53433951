"""The import as a whole, nccl-tests' -J output, and tidy CSV sweeps: what is taken and refused."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dynamiccl.collect import csv_files
from dynamiccl.collect.csv_files import CSV_COLUMNS
from dynamiccl.collect.imports import ImportOptions, ImportSummary, import_files
from dynamiccl.collect.nccl_tests import load_systems
from dynamiccl.datasets import store
from dynamiccl.errors import OutputError, UserError
from tests.collect.parsed import imported

LOG = (
    "# nThread 1 nGpus 8 minBytes 8 maxBytes 64\n"
    "1048576  262144  float  sum  -1  100.0  10.49  18.35  0  102.0  10.28  17.99  0\n"
)


@pytest.fixture(name="log")
def log_fixture(tmp_path: Path) -> Path:
    path = tmp_path / "nightly runs" / "job7.log"
    path.parent.mkdir()
    path.write_text(LOG)
    return path


def test_same_file_twice_is_taken_once(log: Path, tmp_path: Path) -> None:
    copy = log.with_name("copy.log")
    copy.write_text(LOG)
    summary = import_files([log, copy], tmp_path / "out", options=ImportOptions(system="s"))
    assert summary.measurements_written == 2
    assert "the same bytes as" in summary.files[1].remarks[0]
    again = import_files([log], tmp_path / "out", options=ImportOptions(system="s"))
    rows = store.read(tmp_path / "out")
    assert (again.already_there, rows.height) == (2, 2)
    assert rows["sweep"].unique().to_list() == ["nightly-runs"]
    assert rows["source_file"].unique().to_list() == [str(log)]
    assert rows["run"][0].startswith("job7-")
    document = json.loads(json.dumps(again.to_json(), allow_nan=False))
    assert (document["measurements_written"], document["files"][0]["rejected"]) == (2, 0)
    (record,) = store.provenance_of(tmp_path / "out")
    assert (record["tool"], len(record["files"]["job7.log"])) == ("import", 64)


def test_systems_file_sets_topology_and_name(log: Path, tmp_path: Path) -> None:
    systems = tmp_path / "systems.toml"
    systems.write_text(
        '[systems.s]\nname = "short"\ncompute_capability = 9.0\nnvswitch = true\nnic_kind = "efa"\n'
    )
    _, [row, _] = imported(log, systems_file=systems)
    assert (row["system"], row["compute_capability"]) == ("short", 9.0)
    assert (row["nvswitch"], row["nic_kind"], row["cpu_vendor"]) == (True, "efa", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[systems.s]\nnvlink = 5", r"systems\.s: unknown key 'nvlink'.*known keys are name"),
        ('[systems.s]\nname = "a b"', "cannot be a directory name"),
        ('[systems.s]\nnvlinks_per_gpu = "4"', r"got '4'.*\[systems\.NAME\] with any of name, "),
        ("# \xe9", "is not TOML: .*save it as UTF-8"),
    ],
)
def test_wrong_systems_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "systems.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=message):
        load_systems(path)


DATA = Path(__file__).parents[1] / "data"


def changed(**changes: Any) -> str:
    """A whole JSON output with other keys."""
    content = json.loads((DATA / "nccl_tests_v3.json").read_text())
    return json.dumps({**content, **changes})


def test_secrets_are_not_kept(tmp_path: Path) -> None:
    secrets = ("hush", "AWS_SECRET", "HF_TOKEN", "alice", "agent", "PLUGIN")
    source, options = DATA / "nccl_tests_v1.json", ImportOptions(system="s")
    summary = import_files([source], tmp_path, options=options)
    frame = store.read(tmp_path)
    stored = [str(row) for row in frame.rows()] + [json.dumps(summary.to_json())]
    stored += [str(store.provenance_of(tmp_path))]
    for part in store.part_paths(tmp_path):
        stored += [str(part.read_bytes()), str(pq.read_schema(part).metadata)]
    assert not [secret for secret in secrets if any(secret in text for text in stored)]


def test_what_a_config_leaves_out_is_the_usual(tmp_path: Path) -> None:
    _, [row, *_] = imported(tmp_path / "a.json", changed(config={}))
    assert (row["launch_profile"], row["is_default"], row["num_ranks"]) == ("default", True, None)
    unusual = {"graph": 1, "unalign": 1, "aggregated_iterations": 2}
    (tmp_path / "b").mkdir()
    _, rows = imported(tmp_path / "b" / "b.json", changed(config=unusual))
    assert {row["launch_profile"] for row in rows} == {"agg_iters=2,graph=1,unalign=1"}


def row(**keys: Any) -> dict[str, Any]:
    return {"results": [{"size": 8, **keys}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 4}, "version: Input should be 1, 2 or 3 .*import the text output instead"),
        ({"results": None}, "results: Input should be a valid list"),
        ({"results": []}, "holds no usable row"),
        ({"results": [7, {"size": "x"}]}, r"results\[0\]"),
        (row(out_of_place={"cpu_time": 1.0}), "cpu_time: Input should be"),
        (row(in_place_per_iter={"times_us": 1.0}), "a valid list"),
        (row(in_place={"time": 9, "alg_bw": 7, "bus_bw": 7}), "8 bytes in 9.0 us are not 7.0 GB/s"),
        (row(in_place={"nwrong": -1}), "nwrong: Input should be greater"),
    ],
)
def test_other_json_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=message):
        imported(tmp_path / "changed.json", changed(**changes))


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
