"""Traces of PyTorch's profiler and NCCL's Inspector: what is recognised, joined and told."""

import gzip
import json
import pickle
import shutil
import tarfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dynamiccl.collect.traces import comm_kernel
from dynamiccl.datasets import store
from dynamiccl.errors import CorruptFile
from tests.cli.conftest import Shell, refused, shell_fixture
from tests.collect.parsed import INPUTS
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
    (job / "deep").mkdir()
    kineto(job / "rank1.json.gz", 1)
    write_lines(job / "inspector.log", *(inspector_line(rank, 0, 9.0) for rank in (0, 1)))
    (job / "nccl_trace_rank_0").write_bytes(RECORDER_DUMP)
    shutil.copy(EXECUTION_TRACE, job / "deep" / "et.json.gz")
    (job / "notes.txt").write_text("a job\n")
    (job / "systems.toml").write_text("[systems.box]\nnic_gbits_per_s = 400\n")
    return job


def test_a_directory_of_all_kinds_is_one_import(job: Path, shell: Shell, tmp_path: Path) -> None:
    # Twice gives the same parts.
    for _ in range(2):
        known = ("--system", "box", "--systems", job / "systems.toml")
        done = shell(COLLECT, "import", job, "--out", "data", *known)
        assert done.code == 0, done.err
        assert "systems.toml" not in done.err
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
def test_one_bad_trace_costs_itself(kept: int, job: Path, shell: Shell, tmp_path: Path) -> None:
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


def test_the_least_of_the_ranks_is_the_time(tmp_path: Path) -> None:
    """The rest of a call: tests/golden/data/logs-inspector.json."""
    cpu: dict[str, Any] = {"coll_timing_source": "collective_cpu"}
    lines = (inspector_line(0, 0, 100.0), inspector_line(1, 0, 90.0, **cpu))
    [call] = calls_of(write_lines(tmp_path / "a.log", *lines)).to_dicts()
    assert (call["time_us"], call["skew_us"], call["timing_source"]) == (90.0, 10.0, "cpu")


def test_format_4_2_tells_algorithm_and_protocol(tmp_path: Path) -> None:
    names = (("NVLS_TREE", "NVLSTree"), ("TREE", "Tree"), ("HierarchicalDirect", None))
    for algorithm, ours in names:
        told: dict[str, Any] = {"coll_algo": algorithm, "coll_proto": "SIMPLE"}
        lines = [inspector_line(rank, 0, 5.0, version="v4.2", **told) for rank in (0, 1)]
        found = read(write_lines(tmp_path / "a.log", *lines))
        [call] = found.calls.to_pylist()
        assert (call["actual_algorithm"], call["actual_protocol"]) == (ours, "Simple")
        is_told = any("none of NCCL's" in each for each in found.reports[0].remarks)
        assert is_told == (ours is None)


def test_a_part_of_one_rank_is_told_as_nccls_whole_buffer(tmp_path: Path) -> None:
    for coll, num_ranks, size, algobw, time_us, whole in (
        # NVIDIA's own examples (plugins/profiler/inspector/README.md): bandwidth is of the whole.
        ("ReduceScatter", 8, 2_147_483_648, 418.439467, 41_057, 8 * 2_147_483_648),
        ("ReduceScatter", 32, 65_536, 19.065018, 110, 32 * 65_536),
        ("AllGather", 8, 65_536, None, 110, 8 * 65_536),
        ("AllReduce", 8, 1 << 34, 277.2, 61_974, 1 << 34),
        # Some dumps told the whole; one in MB/s says nothing.
        ("AllGather", 4, 1 << 20, 10.48576, 100, 1 << 20),
        ("AllGather", 4, 1 << 20, 0.0419, 100, 4 << 20),
    ):
        line = inspector_line(0, 0, time_us, header={"n_ranks": num_ranks})
        line["coll_perf"] |= {"coll": coll, "coll_msg_size_bytes": size, "coll_algobw_gbs": algobw}
        assert calls_of(write_lines(tmp_path / "a.log", line))["size_bytes"].to_list() == [whole]


def dump_of_4_3(records: int, *, announced: int, rank: int = 0) -> list[dict[str, Any]]:
    """A dump: its stats with the header, then bare records, a proxy's trace among them."""
    first = inspector_line(rank, 0, 5.0, version="v4.3")
    stats = {"coll_records": announced - 1, "p2p_records": 0, "proxy_records": 1}
    begin = {"header": first["header"], "metadata": first["metadata"], "dump_stats": stats}
    bare = [
        {"coll_perf": inspector_line(rank, n, 5.0 + n)["coll_perf"]} for n in range(records - 1)
    ]
    return [begin, *bare, {"proxy_trace": {"channel": 0}}]


