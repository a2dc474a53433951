"""The import as a whole, nccl-tests' -J output, and tidy CSV sweeps: what is taken and refused."""

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dynamiccl.collect import csv_files
from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.collect.nccl_tests import load_systems
from dynamiccl.datasets import store
from dynamiccl.errors import OutputError, UserError
from tests.collect.parsed import INPUTS, imported

LOG = (
    "# nThread 1 nGpus 8 minBytes 8 maxBytes 64\n"
    "1048576  262144  float  sum  -1  100.0  10.49  18.35  0  102.0  10.28  17.99  0\n"
)


def test_same_file_twice_is_taken_once(tmp_path: Path) -> None:
    log, copy = (tmp_path / "nightly runs" / name for name in ("job7.log", "copy.log"))
    log.parent.mkdir()
    for path in (log, copy):
        path.write_text(LOG)
    summary = import_files([log, copy], tmp_path / "out", options=ImportOptions(system="s"))
    assert summary.sums["measurements_written"] == 2
    assert "the same bytes as" in summary.files[1].remarks[0]
    again = import_files([log], tmp_path / "out", options=ImportOptions(system="s"))
    rows = store.read(tmp_path / "out")
    assert (again.sums["already_there"], rows.height) == (2, 2)
    assert rows["sweep"].unique().to_list() == ["nightly-runs"]
    assert rows["source_file"].unique().to_list() == [str(log)]
    assert rows["run"][0].startswith("job7-")
    document = json.loads(json.dumps(again.to_json(), allow_nan=False))
    assert (document["measurements_written"], document["files"][0]["rejected"]) == (2, 0)
    (record,) = store.provenance_of(tmp_path / "out")
    assert (record["tool"], len(record["files"]["job7.log"])) == ("import", 64)


def test_systems_file_sets_topology_and_name(tmp_path: Path) -> None:
    systems = tmp_path / "systems.toml"
    systems.write_text(
        '[systems.s]\nname = "short"\ncompute_capability = 9.0\nnvswitch = true\nnic_kind = "efa"\n'
    )
    _, rows = imported(tmp_path / "job7.log", LOG, systems_file=systems)
    names = ("system", "compute_capability", "nvswitch", "nic_kind", "cpu_vendor")
    assert [rows[0][name] for name in names] == ["short", 9.0, True, "efa", None]
    path = tmp_path / "systems.toml"
    for text, message in (
        ("[systems.s]\nnvlink = 5", r"systems\.s: unknown key 'nvlink'.*known keys are name"),
        ('[systems.s]\nname = "a b"', "cannot be a directory name"),
        ('[systems.s]\nnvlinks_per_gpu = "4"', r"got '4'.*\[systems\.NAME\] with any of name, "),
        ("# \xe9", "is not TOML: .*save it as UTF-8"),
    ):
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


def test_other_json_is_refused(tmp_path: Path) -> None:
    for changes, message in (
        ({"version": 4}, "version: Input should be 1, 2 or 3 .*import the text output instead"),
        ({"results": None}, "results: Input should be a valid list"),
        ({"results": []}, "holds no usable row"),
        ({"results": [7, {"size": "x"}]}, r"results\[0\]"),
        (row(out_of_place={"cpu_time": 1.0}), "cpu_time: Input should be"),
        (row(in_place_per_iter={"times_us": 1.0}), "a valid list"),
        (row(in_place={"time": 9, "alg_bw": 7, "bus_bw": 7}), "8 bytes in 9.0 us are not 7.0 GB/s"),
        (row(in_place={"nwrong": -1}), "nwrong: Input should be greater"),
    ):
        with pytest.raises(OutputError, match=message):
            imported(tmp_path / "changed.json", changed(**changes))


FIGURES = "collective,size_bytes,num_nodes,ranks_per_node,time_us,busbw_gbytes_per_s\n"
RUNS = "collective,size_bytes,num_ranks,run,repeat,time_us"


def test_lines_that_are_short_twice_or_two(tmp_path: Path) -> None:
    each = ('r,0,100,"two\nlines"', "r,0,101,", "r,1,100,")
    lines = "".join(f"allreduce,8,4,{row}\n" for row in each)
    summary, rows = imported(tmp_path / "s.csv", f"{RUNS},note\n{lines}a,b\n")
    # A record has the line that it ends on.
    assert [row["source_line"] for row in rows] == [3, 5]
    assert (summary.sums["duplicates"], summary.sums["measurements_written"]) == (1, 2)
    assert summary.rejected[0].reason == "2 cells where the header names 7 columns"


def test_rows_without_repeats_are_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_files, "CHUNK_ROWS", 2)
    lines = "".join(f"allreduce,8,4,{row},100\n" for row in ("r,", "r,0", "r,2", "r,", "other,"))
    summary, rows = imported(tmp_path / "s.csv", f"{RUNS}\n{lines}")
    assert len(summary.files[0].parts) == 2
    assert (summary.sums["duplicates"], summary.sums["rows_read"]) == (1, 5)
    assert [row["repeat"] for row in rows] == [0, 2, 3, 0]


