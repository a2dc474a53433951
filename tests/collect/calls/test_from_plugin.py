"""From the built plugin to Parquet: what its profiler records is what the import reads."""

import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.datasets import store
from dynamiccl.libraries import PROFILER_NAME
from tests.collect.calls.rank import CALLS, COMM_ID

ROOT = Path(__file__).parents[3]
RANKS = 3


def run_rank(plugin: Path, rank: int, calls_dir: Path, **environment: str) -> None:
    library = plugin.with_name(PROFILER_NAME)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("DYNAMICCL_", "SLURM_"))}
    subprocess.run(
        [sys.executable, "-m", "tests.collect.calls.rank", str(library), str(rank), str(RANKS)],
        cwd=ROOT,
        env={
            **inherited,
            "DYNAMICCL_CALLS_DIR": str(calls_dir),
            "DYNAMICCL_MODE": "observe",
            "DYNAMICCL_JOB_ID": "job 9",
            "RANK": str(rank),
            **environment,
        },
        check=True,
    )


@pytest.fixture(scope="module")
def recorded(plugin_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    calls_dir = tmp_path_factory.mktemp("recorded") / "calls"
    for rank in range(RANKS):
        run_rank(plugin_path, rank, calls_dir, DYNAMICCL_SAMPLE_PERCENT="100")
    return calls_dir


def taken(source: Path, out: Path) -> pl.DataFrame:
    import_files([source], out, options=ImportOptions(system="box", sweep="jobs"))
    return store.read(out, "calls").sort("collective", "sequence")


def test_every_call_of_the_job_is_a_row_with_the_last_ranks_time(
    recorded: Path, tmp_path: Path
) -> None:
    names = [path.name.split("-r")[-1] for path in sorted(recorded.iterdir())]
    assert names == [f"{rank}-0000.dcc" for rank in range(RANKS)]
    calls = taken(recorded, tmp_path)
    gather, first = calls.row(0, named=True), calls.row(1, named=True)
    told = ("collective", "size_bytes", "datatype")
    assert [gather[name] for name in told] == ["AllGather", 3000, "int8"]
    assert [first[name] for name in told] == ["AllReduce", 2000, "bfloat16"]
    assert (first["comm"], first["run"]) == (f"{COMM_ID:016x}", "job-9")
    assert (first["num_ranks"], first["num_nodes"], first["ranks_per_node"]) == (3, 1, 3)
    assert (first["actual_algorithm"], first["actual_protocol"]) == ("NVLS", "Simple")
    assert (first["actual_num_channels"], first["actual_num_warps"]) == (2, 16)
    assert (first["plugin_mode"], first["decided"], first["table"]) == ("observe", False, 0)
    reduced = calls.filter(collective="AllReduce")
    assert reduced["sequence"].to_list() == [*range(CALLS)]
    whole = reduced.filter(pl.col("sequence") != 3)
    assert whole["time_us"].to_list() == [pytest.approx(100.0)] * (CALLS - 1)
    assert whole["skew_us"].to_list() == [pytest.approx(20.0)] * (CALLS - 1)
    assert whole["ranks_timed"].unique().to_list() == [RANKS]
    torn = reduced.row(3, named=True)
    assert (torn["time_us"], torn["skew_us"], torn["incomplete"]) == (None, None, True)
    assert (torn["ranks_seen"], torn["ranks_timed"], torn["sampled"]) == (3, 2, True)


def test_without_sampling_there_are_no_times(plugin_path: Path, tmp_path: Path) -> None:
    for rank in range(RANKS):
        run_rank(plugin_path, rank, tmp_path / "calls", DYNAMICCL_SAMPLE_PERCENT="0")
    calls = taken(tmp_path / "calls", tmp_path / "out")
    assert calls.height == CALLS + 1
    assert calls["time_us"].null_count() == CALLS + 1
    assert not calls["sampled"].any()


def test_killed_rank_loses_no_more_than_its_buffer(plugin_path: Path, tmp_path: Path) -> None:
    """The file of a process that never finalizes is read up to its last whole entry."""
    code = (
        "import os, sys, time; import tests.collect.calls.rank as rank\n"
        "rank.Profiler.finalize = property(lambda self: lambda _: (time.sleep(0.5), os._exit(9)))\n"
        "rank.main(sys.argv[1], 0, 1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(plugin_path.with_name(PROFILER_NAME))],
        cwd=ROOT,
        env={**os.environ, "DYNAMICCL_CALLS_DIR": str(tmp_path / "calls")},
        check=False,
    )
    assert done.returncode == 9
    assert taken(tmp_path / "calls", tmp_path / "out").height == CALLS + 1
