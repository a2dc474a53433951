"""Traces that PyTorch writes while this test looks on: two ranks, Gloo, no GPU."""

import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from tests.collect.traces.genuine import STEPS
from tests.collect.traces.made import calls_of, read

ROOT = Path(__file__).resolve().parents[3]
COLLECTIVES = ("AllGather", "AllReduce", "Broadcast")


@pytest.fixture(name="traces", scope="module")
def traces_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("genuine")
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port = asked.getsockname()[1]
    command = [sys.executable, "-m", "tests.collect.traces.genuine", str(out), str(port)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.mark.parametrize("kind", ["pickle", "json"])
def test_the_flight_recorders_dumps_join(kind: str, traces: Path) -> None:
    calls = calls_of(*traces.glob(f"{kind}_rank_*"))
    assert calls.height == 3 * STEPS
    assert calls["ranks_seen"].to_list() == [2] * calls.height
    assert calls["ranks_agree"].to_list() == [True] * calls.height
    assert calls["group_ranks"].to_list() == [[0, 1]] * calls.height
    assert set(calls["datatype"]) == {"float"}
    sizes = dict(calls.group_by("collective").agg(pl.col("size_bytes").first()).iter_rows())
    assert sizes == {"AllReduce": 4000, "AllGather": 8000, "Broadcast": 4000}
    # Gloo has no clock of its own, and NCCL's tuner is no matter of its.
    assert calls["time_at_most_us"].null_count() == calls.height
    assert set(calls["asks_tuner"]) == {False}


def test_both_kinds_of_a_dump_are_the_same_calls(traces: Path) -> None:
    one = calls_of(*traces.glob("pickle_rank_*"))
    two = calls_of(*traces.glob("json_rank_*"))
    assert one.drop("source_file").equals(two.drop("source_file"))


def test_the_profilers_trace_has_calls_and_steps(traces: Path) -> None:
    found = read(*traces.glob("kineto_*.json.gz"))
    calls = pl.DataFrame(found.calls)
    assert set(calls["collective"]) <= set(COLLECTIVES)
    assert calls["size_bytes"].null_count() == 0
    assert set(calls["num_ranks"]) == {2}
    assert calls["time_at_most_us"].null_count() == calls.height
    steps = found.steps.to_pylist()
    assert sorted((step["rank"], step["step"]) for step in steps) == [
        (rank, step) for rank in (0, 1) for step in range(1, STEPS)
    ]
    assert all(step["step_us"] > 0 and step["compute_us"] is None for step in steps)


def test_the_execution_traces_have_every_call(traces: Path) -> None:
    calls = calls_of(*traces.glob("et_*.json"))
    # Gloo's nodes name no number of the call: each rank's stand alone.
    assert Counter(calls["collective"]) == dict.fromkeys(COLLECTIVES, 2 * STEPS)
    sizes = dict(calls.group_by("collective").agg(pl.col("size_bytes").first()).iter_rows())
    assert sizes == {"AllReduce": 4000, "AllGather": 8000, "Broadcast": 4000}
    assert set(calls["num_ranks"]) == {2}
