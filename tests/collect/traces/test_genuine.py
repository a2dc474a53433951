"""A trace that PyTorch writes while this test looks on: one process, no GPU."""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from tests.collect.traces.made import read

STEPS = 3


def test_the_profilers_trace_has_steps(tmp_path: Path) -> None:
    path = tmp_path / "kineto.json.gz"

    def write(profiler: Any) -> None:
        profiler.export_chrome_trace(str(path))

    steps = schedule(wait=0, warmup=1, active=STEPS - 1, repeat=1)
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, schedule=steps, on_trace_ready=write) as profiler:
        for _ in range(STEPS):
            torch.ones(1000).sum()
            profiler.step()
    found = read(path)
    assert [step["step"] for step in found.steps.to_pylist()] == [*range(1, STEPS)]
    assert all(s["step_us"] > 0 and s["compute_us"] is None for s in found.steps.to_pylist())
    assert (found.calls.num_rows, found.reports[0].rejected) == (0, [])
    assert found.reports[0].remarks == ["no collective in it"]
