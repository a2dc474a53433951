"""Execution traces of PyTorch (1.0.1) and Chakra (1.1.0 on): calls without times.

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
from dynamiccl.collect.traces.values import group_text, listed, mapping, ranks, text, whole
from dynamiccl.collect.traces.vocabulary import message_bytes, torch_collective, torch_type
from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.nccl import Collective

_PARAM_COMMS: Final = "record_param_comms"
_GROUPS: Final = "process_group:init"
_OTHER_BACKEND: Final = re.compile(r"(?:gloo|ucc|mpi|xccl|hccl):")
#: Of a group that lists none because it has all: more than any job has had.
_MOST_RANKS: Final = 1 << 20
_TENSOR: Final = re.compile(r"Tensor\(([^)]*)\)")
_ROOTED: Final = frozenset(
    {Collective.Broadcast, Collective.Reduce, Collective.Gather, Collective.Scatter}
)


class _Node:
    """A node of either format, with common names."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.name = str(told.get("name", ""))
        inputs, outputs = told.get("inputs"), told.get("outputs")
        if isinstance(inputs, dict):
            self.inputs, self.types = listed(inputs.get("values")), listed(inputs.get("types"))
        else:
            self.inputs, self.types = listed(inputs), listed(told.get("input_types"))
        self.outputs = listed(outputs.get("values") if isinstance(outputs, dict) else outputs)
        self.attributes = {
            str(each.get("name")): each.get("value")
            for each in map(mapping, listed(told.get("attrs")))
        }
        self.thread = whole(self.attributes.get("tid", told.get("tid"))) or 0


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
    found.process = whole(values.get("pid"))
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
    told = text(node.attributes.get("collective_name")) or text(_at(values, 4))
    collective = torch_collective(told) if told else None
    if collective is None:
        return None
    datatype = torch_type(str(node.attributes.get("dtype", ""))) or _one_type(node.types)
    elements = whole(_elements(values[0])), whole(_elements(node.outputs))
    group = listed(_at(values, 2))
    group_name = text(_at(group, 0))
    members = groups.get(group_name) if group_name else None
    num_ranks = _group_size(node, values, members)
    root_or_rank, sequence = whole(_at(values, 3)), _at(values, 1)
    if isinstance(sequence, list):  # newer: number, and whether it is point-to-point
        sequence = _at(sequence, 0)
    call = RankCall(
        source=CallSource.EXECUTION_TRACE,
        source_file=name,
        group=group_text(*group[:2]),
        group_ranks=members,
        group_sequence=whole(sequence),
        collective=collective.wire,
        size_bytes=message_bytes(collective, datatype, *elements),
        datatype=datatype,
        num_ranks=num_ranks,
        asks_tuner=None if collective.tunable and num_ranks != 1 else False,
        thread=node.thread,
    )
    if collective in _ROOTED:
        call.root = root_or_rank
    elif root_or_rank is not None and collective is not Collective.SendRecv:
        call.rank = root_or_rank if members is None else _at(members, root_or_rank)
    if group_name and call.group_sequence and collective is not Collective.SendRecv:
        call.key = (group_name, members, call.group_sequence, collective)
    return call


def _other_backend(
    node: _Node, groups: Mapping[str, tuple[int, ...]], name: str
) -> RankCall | None:
    """A call of Gloo or another backend, in the only group if there is exactly one."""
    collective = torch_collective(node.name)
    if collective is None:
        return None
    only = next(iter(groups.items())) if len(groups) == 1 else None
    datatype, elements = _one_type(node.types), whole(_elements(node.inputs))
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
    """Give the calls of a 1.0.1 trace, which has pointers, the name of its only group."""
    pointers = {whole(_at(node.inputs, 2)) for node, _ in calls} - {None}
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
        told = listed(json.loads(str(inputs[0]))) if inputs else []
    except (ValueError, RecursionError):
        report.remark("the list of process groups is cut off: their ranks are not known")
        return {}
    found = {}
    for each in map(mapping, told):
        size = whole(each.get("group_size"))
        if size and size < _MOST_RANKS:
            found[str(each.get("pg_name", ""))] = ranks(each.get("ranks")) or tuple(range(size))
    return found


def _group_size(node: _Node, values: Sequence[Any], members: tuple[int, ...] | None) -> int | None:
    told = whole(node.attributes.get("pg_size")) or whole(_at(values, 9))
    if told:
        return told
    if members is not None:
        return len(members)
    splits = _at(values, 5)
    return len(splits) if isinstance(splits, list) and splits else None


def _elements(value: Any) -> int | None:
    """Elements of all tensors in a value: [id, storage, offset, elements, bytes of one, device]."""
    if not isinstance(value, list):
        return None
    is_tensor = len(value) in {6, 7} and all(whole(each) is not None for each in value[:5])
    if is_tensor and isinstance(value[5], str):
        return whole(value[3])
    found = [n for each in value if (n := _elements(each)) is not None]
    return sum(found) if found else None


def _one_type(types: Sequence[Any]) -> str | None:
    found = {torch_type(each) for each in _TENSOR.findall(str(types[0] if types else ""))}
    return found.pop() if len(found) == 1 else None


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if 0 <= place < len(values) else None