def test_size_0_is_dropped_and_a_bandwidth_of_0_has_no_time(tmp_path: Path) -> None:
    text = f"{FIGURES}allreduce,0,1,8,100,\nallreduce,8,1,8,,0\n"
    summary, [row] = imported(tmp_path / "s.csv", text)
    assert (summary.sums["dropped"], summary.files[0].dropped) == (1, {"size 0": 1})
    told = (row["status"], row["time_us"], row["algbw_gbytes_per_s"])
    assert told == ("ok", None, None)
    assert any("a bandwidth of 0 keep no time" in each for each in summary.files[0].remarks)


#: Times of 40 us, and an algorithm that only the shell's line tells.
WRAPPED = """\
$ NCCL_ALGO=Ring ./all_reduce_perf -b 2M -e 2M -g 2
# nThread 1 nGpus 2 minBytes 2097152 maxBytes 2097152 step: 2(factor) iters: 20 agg iters: 1
# Using devices
#  Rank  0 Group  0 Pid  9 on m7 device  0 [0000:1a:00] GPU B
#  Rank  1 Group  0 Pid  9 on m7 device  1 [0000:1b:00] GPU B
#       size         count    type   redop    root     time   algbw   busbw #wrong
     2097152        524288   float     sum      -1    40.00   52.43   52.43      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 52.43
"""


def envelope(**told: str) -> Callable[[str], bytes]:
    """Makes a line of JSON of each line; `key` is that of the text."""
    key = told.pop("key")
    return lambda log: "".join(
        json.dumps({"stream": "stdout", key: line, **told}) + "\n"
        for line in log.splitlines(keepends=True)
    ).encode()


