"""`dynamiccl-collect import` of traces: what is recognised, joined and told; published ones."""

import gzip
import json
import pickle
import shutil
import tarfile
from pathlib import Path

import polars as pl
import pytest

from dynamiccl.datasets import store
from dynamiccl.errors import OutputError
from tests.cli.conftest import Shell, refused, shell_fixture
from tests.collect.traces.made import Chrome, calls_of, inspector_line, read, write_lines
from tests.published import COPIES, WHOLE, unpacked

__all__ = ["shell_fixture"]
COLLECT = "dynamiccl-collect"
EXECUTION_TRACE = COPIES / "traces" / "param_resnet_2gpu_et_excerpt.json.gz"
RECORDER_DUMP = pickle.dumps(
    {"version": "2.10", "pg_config": {"0": {"ranks": "[0, 1]"}}, "entries": [{"record_id": 1}]},
    protocol=2,
)


def kineto(path: Path, rank: int) -> Path:
    chrome = Chrome(rank)
    chrome.step(1, 0.0, 1000.0)
    chrome.compute(100.0, 200.0)
    chrome.collective(200.0, 200.0, told={"Seq": 1})
    return chrome.write(path)


@pytest.fixture(name="job")
def job_fixture(tmp_path: Path) -> Path:
    """A directory as people have it: traces of all ranks, and other things."""
    job = tmp_path / "job"
    job.mkdir()
    with tarfile.open(job / "old.tar.gz", "w:gz") as archive:
        archive.add(kineto(job / "rank0.json", 0), "traces/worker0.json")
    kineto(job / "rank1.json.gz", 1)
    write_lines(job / "inspector.log", *(inspector_line(rank, 0, 9.0) for rank in (0, 1)))
    (job / "nccl_trace_rank_0").write_bytes(RECORDER_DUMP)
    shutil.copy(EXECUTION_TRACE, job / "et.json.gz")
    (job / "notes.txt").write_text("a job\n")
    return job


def test_a_directory_of_all_kinds_is_one_import(job: Path, shell: Shell, tmp_path: Path) -> None:
    # Twice gives the same parts.
    for _ in range(2):
        done = shell(COLLECT, "import", job, "--out", "data", "--system", "box")
        assert done.code == 0, done.err
        parts = [store.part_paths(tmp_path / "data", kind) for kind in ("calls", "steps")]
        assert [len(each) for each in parts] == [1, 1]
    assert "2 calls from 4 records of ranks (2 with a time), 2 steps written" in done.out
    assert "notes.txt: left alone" in done.err
    assert "old.tar.gz: left alone, an archive, which is not read; unpack it" in done.err
    assert "nccl_trace_rank_0: left alone, no kind that is known" in done.err
    assert "et.json.gz: left alone, an execution trace: calls without times" in done.err
    calls = store.read(tmp_path / "data", "calls").sort("source")
    assert calls["source"].to_list() == ["inspector", "kineto"]
    assert calls["time_us"].to_list() == [9.0, 200.0]
    assert calls["exposed_us"].to_list() == [None, 100.0]
    told = shell(COLLECT, "describe", "data").out
    assert "box: 2 calls of 1 communicators, 2 with a time from all ranks" in told
    assert "2 steps of 2 ranks in job (job)" in told
    assert "20% of it communication, 10% exposed" in told


def test_one_rank_alone_has_no_time_and_what_the_caller_knows(shell: Shell, tmp_path: Path) -> None:
    kineto(tmp_path / "rank0.json", 0)
    command = (COLLECT, "import", "rank0.json", "--out", "d", "--system", "box", "--nodes", "1")
    done = shell(*command, "--gpu", "B200", "--sweep", "mine", "--nccl-version", "2.28.9")
    assert "1 calls without a time: the traces of other ranks are missing" in done.err
    [call] = store.read(tmp_path / "d", "calls").to_dicts()
    told = ("num_nodes", "ranks_per_node", "gpu", "sweep", "run", "nccl_version")
    assert [call[name] for name in told] == [1, 2, "B200", "mine", "mine", "2.28.9"]
    assert [*shell(*command, "--json").json["untimed"].values()] == [1]


@pytest.mark.parametrize("kept", [200, -40])
def test_one_bad_trace_among_good_ones_costs_itself(
    kept: int, job: Path, shell: Shell, tmp_path: Path
) -> None:
    bad = job / "rank_1.log.gz"
    lines = "".join(f"{json.dumps(inspector_line(0, n, 5.0))}\n" for n in range(3000))
    bad.write_bytes(gzip.compress(lines.encode())[:kept])
    line = refused(shell(COLLECT, "import", job, "--out", "data", "--system", "box"), 3)
    assert "rank_1.log.gz" in line
    assert "of the others 0 measurements, 2 calls" in line
    assert store.read(tmp_path / "data", "calls").height == 2


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a job\n")
    with pytest.raises(OutputError, match="no trace of PyTorch's profiler or NCCL's Inspector"):
        read(tmp_path)


def test_dlrms_ranks_join_by_order_where_their_number_is_told(tmp_path: Path) -> None:
    whole = WHOLE / "traces" / "param_dlrm_kineto.tar.gz"
    excerpt = COPIES / "traces" / "param_dlrm_kineto_excerpt.tar.gz"
    job = unpacked(whole if whole.is_file() else excerpt, tmp_path)
    found = read(job, num_ranks=8)
    calls = pl.DataFrame(found.calls)
    assert calls["ranks_seen"].to_list() == [8] * 8
    assert calls["ranks_timed"].to_list() == [8] * 8
    reduced = calls.filter(pl.col("collective") == "AllReduce")
    assert reduced["size_bytes"].to_list() == [1_576_964, 448, 907_840]
    assert reduced["time_us"].to_list() == [86.0, 20.0, 69.0]
    assert found.steps["rank"].to_pylist() == [*range(8)]
    # Alone, nothing says how many ranks a group has.
    alone = calls_of(job)
    assert set(alone["collective"]) == {"AllReduce", "AlltoAll"}
    assert (alone["size_bytes"].null_count(), alone["num_ranks"].null_count()) == (0, 64)
