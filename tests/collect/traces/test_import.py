"""Traces of PyTorch's profiler and NCCL's Inspector: what is recognised, joined and told."""

import gzip
import json
import pickle
import shutil
import tarfile
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dynamiccl.datasets import store
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


def test_ranks_of_a_call_are_joined_and_the_least_is_its_time(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "a.log", *(inspector_line(0, n, 100.0 + n) for n in range(3)))
    cpu: dict[str, Any] = {"coll_timing_source": "collective_cpu"}
    lines = [inspector_line(1, n, 90.0, **(cpu if n else {})) for n in range(3)]
    two = write_lines(tmp_path / "b.log", *lines)
    calls = calls_of(one, two).sort("sequence")
    assert calls["time_us"].to_list() == [90.0] * 3
    assert calls["skew_us"].to_list() == [10.0, 11.0, 12.0]
    told = calls.select("source", "comm", "sequence", "num_ranks", "num_nodes", "ranks_per_node")
    assert told.row(0) == ("inspector", "007f8c496ae9f661", 0, 2, 1, 2)
    asked = calls.select("asks_tuner", "decided", "actual_algorithm", "timing_source")
    assert asked.row(0) == (True, None, None, "gpu")
    assert calls["timing_source"].to_list() == ["gpu", "cpu", "cpu"]


@pytest.mark.parametrize(
    ("algorithm", "ours"),
    [("NVLS_TREE", "NVLSTree"), ("TREE", "Tree"), ("HierarchicalDirect", None)],
)
def test_format_4_2_tells_algorithm_and_protocol_if_they_are_nccls(
    algorithm: str, ours: str | None, tmp_path: Path
) -> None:
    told: dict[str, Any] = {"coll_algo": algorithm, "coll_proto": "SIMPLE"}
    lines = [inspector_line(rank, 0, 5.0, version="v4.2", **told) for rank in (0, 1)]
    found = read(write_lines(tmp_path / "a.log", *lines))
    [call] = found.calls.to_pylist()
    assert (call["actual_algorithm"], call["actual_protocol"]) == (ours, "Simple")
    is_told = any("none of NCCL's" in each for each in found.reports[0].remarks)
    assert is_told == (ours is None)


@pytest.mark.parametrize(
    ("told", "time_us", "size_bytes"),
    [
        # NVIDIA's own examples (plugins/profiler/inspector/README.md): bandwidth is of the whole.
        (("ReduceScatter", 8, 2_147_483_648, 418.439467), 41_057, 8 * 2_147_483_648),
        (("ReduceScatter", 32, 65_536, 19.065018), 110, 32 * 65_536),
        (("AllGather", 8, 65_536, None), 110, 8 * 65_536),
        (("AllReduce", 8, 1 << 34, 277.2), 61_974, 1 << 34),
        # Some dumps told the whole; one in MB/s says nothing.
        (("AllGather", 4, 1 << 20, 10.48576), 100, 1 << 20),
        (("AllGather", 4, 1 << 20, 0.0419), 100, 4 << 20),
    ],
)
def test_a_part_of_one_rank_is_told_as_nccls_whole_buffer(
    told: tuple[str, int, int, float | None], time_us: int, size_bytes: int, tmp_path: Path
) -> None:
    coll, num_ranks, size, algobw = told
    line = inspector_line(0, 0, time_us, header={"n_ranks": num_ranks})
    line["coll_perf"] |= {"coll": coll, "coll_msg_size_bytes": size, "coll_algobw_gbs": algobw}
    assert calls_of(write_lines(tmp_path / "a.log", line))["size_bytes"].to_list() == [size_bytes]


def dump_of_4_3(records: int, *, announced: int, rank: int = 0) -> list[dict[str, Any]]:
    """A dump: its stats with the header, then bare records, a proxy's trace among them."""
    first = inspector_line(rank, 0, 5.0, version="v4.3")
    stats = {"coll_records": announced - 1, "p2p_records": 0, "proxy_records": 1}
    begin = {"header": first["header"], "metadata": first["metadata"], "dump_stats": stats}
    bare = [
        {"coll_perf": inspector_line(rank, n, 5.0 + n)["coll_perf"]} for n in range(records - 1)
    ]
    return [begin, *bare, {"proxy_trace": {"channel": 0}}]


