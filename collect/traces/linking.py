"""Matches a Kineto trace with the execution trace of the same process, which has the groups.

Their ids of an operation are not the same in old traces, so they are matched by what they hold: the
calls of each thread, in order, with collective, type and size. Only where all of these are equal
are they of one run, and the execution trace's calls are then no calls of their own.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from dynamiccl.collect.traces.rank_call import RankCall, RankTrace

#: What an execution trace may add to a call of Kineto's.
_ADDED = ("group", "group_ranks", "group_sequence", "num_ranks", "root")


def link(kineto: Sequence[RankTrace], execution: Sequence[RankTrace]) -> list[RankTrace]:
    """Add the groups of `execution` to the calls of `kineto`; returns traces without a match."""
    left = list(execution)
    for trace in kineto:
        for other in left:
            pairs = _pairs(trace, other) if _same_process(trace, other) else None
            if pairs is not None:
                for call, told in pairs:
                    for name in _ADDED:
                        if getattr(call, name) is None:
                            setattr(call, name, getattr(told, name))
                left.remove(other)
                break
    return left


def number_calls(trace: RankTrace) -> None:
    """Number the calls within group and step that have no number of their own."""
    if not trace.has_steps:
        return
    orders: dict[object, int] = defaultdict(int)
    for call in trace.calls:
        is_world = call.num_ranks is not None and call.num_ranks == trace.world_size
        group = call.group_ranks or ("all" if is_world else call.group)
        if call.key is None and group is not None and call.step is not None:
            call.stream = (group, call.step)
            call.order = orders[call.stream]
            orders[call.stream] += 1


def _same_process(trace: RankTrace, other: RankTrace) -> bool:
    return trace.process is not None and trace.process == other.process


def _pairs(trace: RankTrace, other: RankTrace) -> list[tuple[RankCall, RankCall]] | None:
    """Calls that are the same; None unless every thread's calls are, in order, and only once."""
    lines, others = _by_thread(trace.calls), _by_thread(other.calls)
    known = {_kinds(line): line for line in others.values()}
    asked = [_kinds(line) for line in lines.values()]
    if not asked or len(known) != len(others) or sorted(map(str, asked)) != sorted(map(str, known)):
        return None
    return [pair for line in lines.values() for pair in zip(line, known[_kinds(line)], strict=True)]


def _by_thread(calls: Sequence[RankCall]) -> Mapping[int | None, list[RankCall]]:
    found: dict[int | None, list[RankCall]] = defaultdict(list)
    for call in calls:
        found[call.thread].append(call)
    return found


def _kinds(line: Sequence[RankCall]) -> tuple[tuple[str | None, str | None, int | None], ...]:
    return tuple((call.collective, call.datatype, call.size_bytes) for call in line)
