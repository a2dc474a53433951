"""Chrome traces of PyTorch's profiler: arguments, sizes, steps, and what a kernel's name says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect.traces import comm_kernel
from dynamiccl.errors import CorruptFile
from tests.collect.parsed import INPUTS
from tests.collect.traces.made import Chrome, calls_of, read

_NAME = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def one_call(
    tmp_path: Path,
    kernel: str = _NAME,
    told: Mapping[str, Any] | None = None,
    *,
    own: bool = False,
) -> dict[str, Any]:
    chrome = Chrome()
    chrome.collective(100.0, 50.0, kernel, own=own, told=told)
    # Around the launch, too, and says nothing of it.
    other: dict[str, Any] = {"Collective name": "barrier", "Seq": 7}
    chrome.event("cpu_op", "aten::copy_", 91.0, 5.0, **other)
    [call] = calls_of(chrome.write(tmp_path / "trace.json")).to_dicts()
    return call


@pytest.mark.parametrize("own", [False, True])
def test_a_kernel_has_its_own_arguments_or_those_of_what_launched_it(
    own: bool, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize(
    ("name", "kernel", "elements", "size_bytes"),
    [
        ("_allgather_base", "ncclDevKernel_AllGather_RING_LL(args)", (10, 80), 320),
        ("_reduce_scatter_base", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL()", (80, 10), 320),
        ("broadcast", "ncclDevKernel_Broadcast_RING_LL(args)", (10, 10), 40),
        ("all_to_allv", "ncclDevKernel_SendRecv(args)", (80, 72), 320),
        # A collective that runs as another has no size.
        ("allgather", "ncclDevKernel_Broadcast_RING_LL(args)", (10, 80), None),
    ],
)
def test_sizes_are_nccls_of_the_whole_buffer(
    name: str, kernel: str, elements: tuple[int, int], size_bytes: int | None, tmp_path: Path
) -> None:
    sent = {"In msg nelems": elements[0], "Out msg nelems": elements[1]}
    told = {"Collective name": name, **sent}
    assert one_call(tmp_path, kernel, told)["size_bytes"] == size_bytes


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_ranks_are_joined_by_pytorchs_number(suffix: str, tmp_path: Path) -> None:
    paths = []
    for rank, slow in ((0, 90.0), (1, 0.0)):
        chrome = Chrome(rank)
        # One rank's trace begins a call earlier, and the other waits.
        for number in range(rank, 4):
            chrome.collective(1000.0 * number + 100, 20.0 + slow, told={"Seq": number + 1})
        paths.append(chrome.write(tmp_path / f"rank{rank}.{suffix}"))
    calls = calls_of(*paths)
    assert calls["group_sequence"].to_list() == [1, 2, 3, 4]
    assert calls["ranks_seen"].to_list() == [1, 2, 2, 2]
    assert calls["time_us"].to_list() == [None, 20.0, 20.0, 20.0]
    assert calls["skew_us"].to_list() == [None, 90.0, 90.0, 90.0]


@pytest.mark.parametrize(("last", "is_joined"), [("AllGather", True), ("AllReduce", False)])
def test_without_numbers_ranks_are_joined_by_order_in_steps_that_are_alike(
    last: str, is_joined: bool, tmp_path: Path
) -> None:
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
    assert calls["time_us"].to_list() == ([20.0, 20.0] if is_joined else [None] * 4)
    assert set(calls["step"]) == {3}


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
}


def ratios(chrome: Chrome, folder: Path) -> list[float]:
    return [float(r) for r in calls_of(chrome.write(folder / "trace.json"))["compute_ratio"]]


@pytest.mark.parametrize("case", RATIOS)
def test_compute_beside_calls(case: str, tmp_path: Path) -> None:
    compute, calls, expected = RATIOS[case]
    chrome = Chrome()
    for start, length in compute:
        chrome.compute(start, length)
    for start, length in calls:
        chrome.collective(start, length)
    assert ratios(chrome, tmp_path) == pytest.approx(expected, abs=0.002)


def test_the_last_calls_of_a_step_have_no_compute_but_that_beside_them(tmp_path: Path) -> None:
    """A bucket ends 10 us before the backward pass, and the optimizer that wants it follows."""
    chrome = Chrome()
    for step in range(2):
        begin = 10_000.0 * step
        chrome.step(step, begin, 10_000.0)
        chrome.compute(begin, 1_000.0)
        chrome.compute(begin + 1_000.0, 3_000.0)
        chrome.collective(begin + 100.0, 200.0)
        chrome.collective(begin + 500.0, 490.0)
    assert ratios(chrome, tmp_path) == pytest.approx([400 / 200, 1.0] * 2)


def test_a_trace_without_steps_is_one(tmp_path: Path) -> None:
    chrome = Chrome()
    chrome.compute(100.0, 50.0)
    # Compute of another GPU hides nothing.
    chrome.event("kernel", "gemm", 190.0, 60.0, device=1, correlation=-5)
    chrome.collective(200.0, 50.0)
    found = read(chrome.write(tmp_path / "trace.json"))
    [step] = found.steps.to_pylist()
    assert (step["step"], step["step_us"], step["idle_us"]) == (0, 150.0, 40.0)
    assert found.calls["step"].to_pylist() == [0]
    assert found.calls["exposed_us"].to_pylist() == [50.0]


@pytest.mark.parametrize(("name", "collective", "asks"), INPUTS["kernels"])
def test_a_kernel_says_what_it_does_and_whether_nccl_asked_a_tuner(
    name: str, collective: str, asks: object
) -> None:
    kind = comm_kernel(name)
    assert kind is not None
    assert kind[1] == (None if asks == "-" else asks)
    assert ("-" if kind[0] is None else kind[0].wire) == collective


def test_one_rank_alone_asks_no_tuner_and_a_shortened_list_is_taken_from_the_groups(
    tmp_path: Path,
) -> None:
    for world, asks in ((1, False), (64, True)):
        chrome = Chrome(world=world)
        chrome.collective(100.0, 5.0, told={"Process Group Ranks": "[0, 1, 2, ..., 63]"})
        [call] = calls_of(chrome.write(tmp_path / "t.json")).to_dicts()
        assert (call["asks_tuner"], call["group_ranks"]) == (asks, [*range(world)])


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


def test_nodes_that_the_caller_knows_hold_for_groups_of_the_whole_job(tmp_path: Path) -> None:
    chrome = Chrome(world=4)
    chrome.collective(100.0, 5.0)
    told = {"Group size": 2, "Process Group Name": "7", "Process Group Ranks": "[0, 2]"}
    chrome.collective(200.0, 5.0, told=told)
    path = chrome.write(tmp_path / "t.json")
    assert calls_of(path, num_nodes=2)["num_nodes"].to_list() == [2, None]
    assert calls_of(path, num_nodes=1)["num_nodes"].to_list() == [1, 1]