def test_records_of_4_3_belong_to_their_dump(tmp_path: Path) -> None:
    alone = dump_of_4_3(3, announced=7)
    behind = [*dump_of_4_3(2, announced=5), *dump_of_4_3(2, announced=2, rank=1)]
    for lines, seen, said in ((alone, [1, 1], "5: {}, 4"), (behind, [2], "4: {}, 3")):
        found = read(write_lines(tmp_path / "a.log", *lines))
        assert found.calls["ranks_seen"].to_pylist() == seen
        told = f"a.log:{said.format('the dump before is cut off')} records early"
        assert told in str(found.reports[0].failure)
    lines = [*dump_of_4_3(4, announced=4), *dump_of_4_3(3, announced=3, rank=1)]
    calls = calls_of(write_lines(tmp_path / "a.log", *lines)).sort("sequence")
    assert calls["ranks_seen"].to_list() == [2, 2, 1]
    assert calls["time_us"].to_list() == [5.0, 6.0, None]


def test_what_is_no_call_costs_itself_alone(tmp_path: Path) -> None:
    head = inspector_line(0, 0, 5.0, version="v4.1")["header"]
    stats = {"header": head, "dump_stats": {"coll_records": 1, "coll_dropped_total": 0}}
    path = write_lines(tmp_path / "a.log", stats, inspector_line(0, 0, 5.0, version="v4.1"))
    with path.open("a") as file:
        file.write('\n{"header": {"id": "0x1"\n' + json.dumps(inspector_line(1, 1, 4.0)) + "\n")
    found = read(path)
    assert found.calls["time_at_most_us"].to_pylist() == [5.0, 4.0]
    assert (found.calls["time_us"].null_count, sum(found.untimed.values())) == (2, 2)
    [rejected] = found.reports[0].rejected
    assert (rejected.line, rejected.reason) == (4, "no record that is known")


def test_records_that_cannot_be_are_rejected_with_their_lines(tmp_path: Path) -> None:
    wrong: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"n_ranks": 0}, {}),
        ({"n_ranks": 0}, {"coll": "AllGather"}),
        ({"rank": 2}, {}),
        ({"rank": -1}, {}),
        ({}, {"coll_msg_size_bytes": 0}),
        ({}, {"coll_msg_size_bytes": 1 << 62}),
        ({}, {"coll_msg_size_bytes": 1 << 61, "coll": "AllGather"}),
        ({}, {"coll": "AllToAllW"}),
    )
    lines = [inspector_line(0, 0, 5.0, header=header, **record) for header, record in wrong]
    found = read(write_lines(tmp_path / "a.log", *lines, inspector_line(0, 1 << 62, 6.0)))
    # A number that no column holds is not known.
    [call] = found.calls.to_pylist()
    assert (call["time_at_most_us"], call["sequence"], call["num_ranks"]) == (6.0, None, 2)
    report = found.reports[0]
    assert (report.num_rejected, [each.line for each in report.rejected]) == (8, [1, 2, 3, 4, 5])
    assert all("missing, not known or out of range" in each.reason for each in report.rejected)


def test_numbers_are_of_a_communicator(tmp_path: Path) -> None:
    each = product((0, 1, 1), ("0x1", "0x2"), ("AllReduce", "AllGather"))
    lines = [inspector_line(rank, 0, 5.0, header={"id": c}, coll=coll) for rank, c, coll in each]
    found = read(write_lines(tmp_path / "a.log", *lines))
    assert (found.calls.num_rows, found.reports[0].duplicates) == (4, 4)


_NAME = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def one_call(
    tmp_path: Path, kernel: str = _NAME, told: Mapping[str, Any] | None = None, *, own: bool = False
) -> dict[str, Any]:
    chrome = Chrome()
    chrome.collective(100.0, 50.0, kernel, own=own, told=told)
    # Around the launch, too, and says nothing of it.
    other: dict[str, Any] = {"Collective name": "barrier", "Seq": 7}
    chrome.event("cpu_op", "aten::copy_", 91.0, 5.0, **other)
    [call] = calls_of(chrome.write(tmp_path / "trace.json")).to_dicts()
    return call


@pytest.mark.parametrize("own", [False, True])
def test_a_kernel_has_its_own_arguments_or_its_launchs(own: bool, tmp_path: Path) -> None:
    call = one_call(tmp_path, own=own)
    told = ("collective", "size_bytes", "datatype", "actual_num_channels", "num_threads")
    assert [call[name] for name in told] == ["AllReduce", 4000, "float", 8, 544]
    assert (call["group"], call["group_ranks"], call["num_ranks"]) == ("0:default_pg", [0, 1], 2)
    assert (call["time_at_most_us"], call["timing_source"]) == (50.0, "gpu")
    assert call["group_sequence"] is None
    assert (call["gpu"], call["nccl_version"]) == ("H100", "2.27.5")
    # The trace's base and 100 us.
    assert call["timestamp"].timestamp() == pytest.approx(1_700_000_000.0001)
    # The kernel's name is no algorithm.
    unknown = ("actual_algorithm", "actual_protocol", "decided", "num_nodes", "comm", "replay")
    assert [call[name] for name in unknown] == [None] * 6