def test_in_4_3_records_belong_to_the_header_of_their_dump(tmp_path: Path) -> None:
    lines = [*dump_of_4_3(4, announced=4), *dump_of_4_3(3, announced=3, rank=1)]
    calls = calls_of(write_lines(tmp_path / "a.log", *lines)).sort("sequence")
    assert calls["ranks_seen"].to_list() == [2, 2, 1]
    assert calls["time_us"].to_list() == [5.0, 6.0, None]


def test_a_dump_of_4_3_that_is_cut_off_is_named_with_file_and_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.log", *dump_of_4_3(3, announced=7))
    found = read(path)
    assert found.calls.num_rows == 2
    assert f"{path}:5: the dump before is cut off, 4 records early" in str(found.reports[0].failure)
    lines = [*dump_of_4_3(2, announced=5), *dump_of_4_3(2, announced=2, rank=1)]
    both = read(write_lines(tmp_path / "b.log", *lines))
    assert "b.log:4: the dump before is cut off, 3 records early" in str(both.reports[0].failure)
    assert both.calls["ranks_seen"].to_pylist() == [2]


def test_what_is_no_call_costs_itself_alone(tmp_path: Path) -> None:
    head = inspector_line(0, 0, 5.0, version="v4.1")["header"]
    stats = {"header": head, "dump_stats": {"coll_records": 1, "coll_dropped_total": 0}}
    path = write_lines(tmp_path / "a.log", stats, inspector_line(0, 0, 5.0, version="v4.1"))
    with path.open("a") as file:
        file.write('{"header": {"id": "0x1"\n' + json.dumps(inspector_line(1, 1, 4.0)) + "\n")
    found = read(path)
    assert found.calls["time_at_most_us"].to_pylist() == [5.0, 4.0]
    assert (found.calls["time_us"].null_count, sum(found.untimed.values())) == (2, 2)
    [rejected] = found.reports[0].rejected
    assert (rejected.line, rejected.reason) == (3, "no record that is known")


@pytest.mark.parametrize(
    ("header", "record"),
    [
        ({"n_ranks": 0}, {}),
        ({"n_ranks": 0}, {"coll": "AllGather"}),
        ({"rank": 2}, {}),
        ({"rank": -1}, {}),
        ({}, {"coll_msg_size_bytes": 0}),
        ({}, {"coll_msg_size_bytes": 1 << 62}),
        ({}, {"coll_msg_size_bytes": 1 << 61, "coll": "AllGather"}),
        ({}, {"coll": "AllToAllW"}),
    ],
)
def test_a_record_that_cannot_be_is_rejected_with_its_line(
    header: dict[str, Any], record: dict[str, Any], tmp_path: Path
) -> None:
    wrong = inspector_line(0, 0, 5.0, header=header, **record)
    good = inspector_line(0, 1 << 62, 6.0)
    with (tmp_path / "a.log").open("w") as file:
        file.write(f"{json.dumps(wrong)}\n\n{json.dumps(good)}\n")
    found = read(tmp_path / "a.log")
    # A number that no column holds is not known.
    [call] = found.calls.to_pylist()
    assert (call["time_at_most_us"], call["sequence"], call["num_ranks"]) == (6.0, None, 2)
    [rejected] = found.reports[0].rejected
    assert (rejected.line, "missing, not known or out of range" in rejected.reason) == (1, True)


def test_the_same_record_twice_is_one_and_numbers_are_of_a_communicator(tmp_path: Path) -> None:
    lines = [
        inspector_line(rank, 0, 5.0, header={"id": comm}, coll=coll)
        for rank in (0, 1, 1)
        for comm in ("0x1", "0x2")
        for coll in ("AllReduce", "AllGather")
    ]
    found = read(write_lines(tmp_path / "a.log", *lines))
    assert (found.calls.num_rows, found.reports[0].duplicates) == (4, 4)
