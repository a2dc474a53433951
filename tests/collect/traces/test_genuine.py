"""Traces that PyTorch writes while this test looks on: two ranks, Gloo, no GPU."""

import socket
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from tests.collect.traces.genuine import STEPS
from tests.collect.traces.made import read

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