FORMS: dict[str, Callable[[str], bytes]] = {
    "plain": str.encode,
    "gzip": lambda log: gzip.compress(log.encode()),
    "bzip2": lambda log: bz2.compress(log.encode()),
    "xz": lambda log: lzma.compress(log.encode()),
    "UTF-16": lambda log: log.encode("utf-16"),
    "UTF-16 BE in gzip": lambda log: gzip.compress(b"\xfe\xff" + log.encode("utf-16-be")),
    "UTF-16 without mark": lambda log: log.encode("utf-16-le"),
    "UTF-8 with mark": lambda log: log.encode("utf-8-sig"),
    "CRLF": lambda log: log.replace("\n", "\r\n").encode(),
    "colours": lambda log: "".join(f"\x1b[1;32m{x}\x1b[0m\n" for x in log.splitlines()).encode(),
    "docker": envelope(key="log", time="2026-01-02T03:04:05Z"),
    "Fluent Bit": envelope(key="message", kubernetes="x"),
    "journald": envelope(key="MESSAGE", _HOSTNAME="m7"),
    "docker in kubectl's": lambda log: b"".join(
        b"2026-01-02T03:04:05.1Z " + line + b"\n"
        for line in envelope(key="log")(f"[1,0]<stdout>:{log}").splitlines()
    ),
    **{
        repr(prefix): lambda log, prefix=prefix: "".join(  # type: ignore[misc]
            prefix.replace("%d", str(number % 10)) + line
            for number, line in enumerate(log.splitlines(keepends=True))
        ).encode()
        for prefix in INPUTS["prefixes"]
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_a_log_is_the_same_in_every_form(form: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(FORMS[form](WRAPPED))
    summary, [row] = imported(path)
    told = [row[n] for n in ("collective", "time_us", "busbw_gbytes_per_s", "num_ranks", "gpu")]
    assert told == ["AllReduce", 40.0, 52.43, 2, "GPU B"]
    assert (row["requested_algorithm"], row["source_line"], row["num_nodes"]) == ("Ring", 7, 1)
    assert (summary.rejected, summary.sums["rows_read"]) == ([], 1)


NVIDIA = "collective,size_bytes,algorithm,protocol,channels,nodes,ranks,pipeOps,regBuff"
CELLS = ("collective", "num_ranks", "num_nodes", "time_us")
ASKED = ("requested_algorithm", "requested_protocol", "requested_num_channels")


@pytest.mark.parametrize("table", INPUTS["foreign_tables"], ids=lambda table: table["name"])
def test_tables_of_others(table: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    summary, rows = imported(path, table["text"], **table.get("options", {}))
    cells = [["-" if row[n] is None else str(row[n]) for n in (*CELLS, *ASKED)] for row in rows]
    assert "; ".join(map(" ".join, cells)) == table["rows"]
    assert [row["is_default"] for row in rows] == [set(each[4:]) == {"-"} for each in cells]
    assert summary.rejected == []
    timeless = any("no times" in remark for remark in summary.files[0].remarks)
    assert timeless == (rows[0]["time_us"] is None)


@pytest.mark.parametrize(("cells", "why"), INPUTS["refused_rows"])
def test_figures_that_do_not_fit_are_refused(cells: str, why: str, tmp_path: Path) -> None:
    text = f"{FIGURES}{cells}\nallreduce,1048576,,,100,18.35\n"
    summary, [row] = imported(tmp_path / "t.csv", text)
    assert (row["time_us"], summary.rejected[0].line) == (100.0, 2)
    assert re.search(why, summary.rejected[0].reason)


def test_what_contradicts_itself_without_a_time_is_refused(tmp_path: Path) -> None:
    head = "collective,size_bytes,num_ranks,num_nodes,algbw_gbytes_per_s,busbw_gbytes_per_s\n"
    figures = ("4,1,20.97,31.46", "4,1,20.97,251.7", "2,4,20.97,20.97")
    rows = "".join(f"allreduce,1048576,{each}\n" for each in figures)
    summary, [row] = imported(tmp_path / "t.csv", head + rows)
    assert row["time_us"] == pytest.approx(50.0, rel=1e-3)
    assert [line.line for line in summary.rejected] == [3, 4]
    assert "2 ranks cannot be on 4 nodes" in summary.rejected[1].reason
    # The other way round they would fit, too.
    rows = "allreduce,1048576,1,4,50,31.46\nkind,bytes,n,m,bw,lat\nallreduce,1048576,1,4,31.46,50\n"
    summary, _ = imported(tmp_path / "u.csv", FIGURES + rows)
    assert [line.line for line in summary.rejected] == [3, 4]
    assert "names that are not known" in summary.rejected[1].reason
    # A little is taken, and told.
    summary, _ = imported(tmp_path / "v.csv", f"{FIGURES}allreduce,1048576,1,8,100,17.5\n")
    assert (summary.sums["measurements_written"], summary.rejected) == (1, [])
    assert any("differ by up to 5 %" in remark for remark in summary.files[0].remarks)


def test_a_column_of_the_config_is_no_choice_of_nccls(tmp_path: Path) -> None:
    text = "op,size_bytes,config,host,lat\nallreduce,8,Tree/LL,a,9\nallreduce,8,default,b,8\n"
    named = "collective=op,time_us=lat"
    summary, rows = imported(tmp_path / "t.csv", text, foreign_columns=named)
    told = [(row["is_default"], row["launch_profile"], row["repeat"]) for row in rows]
    assert told == [(False, "config=Tree/LL", 0), (True, "default", 0)]
    assert any("the column host is not taken" in text for text in summary.files[0].remarks)
    # Registered buffers of NVIDIA's table are a profile.
    lines = "allreduce,65536,ring,ll,4,1,8,-1,0,9\nallreduce,65536,ring,ll,4,1,8,-1,1,8\n"
    _, rows = imported(tmp_path / "n.csv", f"{NVIDIA},latency_us\n{lines}")
    profiles = [row["launch_profile"] for row in rows if row["size_bytes"] == 65536]
    assert profiles == ["regbuff=0", "regbuff=1"]


def test_a_bus_bandwidth_without_ranks_is_no_measurement(tmp_path: Path) -> None:
    text = FIGURES + "allreduce,1048576,,,,18.35\n"
    with pytest.raises(OutputError, match=r"no usable row: a bus bandwidth without its number of"):
        imported(tmp_path / "t.csv", text)
    _, [row] = imported(tmp_path / "t.csv", num_ranks=8, num_nodes=1)
    assert row["time_us"] == pytest.approx(100.0, rel=1e-3)


@pytest.mark.parametrize("told", [{"algorithm": "ring", "num_channels": 4}, {"num_nodes": 8}])
def test_options_that_cannot_be_are_not_taken(told: dict[str, Any], tmp_path: Path) -> None:
    log = WRAPPED.replace("NCCL_ALGO=Ring ./all_reduce", "./alltoall")
    log = log.replace("  sum ", " none ").replace("52.43   52.43", "52.43   26.21")
    summary, [row] = imported(tmp_path / "x", log, **told)
    assert (row["collective"], row["is_default"]) == ("AlltoAll", True)
    assert (row["requested_algorithm"], row["requested_num_channels"]) == (None, None)
    assert row["num_nodes"] == (None if "num_nodes" in told else 1)
    why = "8|has no algorithms: algorithm, num_channels"
    assert any(re.search(why, remark) for remark in summary.files[0].remarks)


def test_options_that_the_output_contradicts_are_told(tmp_path: Path) -> None:
    ranks = "".join(
        f"#  Rank  {i} Group  0 Pid  {i} on node1 device  {i} [0000:1{i}:00] H100\n"
        for i in range(8)
    )
    summary, rows = imported(tmp_path / "x", ranks + LOG, num_ranks=4, gpu="B200", num_nodes=1)
    assert {(row["num_ranks"], row["gpu"]) for row in rows} == {(8, "H100")}
    told = summary.files[0].remarks
    assert "number of ranks: the output says 8; the option's 4 was not used" in told
    assert "GPU model: the output says H100; the option's B200 was not used" in told
    assert not any("nodes" in remark for remark in told)


@pytest.mark.parametrize(("columns", "why"), INPUTS["wrong_columns"])
def test_wrong_names_of_columns(columns: str, why: str, tmp_path: Path) -> None:
    text = "collective,bytes,latency_ms\nallreduce,8,1\n"
    with pytest.raises(UserError, match=why):
        imported(tmp_path / "t.csv", text, foreign_columns=columns)
