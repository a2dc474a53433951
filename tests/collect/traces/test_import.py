"""`dynamiccl-collect import` of traces: what is recognised, joined, told, and not taken twice."""

import gzip
import shutil
import tarfile
from pathlib import Path

import pytest

from dynamiccl.collect.traces.files import source_of, trace_files
from dynamiccl.datasets import store
from tests.cli.conftest import Shell, refused, shell_fixture
from tests.collect.traces.made import (
    Chrome,
    inspector_line,
    read,
    recorder_dump,
    recorder_entry,
    write_lines,
)
from tests.collect.traces.test_flight_recorder import as_json
from tests.published import COPIES

__all__ = ["shell_fixture"]
COLLECT = "dynamiccl-collect"


def kineto(path: Path, rank: int) -> Path:
    chrome = Chrome(rank)
    chrome.step(1, 0.0, 1000.0)
    chrome.compute(100.0, 200.0)
    chrome.collective(200.0, 200.0, told={"Seq": 1})
    return chrome.write(path)


@pytest.fixture(name="job")
def job_fixture(tmp_path: Path) -> Path:
    """A directory as people have it: ranks in an archive and beside it, and other things."""
    job = tmp_path / "job"
    job.mkdir()
    with tarfile.open(job / "rank0.tar.gz", "w:gz") as archive:
        archive.add(kineto(tmp_path / "worker0.json", 0), "traces/worker0.json")
    kineto(job / "rank1.json.gz", 1)
    write_lines(job / "inspector.log", *(inspector_line(rank, 0, 9.0) for rank in (0, 1)))
    for rank in (0, 1):
        entry = recorder_entry(1, time_created_ns=1_700_000_000_000_000_000 + rank)
        as_json(job / f"nccl_trace_rank_{rank}", recorder_dump(entry))
    (job / "notes.txt").write_text("a job\n")
    (job / "model.pkl").write_bytes(b"\x80\x04\x95cos\nsystem\n.")
    return job


def test_a_directory_of_all_kinds_is_one_import(job: Path, shell: Shell, tmp_path: Path) -> None:
    done = shell(COLLECT, "import", job, "--out", "data", "--system", "box")
    assert done.code == 0, done.err
    assert "3 calls from 6 records of ranks (3 with a time), 2 steps written" in done.out
    assert "notes.txt: left alone" in done.err
    assert "model.pkl: left alone" in done.err
    calls = store.read(tmp_path / "data", "calls").sort("source")
    assert calls["source"].to_list() == ["flight-recorder", "inspector", "kineto"]
    assert calls["time_us"].to_list() == [250.0, 9.0, 200.0]
    assert calls["exposed_us"].to_list() == [None, None, 100.0]
    told = shell(COLLECT, "describe", "data").out
    assert "box: 3 calls of 1 communicators, 3 with a time from all ranks" in told
    assert "2 steps of 2 ranks in job (job)" in told
    assert "20% of it communication, 10% exposed" in told


def test_the_same_import_twice_gives_the_same_parts(
    job: Path, shell: Shell, tmp_path: Path
) -> None:
    for _ in range(2):
        assert shell(COLLECT, "import", job, "--out", "data", "--system", "box").code == 0
        parts = [store.part_paths(tmp_path / "data", kind) for kind in ("calls", "steps")]
        assert [len(each) for each in parts] == [1, 1]


def test_calls_without_a_time_are_told_by_reason(shell: Shell, tmp_path: Path) -> None:
    kineto(tmp_path / "rank0.json", 0)
    done = shell(COLLECT, "import", "rank0.json", "--out", "data", "--system", "box")
    assert "1 calls without a time: the traces of other ranks are missing" in done.err
    again = shell(COLLECT, "import", "rank0.json", "--out", "d2", "--system", "box", "--json")
    assert list(again.json["untimed"].values()) == [1]


def test_one_bad_trace_among_good_ones_costs_itself(
    job: Path, shell: Shell, tmp_path: Path
) -> None:
    bad = job / "rank_1.json.gz"
    shutil.copyfile(job / "rank1.json.gz", bad)
    bad.write_bytes(bad.read_bytes()[:200])
    line = refused(shell(COLLECT, "import", job, "--out", "data", "--system", "box"), 3)
    assert "rank_1.json.gz" in line
    assert "3 calls are written" in line
    assert store.read(tmp_path / "data", "calls").height == 3


def test_what_the_caller_knows_is_taken(shell: Shell, tmp_path: Path) -> None:
    kineto(tmp_path / "rank0.json", 0)
    known = ("--nodes", "1", "--gpu", "B200", "--sweep", "mine", "--nccl-version", "2.28.9")
    assert shell(COLLECT, "import", "rank0.json", "--out", "d", "--system", "box", *known).code == 0
    [call] = store.read(tmp_path / "d", "calls").to_dicts()
    told = ("num_nodes", "ranks_per_node", "gpu", "sweep", "run", "nccl_version")
    assert [call[name] for name in told] == [1, 2, "B200", "mine", "mine", "2.28.9"]


@pytest.mark.parametrize(
    "head",
    [b"", b"{}", b'{"version": 3, "args": [], "results": []}', b"# nThread 1", b"[1, 2]", b"\x1f"],
)
def test_what_is_no_trace_is_none(head: bytes) -> None:
    assert source_of(head) is None


def test_members_of_an_archive_are_read_where_they_are(tmp_path: Path) -> None:
    path = COPIES / "traces" / "param_dlrm_kineto_excerpt.tar.gz"
    members = [each.member or "" for each in trace_files(path)]
    assert len(members) == 8
    assert all("worker" in name for name in members)
    found = read(path)
    assert [report.path for report in found.reports] == [f"{path}:{name}" for name in members]
    plain = tmp_path / "plain.tar"
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    assert read(plain).calls.num_rows == found.calls.num_rows
