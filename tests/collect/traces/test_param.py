"""Calls for PARAM: sizes in elements, groups, and what cannot be played."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect.traces.param import param_trace
from dynamiccl.datasets import store
from tests.calls import call, calls_frame, calls_table, traced
from tests.cli.conftest import Shell, refused, shell_fixture

__all__ = ["shell_fixture"]
COLLECT = "dynamiccl-collect"


@pytest.mark.parametrize(
    ("collective", "name", "sent", "received"),
    [
        ("AllReduce", "all_reduce", 4096, 4096),
        ("AllGather", "all_gather_base", 512, 4096),
        ("ReduceScatter", "reduce_scatter_base", 4096, 512),
        ("AlltoAll", "all_to_allv", 4096, 4096),
        ("Broadcast", "broadcast", 4096, 4096),
    ],
)
def test_sizes_are_elements_of_one_rank(
    collective: str, name: str, sent: int, received: int
) -> None:
    told: dict[str, Any] = {"collective": collective, "datatype": "bfloat16"}
    [entry] = param_trace(calls_frame(call(0, size_bytes=8192, **told))).entries
    assert (entry["comms"], entry["in_msg_size"], entry["out_msg_size"]) == (name, sent, received)
    assert (entry["dtype"], entry["world_size"]) == ("bfloat16", 8)
    assert sum(entry.get("in_split", [sent])) == sent


def test_groups_are_made_before_they_are_used_and_calls_follow_in_time() -> None:
    later = datetime(2026, 1, 1, 0, 0, 1, tzinfo=UTC)
    told: dict[str, Any] = {"datatype": "float", "num_ranks": 2}
    rows = calls_frame(
        traced(1, timestamp=later, group_ranks=[2, 3], **told),
        traced(0, group_ranks=[0, 1], **told),
    )
    init, other, first, second = param_trace(rows).entries
    assert [init["comms"], other["comms"]] == ["init", "init"]
    assert [init["global_ranks"], other["global_ranks"]] == [[0, 1], [2, 3]]
    assert [first["pg_id"], second["pg_id"]] == [0, 1]
    assert [first["startTime_ns"], second["startTime_ns"]] == [0, 1_000_000_000]
    assert [first["req"], second["req"]] == [0, 1]


def test_what_cannot_be_played_is_counted_by_reason() -> None:
    rows = calls_frame(
        call(0, datatype="float"),
        call(1, datatype=None),
        call(2, datatype="f8e4m3"),
        call(3, datatype="float", num_ranks=2),
        call(4, datatype="float", collective="AllGather", size_bytes=4 * 9),
        call(5, datatype="float", collective="SendRecv"),
    )
    found = param_trace(rows)
    assert found.calls == 1
    assert sum(found.left_out.values()) == 5
    assert len(found.left_out) == 5


def test_the_command_writes_one_recording(shell: Shell, tmp_path: Path) -> None:
    rows = [call(n, datatype="float") for n in range(3)]
    rows += [call(9, datatype="float", source="inspector", run="job-2")]
    store.write_part(tmp_path / "data", calls_table(*rows), kind="calls", provenance={})
    several = refused(shell(COLLECT, "export", "data", "--out", "t.json"), 2)
    assert "choose one with --run (job-1, job-2)" in several
    done = shell(COLLECT, "export", "data", "--run", "job-1", "--out", "t.json", "--json")
    assert (done.json["calls"], done.json["left_out"]) == (3, {})
    assert len(json.loads((tmp_path / "t.json").read_text())) == 3
    gone = refused(shell(COLLECT, "export", "data", "--run", "job-3", "--out", "t.json"), 2)
    assert "'job-3'" in gone
