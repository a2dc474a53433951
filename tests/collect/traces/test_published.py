"""Traces that others published, as far as we have them; and one that PyTorch writes here."""

from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from tests.collect.traces.made import calls_of, read
from tests.published import COPIES, WHOLE, unpacked

STEPS = 3


def test_dlrms_ranks_join_by_order_where_their_number_is_told(tmp_path: Path) -> None:
    whole = WHOLE / "traces" / "param_dlrm_kineto.tar.gz"
    excerpt = COPIES / "traces" / "param_dlrm_kineto_excerpt.tar.gz"
    job = unpacked(whole if whole.is_file() else excerpt, tmp_path)
    found = read(job, num_ranks=8)
    calls = pl.DataFrame(found.calls)
    assert calls["ranks_seen"].to_list() == [8] * 8
    assert calls["ranks_timed"].to_list() == [8] * 8
    reduced = calls.filter(pl.col("collective") == "AllReduce")
    assert reduced["size_bytes"].to_list() == [1_576_964, 448, 907_840]
    assert reduced["time_us"].to_list() == [86.0, 20.0, 69.0]
    assert found.steps["rank"].to_pylist() == [*range(8)]
    # Alone, nothing says how many ranks a group has.
    alone = calls_of(job)
    assert set(alone["collective"]) == {"AllReduce", "AlltoAll"}
    assert (alone["size_bytes"].null_count(), alone["num_ranks"].null_count()) == (0, 64)


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
