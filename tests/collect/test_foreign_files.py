"""Files as launchers, containers, shells and other programs leave them: what each must give."""

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect import imports
from dynamiccl.collect.imports import ImportOptions
from dynamiccl.collect.nccl_tests import Part
from dynamiccl.collect.output import FileReport
from dynamiccl.datasets.store import measurements_table, trial_id
from dynamiccl.errors import OutputError, UserError
from tests.collect.parsed import INPUTS, imported
from tests.published import WHOLE

CASES = WHOLE / "public-cases"
#: Times of 40 us, and an algorithm that only the shell's line tells.
LOG = """\
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
    path.write_bytes(FORMS[form](LOG))
    summary, [row] = imported(path)
    told = [row[n] for n in ("collective", "time_us", "busbw_gbytes_per_s", "num_ranks", "gpu")]
    assert told == ["AllReduce", 40.0, 52.43, 2, "GPU B"]
    assert (row["requested_algorithm"], row["source_line"], row["num_nodes"]) == ("Ring", 7, 1)
    assert (summary.rejected, summary.rows_read) == ([], 1)


NVIDIA = "collective,size_bytes,algorithm,protocol,channels,nodes,ranks,pipeOps,regBuff"
ROW = ("collective", "num_ranks", "num_nodes", "time_us")
ASKED = ("requested_algorithm", "requested_protocol", "requested_num_channels")


@pytest.mark.parametrize("table", INPUTS["foreign_tables"], ids=lambda table: table["name"])
def test_tables_of_others(table: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    summary, rows = imported(path, table["text"], **table.get("options", {}))
    cells = [["-" if row[n] is None else str(row[n]) for n in (*ROW, *ASKED)] for row in rows]
    assert "; ".join(map(" ".join, cells)) == table["rows"]
    assert [row["is_default"] for row in rows] == [set(each[4:]) == {"-"} for each in cells]
    assert summary.rejected == []
    timeless = any("no times" in remark for remark in summary.files[0].remarks)
    assert timeless == (rows[0]["time_us"] is None)


HEADER = "collective,size_bytes,num_nodes,ranks_per_node,time_us,busbw_gbytes_per_s\n"


@pytest.mark.parametrize(("cells", "why"), INPUTS["refused_rows"])
def test_a_time_and_a_bandwidth_that_do_not_fit_are_refused(
    cells: str, why: str, tmp_path: Path
) -> None:
    text = f"{HEADER}{cells}\nallreduce,1048576,,,100,18.35\n"
    summary, [row] = imported(tmp_path / "t.csv", text)
    assert (row["time_us"], summary.rejected[0].line) == (100.0, 2)
    assert re.search(why, summary.rejected[0].reason)


def test_what_contradicts_itself_without_a_time_is_refused(tmp_path: Path) -> None:
    head = "collective,size_bytes,num_ranks,num_nodes,algbw_gbytes_per_s,busbw_gbytes_per_s\n"
    rows = (
        "allreduce,1048576,4,1,20.97,31.46\nallreduce,1048576,4,1,20.97,251.7\n"
        "allreduce,1048576,2,4,20.97,20.97\n"
    )
    summary, [row] = imported(tmp_path / "t.csv", head + rows)
    assert row["time_us"] == pytest.approx(50.0, rel=1e-3)
    assert [line.line for line in summary.rejected] == [3, 4]
    assert "2 ranks cannot be on 4 nodes" in summary.rejected[1].reason
    # The other way round they would fit, too.
    rows = "allreduce,1048576,1,4,50,31.46\nkind,bytes,n,m,bw,lat\nallreduce,1048576,1,4,31.46,50\n"
    summary, _ = imported(tmp_path / "u.csv", HEADER + rows)
    assert [line.line for line in summary.rejected] == [3, 4]
    assert "names that are not known" in summary.rejected[1].reason


def test_what_is_taken_in_other_words_is_told(tmp_path: Path) -> None:
    summary, [row] = imported(tmp_path / "t.csv", f"{HEADER}allreduce,1048576,1,8,100,17.5\n")
    assert row["time_us"] == 100.0
    assert any("differ by up to 5 %" in remark for remark in summary.files[0].remarks)


def test_a_column_that_may_be_of_the_config_is_no_choice_of_nccls(tmp_path: Path) -> None:
    text = "op,size_bytes,config,host,lat\nallreduce,8,Tree/LL,a,9\nallreduce,8,default,b,8\n"
    named = "collective=op,time_us=lat"
    summary, rows = imported(tmp_path / "t.csv", text, foreign_columns=named)
    told = [(row["is_default"], row["launch_profile"], row["repeat"]) for row in rows]
    assert told == [(False, "config=Tree/LL", 0), (True, "default", 0)]
    assert any("the column host is not taken" in text for text in summary.files[0].remarks)


def test_registered_buffers_of_nvidias_table_are_a_profile(tmp_path: Path) -> None:
    rows = "allreduce,65536,ring,ll,4,1,8,-1,0,9\nallreduce,65536,ring,ll,4,1,8,-1,1,8\n"
    _, found = imported(tmp_path / "t.csv", f"{NVIDIA},latency_us\n{rows}")
    assert [row["launch_profile"] for row in found] == ["regbuff=0", "regbuff=1"]


def test_a_bus_bandwidth_without_ranks_is_no_measurement(tmp_path: Path) -> None:
    text = HEADER + "allreduce,1048576,,,,18.35\n"
    with pytest.raises(OutputError, match=r"no usable row: a bus bandwidth without its number of"):
        imported(tmp_path / "t.csv", text)
    _, [row] = imported(tmp_path / "t.csv", num_ranks=8, num_nodes=1)
    assert row["time_us"] == pytest.approx(100.0, rel=1e-3)


def test_one_more_format_is_one_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path, run: str, told: ImportOptions, report: FileReport) -> Iterator[Part]:
        report.rows_read += 1
        row = told.columns(path) | {"collective": "Reduce", "size_bytes": 8, "time_us": 7.0}
        row |= {"run": run, "repeat": 0, "source": "tidy_csv", "source_file": str(path)}
        yield "measurements", measurements_table([row | {"trial": trial_id(row), "status": "ok"}])

    monkeypatch.setitem(imports._FORMATS, "made up", (r"\Amade up", read))
    summary, [row] = imported(tmp_path / "x", "made up\n")
    assert (row["time_us"], summary.files[0].format) == (7.0, "made up")


@pytest.mark.parametrize("told", [{"algorithm": "ring", "num_channels": 4}, {"num_nodes": 8}])
def test_options_that_cannot_be_are_not_taken(told: dict[str, Any], tmp_path: Path) -> None:
    log = LOG.replace("NCCL_ALGO=Ring ./all_reduce", "./alltoall")
    log = log.replace("  sum ", " none ").replace("52.43   52.43", "52.43   26.21")
    summary, [row] = imported(tmp_path / "x", log, **told)
    assert (row["collective"], row["is_default"]) == ("AlltoAll", True)
    assert (row["requested_algorithm"], row["requested_num_channels"]) == (None, None)
    assert row["num_nodes"] == (None if "num_nodes" in told else 1)
    why = "8|has no algorithms: algorithm, num_channels"
    assert any(re.search(why, remark) for remark in summary.files[0].remarks)


@pytest.mark.parametrize(("columns", "why"), INPUTS["wrong_columns"])
def test_wrong_names_of_columns(columns: str, why: str, tmp_path: Path) -> None:
    text = "collective,bytes,latency_ms\nallreduce,8,1\n"
    with pytest.raises(UserError, match=why):
        imported(tmp_path / "t.csv", text, foreign_columns=columns)