def test_sizes_are_nccls_of_the_whole_buffer(tmp_path: Path) -> None:
    for name, kernel, sent, received, size_bytes in (
        ("_allgather_base", "ncclDevKernel_AllGather_RING_LL(args)", 10, 80, 320),
        ("_reduce_scatter_base", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL()", 80, 10, 320),
        ("broadcast", "ncclDevKernel_Broadcast_RING_LL(args)", 10, 10, 40),
        ("all_to_allv", "ncclDevKernel_SendRecv(args)", 80, 72, 320),
        # A collective that runs as another has no size.
        ("allgather", "ncclDevKernel_Broadcast_RING_LL(args)", 10, 80, None),
    ):
        told = {"Collective name": name, "In msg nelems": sent, "Out msg nelems": received}
        assert one_call(tmp_path, kernel, told)["size_bytes"] == size_bytes


def test_ranks_are_joined_by_pytorchs_number(tmp_path: Path) -> None:
    paths = []
    for rank, slow in ((0, 90.0), (1, 0.0)):
        chrome = Chrome(rank)
        # One rank's trace begins a call earlier, and the other waits.
        for number in range(rank, 4):
            chrome.collective(1000.0 * number + 100, 20.0 + slow, told={"Seq": number + 1})
        paths.append(chrome.write(tmp_path / f"rank{rank}.json{'.gz' * rank}"))
    calls = calls_of(*paths)
    assert calls["group_sequence"].to_list() == [1, 2, 3, 4]
    assert calls["ranks_seen"].to_list() == [1, 2, 2, 2]
    assert calls["time_us"].to_list() == [None, 20.0, 20.0, 20.0]
    assert calls["skew_us"].to_list() == [None, 90.0, 90.0, 90.0]


def test_without_numbers_ranks_are_joined_by_order(tmp_path: Path) -> None:
    for last, times in (("AllGather", [20.0, 20.0]), ("AllReduce", [None] * 4)):
        paths = []
        for rank, names in enumerate((["AllReduce", "AllGather"], ["AllReduce", last])):
            chrome = Chrome(rank)
            chrome.step(3, 0.0, 10_000.0)
            for place, name in enumerate(names):
                kernel = f"ncclDevKernel_{name}_RING_LL(args)"
                told = {"Collective name": name.lower()}
                chrome.collective(1000.0 * place + 100, 20.0 + rank, kernel, told=told)
            paths.append(chrome.write(tmp_path / f"rank{rank}.json"))
        calls = calls_of(*paths)
        assert (calls["time_us"].to_list(), set(calls["step"])) == (times, {3})


def test_steps_tell_what_covers_communication(tmp_path: Path) -> None:
    chrome = Chrome()
    chrome.step(5, 0.0, 1000.0)
    chrome.step(6, 1000.0, 1000.0)
    chrome.compute(0.0, 300.0)
    chrome.compute(200.0, 300.0, stream=8)  # both streams: 500 in all
    chrome.collective(400.0, 200.0)  # 100 under compute, 100 not
    chrome.compute(1900.0, 200.0)  # runs on behind the last step
    found = read(chrome.write(tmp_path / "trace.json"))
    names = ("step_us", "compute_us", "communication_us", "exposed_us", "idle_us")
    steps = [[row[name] for name in names] for row in found.steps.to_pylist()]
    assert steps == [[1000.0, 500.0, 200.0, 100.0, 400.0], [1000.0, 100.0, 0.0, 0.0, 900.0]]
    assert found.steps["step"].to_pylist() == [5, 6]
    assert found.calls["exposed_us"].to_pylist() == [100.0]
    assert found.calls["compute_ratio"].to_pylist() == [0.5]  # 100 of compute from its begin on
    # Without steps it is one.
    chrome = Chrome()
    chrome.compute(100.0, 50.0)
    # Compute of another GPU hides nothing.
    chrome.event("kernel", "gemm", 190.0, 60.0, device=1, correlation=-5)
    chrome.collective(200.0, 50.0)
    found = read(chrome.write(tmp_path / "trace.json"))
    [step], [call] = found.steps.to_pylist(), found.calls.to_pylist()
    assert (step["step"], step["step_us"], step["idle_us"]) == (0, 150.0, 40.0)
    assert (call["step"], call["exposed_us"]) == (0, 50.0)


STEPPED = "the last calls of a step have no compute but that beside them"
#: Where compute and calls begin, and how long each takes; what of compute a call has beside it.
RATIOS: dict[str, tuple[list[tuple[float, float]], list[tuple[float, float]], list[float]]] = {
    # Kernels that follow each other, a pause of the host's, and one in which compute waits, at
    # 1400: of the call that it waits for nothing, and the last one has what runs beside it.
    "calls that follow each other share the compute until it waits": (
        [(0, 490), (500, 300), (900, 500), (2000, 500)],
        [(200, 100), (310, 100), (1100, 100), (1300, 100), (2100, 100), (1405, 500)],
        [900 / 200] * 2 + [200 / 100, 100 / 600, 0.0, 100 / 100],
    ),
    # Decode: an all-reduce of 12 us after 60 us of compute, which nothing hides.
    "a short call that compute waits for is not taken for a pause": (
        [(100 * step, 60) for step in range(20)],
        [(100 * step + 61, 12) for step in range(20)],
        [0.0] * 20,
    ),
    "a call that ends in a pause is waited for, however short the pause": (
        [(0, 985), (1001, 4000)],
        [(0, 1000), (3000, 100)],
        [0.985, 1.0],
    ),
    "the last bucket behind the backward pass is exposed": (
        [(0, 10_000), (10_500, 100)],
        [(1000 * bucket, 500) for bucket in range(1, 11)],
        [2.0] * 9 + [0.0],
    ),
    "beside calls without compute there is none": ([], [(100, 100)], [0.0]),
    # A bucket ends 10 us before the backward pass, and the optimizer that wants it follows.
    STEPPED: (
        [(0, 1000), (1000, 3000), (10_000, 1000), (11_000, 3000)],
        [(100, 200), (500, 490), (10_100, 200), (10_500, 490)],
        [400 / 200, 1.0] * 2,
    ),
}


@pytest.mark.parametrize("case", RATIOS)
def test_compute_beside_calls(case: str, tmp_path: Path) -> None:
    compute, calls, expected = RATIOS[case]
    chrome = Chrome()
    for number in range(2 if case == STEPPED else 0):
        chrome.step(number, 10_000.0 * number, 10_000.0)
    for start, length in compute:
        chrome.compute(start, length)
    for start, length in calls:
        chrome.collective(start, length)
    found = calls_of(chrome.write(tmp_path / "trace.json"))["compute_ratio"].to_list()
    assert found == pytest.approx(expected, abs=0.002)


@pytest.mark.parametrize(("name", "collective", "asks"), INPUTS["kernels"])
def test_a_kernel_says_what_it_does(name: str, collective: str, asks: object) -> None:
    kind = comm_kernel(name)
    assert kind is not None
    assert kind[1] == (None if asks == "-" else asks)
    assert ("-" if kind[0] is None else kind[0].wire) == collective


def test_one_rank_asks_no_tuner(tmp_path: Path) -> None:
    for world, asks in ((1, False), (64, True)):
        chrome = Chrome(world=world)
        chrome.collective(100.0, 5.0, told={"Process Group Ranks": "[0, 1, 2, ..., 63]"})
        [call] = calls_of(chrome.write(tmp_path / "t.json")).to_dicts()
        assert (call["asks_tuner"], call["group_ranks"]) == (asks, [*range(world)])
    # Nodes that the caller knows hold for groups of the whole job.
    chrome = Chrome(world=4)
    chrome.collective(100.0, 5.0)
    told = {"Group size": 2, "Process Group Name": "7", "Process Group Ranks": "[0, 2]"}
    chrome.collective(200.0, 5.0, told=told)
    path = chrome.write(tmp_path / "t.json")
    assert calls_of(path, num_nodes=2)["num_nodes"].to_list() == [2, None]
    assert calls_of(path, num_nodes=1)["num_nodes"].to_list() == [1, 1]


def test_a_damaged_trace_is_refused_with_the_line(tmp_path: Path) -> None:
    chrome = Chrome()
    chrome.collective(20.0, 5.0)
    chrome.event("kernel", "broken", 0.0, 5.0)
    path = chrome.write(tmp_path / "t.json")
    assert read(path).steps["compute_us"].to_pylist() == [5.0]
    text = path.read_text()
    line = text.count("\n", 0, text.index('"broken"')) + 1
    for damaged in (text.replace('"broken"', '"bro"ken"'), text[: text.index('"broken"') + 4]):
        path.write_text(damaged)
        with pytest.raises(CorruptFile, match=rf"t\.json is damaged, .* line {line} .*; copy"):
            read(path)
