"""Dumps of PyTorch's Flight Recorder, as pickles or as JSON (version_val 2.0 to 2.10).

A dump is one rank's ring buffer of the last collectives. It knows sizes, types, groups and order;
of times only `duration_ms`, and that with TORCH_NCCL_ENABLE_TIMING=1. `time_discovered_*` says when
the watchdog looked and is no time of the call. Source: torch/csrc/distributed/c10d/FlightRecorder*
in pytorch/pytorch.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from dynamiccl.collect.reports import FileReport
from dynamiccl.collect.traces.files import TraceFile
from dynamiccl.collect.traces.rank_call import GPU, RankCall, RankTrace
from dynamiccl.collect.traces.unpickler import loads_plain
from dynamiccl.collect.traces.values import elements, group_text, mapping, number, ranks, whole
from dynamiccl.collect.traces.vocabulary import message_bytes, torch_collective, torch_type
from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.errors import CorruptFile, UnknownName
from dynamiccl.nccl import Collective, NcclVersion

#: A dump does not say whose it is; its name does: `nccl_trace_rank_3` (torch's default), `trace_3`.
_RANK: Final = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle))?(?:\.gz)?$")
_COMPLETED: Final = "completed"
#: PyTorch's description of the group of the whole job.
_DEFAULT: Final = "default_pg"


def read_flight_recorder(trace: TraceFile, report: FileReport) -> RankTrace:
    """The calls of a dump; entries that cannot be are rejected by `record_id`.

    Raises CorruptFile for a dump that is damaged, or a pickle of more than plain values.
    """
    dump = _dump(trace)
    groups = {
        str(name): ranks(mapping(group).get("ranks"))
        for name, group in mapping(dump.get("pg_config")).items()
    }
    world = max((len(each) for each in groups.values() if each), default=None)
    found = RankTrace(rank=_rank(trace, world), world_size=world)
    if found.rank is None:
        report.remark("whose dump it is stands in its name only (..._<rank>), which has no rank")
    facts = _facts(dump)
    seen: Counter[tuple[Any, ...]] = Counter()
    entries = dump.get("entries")
    for place, entry in enumerate(entries if isinstance(entries, list) else (), 1):
        if not isinstance(entry, dict):
            report.reject(place, "an entry that is no record", str(entry))
            continue
        report.rows_read += 1
        call = _call(entry, found, groups, report)
        if call is None:
            continue
        call.source_file, call.facts = trace.name, facts
        # Calls that one group of PyTorch's holds together share a number.
        number = (call.group, call.group_sequence, call.collective)
        if call.collective != Collective.SendRecv.wire and call.group_sequence is not None:
            call.key = (*number, call.group_ranks, seen[number])
        seen[number] += 1
        found.calls.append(call)
    return found


def _rank(trace: TraceFile, world: int | None) -> int | None:
    named = _RANK.search(trace.member or trace.path.name)
    rank = int(named[1]) if named else None
    # A date or a process's number is no rank.
    return None if rank is None or (world is not None and rank >= world) else rank


def _dump(trace: TraceFile) -> Mapping[str, Any]:
    with trace.open() as stream:
        data = stream.read()
    if data[:1] == b"\x80":
        dump = loads_plain(data, where=trace.name)
    else:
        try:
            dump = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CorruptFile(f"{trace.name} is no whole JSON: {error}; copy it again") from error
    if not isinstance(dump, dict) or not isinstance(dump.get("entries", []), list):
        raise CorruptFile(f"{trace.name} holds no Flight Recorder's dump: no list of entries")
    return dump


def _call(
    entry: Mapping[str, Any],
    trace: RankTrace,
    groups: Mapping[str, tuple[int, ...] | None],
    report: FileReport,
) -> RankCall | None:
    name = str(entry.get("profiling_name", ""))
    collective = torch_collective(name)
    if collective is None:
        report.drop(f"no message: {name.rpartition(':')[2] or 'without a name'}")
        return None
    datatype = _datatype(entry.get("input_dtypes")) or _datatype(entry.get("output_dtypes"))
    size = message_bytes(
        collective,
        datatype,
        elements(entry.get("input_sizes")),
        elements(entry.get("output_sizes")),
    )
    group = entry.get("process_group")
    pair = list(group) if isinstance(group, list | tuple) else []
    group_name = str(pair[0]) if pair else None
    members = groups.get(group_name) if group_name is not None else None
    if members is None and _DEFAULT in pair:
        # Gloo lists the group of the whole job without the name that its calls have.
        members = groups.get("")
    is_p2p = bool(entry.get("is_p2p")) or collective is Collective.SendRecv
    sequence = entry.get("p2p_seq_id" if is_p2p else "collective_seq_id")
    is_nccl = name.startswith("nccl:")
    asks = (
        None
        if is_nccl and collective.tunable and not is_p2p and len(members or "ab") > 1
        else False
    )
    time_us = _time_us(entry)
    return RankCall(
        source=CallSource.FLIGHT_RECORDER,
        source_file="",
        rank=trace.rank,
        group=group_text(*pair[:2]),
        group_ranks=members,
        group_sequence=whole(sequence),
        timestamp_us=_created_us(entry),
        collective=collective.wire,
        size_bytes=size,
        datatype=datatype,
        num_ranks=None if members is None else len(members),
        asks_tuner=asks,
        time_us=time_us,
        timing_source=None if time_us is None else GPU,
    )


def _datatype(told: object) -> str | None:
    """The one type of all tensors; None where they have several."""
    types = {torch_type(str(each)) for each in told} if isinstance(told, list) else set()
    return types.pop() if len(types) == 1 else None


def _time_us(entry: Mapping[str, Any]) -> float | None:
    duration_ms = number(entry.get("duration_ms"))
    if entry.get("state") != _COMPLETED or duration_ms is None or duration_ms <= 0:
        return None
    return duration_ms * 1e3


def _created_us(entry: Mapping[str, Any]) -> float | None:
    created_ns = whole(entry.get("time_created_ns"))
    return created_ns / 1e3 if created_ns else None


def _facts(dump: Mapping[str, Any]) -> dict[str, Any]:
    version = dump.get("nccl_version") or dump.get("comm_lib_version")
    try:
        return {} if version is None else {"nccl_version": str(NcclVersion.parse(str(version)))}
    except UnknownName:
        return {}
