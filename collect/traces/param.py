"""Writes recorded calls as PARAM's basic communication trace, for `comm_replay`.

The format is that of `_parseBasicTrace` in facebookresearch/param (train/comms/pt): a list of calls
with sizes in elements, one for all ranks (`--use-one-trace`). A process group is made by an `init`
before the first call.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import polars as pl

from dynamiccl.collect.traces.vocabulary import TYPE_BYTES
from dynamiccl.nccl import Collective

#: PARAM's names (comms_utils.paramToCommName).
_NAMES: Final = {
    Collective.AllReduce: "all_reduce",
    Collective.AllGather: "all_gather_base",
    Collective.ReduceScatter: "reduce_scatter_base",
    Collective.Broadcast: "broadcast",
    Collective.Reduce: "reduce",
    Collective.AlltoAll: "all_to_allv",
}
#: PARAM's element types (tensorDtypeMap); it has none for the others.
_TYPES: Final = {
    "int8": "char",
    "uint8": "byte",
    "int32": "int",
    "int64": "long",
    "half": "half",
    "bfloat16": "bfloat16",
    "float": "float",
    "double": "double",
}


@dataclass(slots=True)
class ParamTrace:
    """A trace to be written as JSON."""

    #: `init` of each group and the calls, in order.
    entries: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0
    #: Why calls are left out -> calls.
    left_out: Counter[str] = field(default_factory=Counter)


def param_trace(calls: pl.DataFrame) -> ParamTrace:
    """The calls of one run as a trace; `calls` has the columns of the table `calls`.

    Left out is what PARAM cannot play or what the recording does not tell.
    """
    found = ParamTrace()
    ordered = calls.sort("timestamp", nulls_last=True, maintain_order=True)
    begun = ordered["timestamp"].min()
    world = ordered["num_ranks"].max()
    groups: dict[tuple[int, ...], int] = {}
    bodies: list[dict[str, Any]] = []
    for row in ordered.iter_rows(named=True):
        reason, entry = _entry(row)
        if entry is None:
            found.left_out[reason] += 1
            continue
        ranks = tuple(row["group_ranks"] or ())
        if ranks:
            entry |= {
                "pg_id": groups.setdefault(ranks, len(groups)),
                "global_ranks": list(ranks),
            }
        elif row["num_ranks"] != world:
            found.left_out["a group of unknown ranks of the job"] += 1
            continue
        entry["req"] = len(bodies)
        if row["timestamp"] is not None and begun is not None:
            entry["startTime_ns"] = round((row["timestamp"] - begun).total_seconds() * 1e9)
        bodies.append(entry)
    inits = [
        {"comms": "init", "pg_id": number, "global_ranks": list(ranks), "world_size": len(ranks)}
        for ranks, number in groups.items()
    ]
    found.entries = [*({**each, "req": -1} for each in inits), *bodies]
    found.calls = len(bodies)
    return found


def _entry(row: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """One call without its group and number; else why there is none."""
    size, ranks, datatype = row["size_bytes"], row["num_ranks"], row["datatype"]
    if row["collective"] is None or not size or not ranks or datatype is None:
        return "collective, size, type or ranks are unknown", None
    collective = Collective.parse(row["collective"])
    name, type_name = _NAMES.get(collective), _TYPES.get(datatype)
    if name is None or type_name is None:
        return f"{row['collective']} of {datatype}: PARAM cannot play it from this recording", None
    elements, rest = divmod(size, TYPE_BYTES[datatype])
    part, uneven = divmod(elements, ranks)
    is_parted = collective in {Collective.AllGather, Collective.ReduceScatter, Collective.AlltoAll}
    if rest or (is_parted and uneven):
        return "the size is no whole number of elements for each rank", None
    entry: dict[str, Any] = {
        "comms": name,
        "in_msg_size": part if collective is Collective.AllGather else elements,
        "out_msg_size": part if collective is Collective.ReduceScatter else elements,
        "dtype": type_name,
        "world_size": ranks,
    }
    if collective is Collective.AlltoAll:
        entry |= {"in_split": [part] * ranks, "out_split": [part] * ranks}
    if collective in {Collective.Broadcast, Collective.Reduce}:
        group = row["group_ranks"]
        root = row["root"] or 0
        entry["root"] = group[root] if group and root < len(group) else root
    return "", entry
