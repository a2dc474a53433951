"""Execution traces of PyTorch (1.0.1) and of Chakra's schema over it (1.1.0 on): no times.

What a rank called, with sizes, types and groups. Both hold a call as a node `record_param_comms`
(backends other than NCCL: `gloo:all_reduce`), whose inputs are tensors, number, group, root or
rank, name, split sizes and, from 1.0.3 on, first rank, stride and size of the group. Newer ones
name most of it in attributes too. Sources: torch/csrc/distributed/c10d/ParamCommsUtils.hpp in
pytorch/pytorch, train/comms/pt/commsTraceParser.py in facebookresearch/param.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dynamiccl.collect.reports import FileReport
from dynamiccl.collect.traces.files import TraceFile
from dynamiccl.collect.traces.json_stream import Damage, JsonStream
from dynamiccl.collect.traces.rank_call import RankCall, RankTrace
from dynamiccl.collect.traces.vocabulary import message_bytes, torch_collective, torch_type
from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.nccl import Collective

_PARAM_COMMS: Final = "record_param_comms"
_GROUPS: Final = "process_group:init"
_OTHER_BACKEND: Final = re.compile(r"(?:gloo|ucc|mpi|xccl|hccl):")
_TENSOR: Final = re.compile(r"Tensor\(([^)]*)\)")
_ROOTED: Final = frozenset(
    {Collective.Broadcast, Collective.Reduce, Collective.Gather, Collective.Scatter}
)


class _Node:
    """A node of either schema, by the same names."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.name = str(told.get("name", ""))
        inputs, outputs = told.get("inputs"), told.get("outputs")
        if isinstance(inputs, dict):
            self.inputs, self.types = _list(inputs.get("values")), _list(inputs.get("types"))
        else:
            self.inputs, self.types = _list(inputs), _list(told.get("input_types"))
        values = outputs.get("values") if isinstance(outputs, dict) else outputs
        self.outputs = _list(values)
        self.attributes = {
            each["name"]: each.get("value")
            for each in _list(told.get("attrs"))
            if isinstance(each, dict) and "name" in each
        }
        thread = self.attributes.get("tid", told.get("tid"))
        self.thread = thread if isinstance(thread, int) else 0


def read_execution_trace(trace: TraceFile, report: FileReport) -> RankTrace:
    """The calls of a trace, in its order; what does not decode is rejected in `report`, by line."""
    found = RankTrace()
    values: dict[str, Any] = {}
    nodes: list[_Node] = []
    groups: dict[str, tuple[int, ...]] = {}
    with trace.open() as stream:
        for item in JsonStream(stream, frozenset({"nodes"})):
            if isinstance(item, Damage):
                report.reject(item.line, item.reason, item.text)
            elif not item.is_item:
                values[item.key] = item.value
            elif isinstance(item.value, dict):
                node = _Node(item.value)
                if node.name == _PARAM_COMMS or _OTHER_BACKEND.match(node.name):
                    nodes.append(node)
                elif _GROUPS in node.name:
                    groups |= _groups(node.inputs, report)
    process = values.get("pid")
    found.process = process if isinstance(process, int) else None
    found.world_size = max((len(ranks) for ranks in groups.values()), default=None)
    told = [(node, _call(node, groups, trace.name)) for node in nodes]
    calls = [(node, call) for node, call in told if call is not None]
    _name_by_order(calls)
    ranks = {call.rank for _, call in calls if call.rank is not None}
    found.rank = ranks.pop() if len(ranks) == 1 else None
    for _, call in calls:
        call.rank = found.rank
    report.rows_read += len(calls)
    found.calls = [call for _, call in calls]
    return found


