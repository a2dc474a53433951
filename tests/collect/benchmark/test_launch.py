"""The real runner on the stand-in: real processes, the real plugin, times of the simulator."""

import platform
from pathlib import Path

import polars as pl

from dynamiccl.collect.batch import RunOptions
from dynamiccl.collect.cli import start_sweep
from dynamiccl.datasets import store
from dynamiccl.simulator.system import Group
from tests.collect.benchmark.stand_in import rows, run, share_near_truth, statuses, sweep, wanted
from tests.fakes.nccl_tests.install import install_stand_in


def test_whole_grid_in_one_process_is_measured_verified_and_true(
    tmp_path: Path, sweep_path: Path
) -> None:
    """What it asks and gets, launch by launch, is in tests/golden/data/sweeps-plain.json, too."""
    algorithms = '["Ring", "Tree", "CollNetDirect"]'
    made = sweep(cycles="1", algorithms=algorithms, runner="{ per_iteration = true }")
    # The grid and the reference; and what runs is read back.
    assert run(made, tmp_path, sweep_path)["launches_run"] == 3
    found = rows(tmp_path)
    assert statuses(found) == {"ok": 2 * 3 * (8 + 2 + 2), "infeasible": 3 * (2 + 2)}
    lost = found.filter(pl.col("reason") == "NCCL's cost table has no such cell here")
    assert (lost.height, lost["time_us"].null_count()) == (3 * 2, 3 * 2)
    ok = found.filter(pl.col("status") == "ok")
    # How wide is up to the machine: the stand-in has a real clock, and others may be busy.
    assert ok["aa_noise_band"].null_count() == 0
    assert ok["aa_noise_band"].min() > 0  # type: ignore[operator]
    assert set(ok["hosts"]) == {platform.node().partition(".")[0]}
    assert not found["partial_launch"].any()
    # Each block began when the one before it had ended.
    assert ok.group_by("launch").agg(pl.col("timestamp").n_unique())["timestamp"].min() > 1  # type: ignore[operator]
    # Times of single iterations come from JSON, the release from the text.
    assert set(ok["source"]) == {"nccl-tests-json"}
    assert set(ok["iteration_times_us"].list.len()) == {5}
    assert set(ok["nccl_tests_version"]) == {"2.19.6"}
    assert set(ok["gpu"]) == {"FAKE H100"}
    costs = store.read(tmp_path / "out", "costs")
    assert set(costs["gpu"]) == {"FAKE H100"}
    forced = wanted(found)
    assert forced["verified"].all()
    assert share_near_truth(forced, Group(1, 8)) > 0.9


def test_what_takes_long_and_does_not_win_is_not_started(tmp_path: Path, sweep_path: Path) -> None:
    made = sweep(
        algorithms='["Ring"]',
        num_channels="[0]",
        sizes='{ list = ["1M", "4M"] }',
        cycles="1",
        runner=f'{{ plugin = "{sweep_path}", slow_max = "2M", read_back = false }}',
    )
    programs, out = install_stand_in(tmp_path / "bin"), tmp_path / "out"
    options = RunOptions(sweep_file=tmp_path / "s.toml", out=out, nccl_tests_dir=programs)
    start_sweep(made, options)
    found = rows(tmp_path)
    [reason] = found.filter(pl.col("status") == "infeasible")["reason"]
    assert "(runner.slow_max)" in reason
    ok = wanted(found).group_by("requested_protocol", "size_bytes").len().sort(pl.all())
    assert ok.rows() == [("LL", 1 << 20, 2), ("Simple", 1 << 20, 2), ("Simple", 4 << 20, 2)]


def test_nccls_own_choice_alone_needs_no_plugin(tmp_path: Path) -> None:
    summary = run(sweep(cycles="1", algorithms="[]"), tmp_path, None)
    assert summary["launches_run"] == 1 + 1
    found = rows(tmp_path)
    assert statuses(found) == {"ok": 2 * 3 * 2}
    assert found["verified"].all()
    assert set(found["default_scope"]) == {"untouched"}


def test_tuned_collectives_are_played_with_chunks_and_the_others_measured_as_they_are(
    tmp_path: Path, sweep_path: Path
) -> None:
    made = sweep(
        collectives='["ReduceScatter", "Reduce", "AlltoAll", "SendRecv"]',
        algorithms='["Ring"]',
        protocols='["Simple"]',
        num_channels="[0]",
        chunk_sizes='[0, "64K", "256K"]',
        # Of ReduceScatter whole shares of a rank run; whatever the walk does, the warm-up doubles.
        sizes="{ list = [1000000, 4000000] }",
        cycles="1",
    )
    run(made, tmp_path, sweep_path)
    found = rows(tmp_path)
    forced = wanted(found)
    assert set(forced["collective"]) == {"ReduceScatter", "Reduce"}
    assert forced["verified"].all()
    asked = forced.drop_nulls("requested_chunk_bytes")
    assert asked.height == 2 * 2 * 2 * 2
    assert (asked["actual_chunk_bytes"] <= asked["requested_chunk_bytes"]).all()
    left = forced.filter(pl.col("requested_chunk_bytes").is_null())
    assert left["actual_chunk_bytes"].null_count() == left.height
    others = found.filter(~pl.col("collective").is_in(["ReduceScatter", "Reduce"]))
    assert set(others["collective"]) == {"AlltoAll", "SendRecv"}
    assert set(others["status"]) == {"ok"}
    assert others["is_default"].all()
