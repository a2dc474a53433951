"""Execution traces: what a rank called, and what they add to the profiler's trace of it."""

import json
from pathlib import Path
from typing import Any

from tests.collect.traces.made import Chrome, calls_of, read


def node(
    name: str, elements: int, number: int, *, group: str = "0", who: int = 0
) -> dict[str, Any]:
    """A call as Chakra's schema 1.1.0 has it."""
    tensor = [[1, 2, 0, elements, 4, "cuda:0"]]
    values = [[tensor], number, [group, "pg"], who, name, [], [], 0, 1, 2]
    told = {
        "collective_name": name,
        "dtype": "Float",
        "in_msg_nelems": elements,
        "pg_name": group,
        "pg_size": 2,
        "tid": 1,
    }
    return {
        "id": number,
        "name": "record_param_comms",
        "inputs": {"values": values, "types": ["GenericList[Tensor(float)]"]},
        "outputs": {"values": [tensor], "types": ["GenericList[Tensor(float)]"]},
        "attrs": [{"name": key, "value": value} for key, value in told.items()],
    }


def old_node(name: str, elements: int, number: int, splits: list[int], who: int) -> dict[str, Any]:
    """A call as schema 1.0.1 has it: the group is a pointer."""
    tensor = [1, 2, 0, elements, 4, "cuda:0"]
    inputs = [tensor, number, 94_594_108, who, name, splits, splits]
    told = {"name": "record_param_comms", "id": number, "tid": 1, "outputs": [tensor]}
    return {**told, "inputs": inputs, "input_types": ["Tensor(float)"]}


def groups(*told: tuple[str, list[int], int]) -> dict[str, Any]:
    listed = [{"pg_name": n, "ranks": r, "group_size": s, "group_count": 1} for n, r, s in told]
    values = [json.dumps(listed)]
    return {"id": 1, "name": "## process_group:init ##", "inputs": {"values": values}}


def write(path: Path, *nodes: dict[str, Any], schema: str = "1.1.0-chakra.0.0.4") -> Path:
    head = {"schema": schema, "pid": 7, "time": "2026-01-01 00:00:00", "start_ts": 1}
    path.write_text(json.dumps({**head, "nodes": [*nodes]}))
    return path


def test_ranks_are_joined_and_have_no_time(tmp_path: Path) -> None:
    init = groups(("0", [], 2))
    paths = [
        write(tmp_path / f"et{r}.json", init, node("allreduce", 10, 33, who=r)) for r in (0, 1)
    ]
    found = read(*paths)
    [call] = found.calls.to_pylist()
    told = ("source", "collective", "size_bytes", "group_ranks", "group_sequence", "ranks_seen")
    assert [call[name] for name in told] == ["execution-trace", "AllReduce", 40, [0, 1], 33, 2]
    assert (call["time_us"], call["time_at_most_us"], call["timestamp"]) == (None, None, None)
    assert found.untimed == {"no trace has their time": 1}


def test_root_is_told_and_waiting_is_no_call(tmp_path: Path) -> None:
    wait = {"name": "record_param_comms", "inputs": {"values": [33, ["", ""], 1, "wait", [], []]}}
    nodes = [groups(("0", [], 2)), node("broadcast", 8, 1, who=1), {**wait, "attrs": []}]
    [call] = calls_of(write(tmp_path / "et.json", *nodes)).to_dicts()
    assert (call["collective"], call["root"]) == ("Broadcast", 1)


def test_in_1_0_1_one_group_alone_has_as_many_ranks_as_an_all_to_all_has_parts(
    tmp_path: Path,
) -> None:
    paths = [
        write(
            tmp_path / f"et{rank}.json",
            old_node("all_to_allv", 8, 147, [4, 4], rank),
            old_node("allreduce", 100, 148, [], rank),
            schema="1.0.1",
        )
        for rank in (0, 1)
    ]
    calls = calls_of(*paths).sort("group_sequence")
    assert calls["num_ranks"].to_list() == [2, 2]
    assert calls["ranks_seen"].to_list() == [2, 2]
    assert calls["asks_tuner"].to_list() == [False, None]


def bare_chrome(*elements: int) -> Chrome:
    """The profiler's trace of the same process, without arguments but for its annotations."""
    chrome = Chrome()
    chrome.info |= {"pg_config": [], "pg_count": 0}
    chrome.step(1, 0.0, 10_000.0)
    for place, count in enumerate(elements):
        at = 1000.0 * place + 100
        chrome.event("cpu_op", "record_param_comms", at - 10, 8, **{"External id": place})
        shapes: dict[str, Any] = {"Input Dims": [[count]], "Input type": ["float"]}
        chrome.event("user_annotation", "nccl:all_reduce", at - 9, 6, **shapes)
        chrome.event("cuda_runtime", "cudaLaunchKernel", at - 8, 2, correlation=500 + place)
        name = "ncclKernel_AllReduce_RING_LL_Sum_float(args)"
        chrome.event("kernel", name, at, 20.0, 20, device=0, correlation=500 + place)
    return chrome


def test_it_adds_groups_to_the_profilers_calls_where_both_hold_the_same(tmp_path: Path) -> None:
    kineto = bare_chrome(10, 20).write(tmp_path / "kineto.json")
    nodes = [groups(("0", [], 2)), node("allreduce", 10, 5), node("allreduce", 20, 6)]
    calls = calls_of(kineto, write(tmp_path / "et.json", *nodes))
    assert calls["source"].to_list() == ["kineto", "kineto"]
    assert calls["size_bytes"].to_list() == [40, 80]
    assert calls["group_sequence"].to_list() == [5, 6]
    assert calls["num_ranks"].to_list() == [2, 2]


def test_it_adds_nothing_where_one_call_is_another(tmp_path: Path) -> None:
    kineto = bare_chrome(10, 20).write(tmp_path / "kineto.json")
    nodes = [groups(("0", [], 2)), node("allreduce", 10, 5), node("allreduce", 21, 6)]
    calls = calls_of(kineto, write(tmp_path / "et.json", *nodes))
    assert sorted(calls["source"]) == ["execution-trace"] * 2 + ["kineto"] * 2
    kineto_rows = calls.filter(calls["source"] == "kineto")
    assert kineto_rows["num_ranks"].to_list() == [None, None]