def _call(node: _Node, groups: Mapping[str, tuple[int, ...]], name: str) -> RankCall | None:
    if node.name != _PARAM_COMMS:
        return _other_backend(node, groups, name)
    # Calls without a tensor (`wait`) begin with their number.
    values = node.inputs if node.inputs and isinstance(node.inputs[0], list) else [[], *node.inputs]
    told = node.attributes.get("collective_name") or _at(values, 4)
    collective = torch_collective(str(told)) if isinstance(told, str) else None
    if collective is None:
        return None
    datatype = torch_type(str(node.attributes.get("dtype", ""))) or _one_type(node.types)
    elements = _elements(node.inputs[0]), _elements(node.outputs)
    group = _at(values, 2)
    group_name = str(group[0]) if isinstance(group, list) and group and group[0] else None
    ranks = groups.get(group_name) if group_name else None
    num_ranks = _group_size(node, values, ranks)
    root_or_rank, sequence = _at(values, 3), _at(values, 1)
    if isinstance(sequence, list):  # newer: number, and whether it is point-to-point
        sequence = sequence[0] if sequence else None
    call = RankCall(
        source=CallSource.EXECUTION_TRACE,
        source_file=name,
        group=_text(group),
        group_ranks=ranks,
        group_sequence=sequence if isinstance(sequence, int) else None,
        collective=collective.wire,
        size_bytes=message_bytes(collective, datatype, *elements),
        datatype=datatype,
        num_ranks=num_ranks,
        asks_tuner=None if collective.tunable and num_ranks != 1 else False,
        thread=node.thread,
    )
    if collective in _ROOTED:
        call.root = root_or_rank if isinstance(root_or_rank, int) else None
    elif isinstance(root_or_rank, int) and collective is not Collective.SendRecv:
        call.rank = root_or_rank if ranks is None else _at(ranks, root_or_rank)
    if group_name and call.group_sequence and collective is not Collective.SendRecv:
        call.key = (group_name, ranks, call.group_sequence, collective)
    return call


def _other_backend(
    node: _Node, groups: Mapping[str, tuple[int, ...]], name: str
) -> RankCall | None:
    """A call of Gloo or another backend, which names no group: the only one, if there is one."""
    collective = torch_collective(node.name)
    if collective is None:
        return None
    only = next(iter(groups.items())) if len(groups) == 1 else None
    datatype, elements = _one_type(node.types), _elements(node.inputs)
    output = elements * len(only[1]) if only and elements else None
    return RankCall(
        source=CallSource.EXECUTION_TRACE,
        source_file=name,
        group=only[0] if only else None,
        group_ranks=only[1] if only else None,
        collective=collective.wire,
        size_bytes=message_bytes(collective, datatype, elements, output),
        datatype=datatype,
        num_ranks=len(only[1]) if only else None,
        asks_tuner=False,
        thread=node.thread,
    )


def _name_by_order(calls: Sequence[tuple[_Node, RankCall]]) -> None:
    """Traces of 1.0.1 know a group by a pointer: where there is one alone, all calls are its."""
    pointers = {_at(node.inputs, 2) for node, _ in calls if isinstance(_at(node.inputs, 2), int)}
    if len(pointers) != 1:
        return
    sizes = {call.num_ranks for _, call in calls} - {None}
    for _, call in calls:
        # An all-to-all with one part for each rank says how many there are.
        call.num_ranks = next(iter(sizes)) if len(sizes) == 1 else call.num_ranks
        call.key = ("only group", call.group_sequence, call.collective)


def _groups(inputs: Sequence[Any], report: FileReport) -> dict[str, tuple[int, ...]]:
    """Name -> the job's ranks in it; an empty list stands for all."""
    try:
        told = json.loads(str(inputs[0])) if inputs else []
    except ValueError:
        report.remark("the list of process groups is cut off: their ranks are not known")
        return {}
    return {
        str(each.get("pg_name", "")): tuple(each.get("ranks") or range(int(each["group_size"])))
        for each in told
        if isinstance(each, dict) and isinstance(each.get("group_size"), int)
    }


def _group_size(node: _Node, values: Sequence[Any], ranks: tuple[int, ...] | None) -> int | None:
    told = node.attributes.get("pg_size") or _at(values, 9)
    if isinstance(told, int) and told > 0:
        return told
    if ranks is not None:
        return len(ranks)
    splits = _at(values, 5)
    return len(splits) if isinstance(splits, list) and splits else None


def _elements(value: Any) -> int | None:
    """Elements of all tensors in a value: [id, storage, offset, elements, bytes of one, device]."""
    if not isinstance(value, list):
        return None
    is_tensor = len(value) in {6, 7} and all(isinstance(each, int) for each in value[:5])
    if is_tensor and isinstance(value[5], str):
        return int(value[3])
    found = [n for each in value if (n := _elements(each)) is not None]
    return sum(found) if found else None


def _one_type(types: Sequence[Any]) -> str | None:
    found = {torch_type(each) for each in _TENSOR.findall(str(types[0] if types else ""))}
    return found.pop() if len(found) == 1 else None


def _text(group: Any) -> str | None:
    if not isinstance(group, list):
        return None
    return ":".join(str(each) for each in group if each not in {"", "undefined", None}) or None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if 0 <= place < len(values) else None
