"""From the command's options to a sweep: shards, launchers, runners, the plugin."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dynamiccl.collect.journal import Shard, journal_folder
from dynamiccl.collect.run import RunSummary
from dynamiccl.collect.start import (
    RunOptions,
    find_plugin,
    launcher_of,
    parse_shard,
    start_sweep,
    submit,
)
from dynamiccl.collect.sweep import Sweep
from dynamiccl.datasets import store
from dynamiccl.errors import InvalidSweep, MachineError, MissingPath, UnknownName, UserError
from dynamiccl.libraries import JOB_NAMES, SWEEP_NAME
from tests.collect.benchmark.sweeps import sweep

NOWHERE = Console(file=io.StringIO())


def options(folder: Path, **more: Any) -> RunOptions:
    return RunOptions(
        sweep_file=folder / "s.toml", out=folder / "out", **{"runner": "simulator", **more}
    )


def start(made: Sweep, folder: Path, **more: Any) -> RunSummary:
    return start_sweep(made, options(folder, **more), console=NOWHERE)


@pytest.mark.parametrize(
    ("text", "shard"),
    [(None, Shard()), ("0/1", Shard()), ("0/4", Shard(0, 4)), ("11/12", Shard(11, 12))],
)
def test_shard_is_read(text: str | None, shard: Shard) -> None:
    assert parse_shard(text) == shard


@pytest.mark.parametrize("text", ["", "1", "4/4", "5/4", "-1/4", "0/0", "1/04x", "a/b", "1/2/3"])
def test_what_is_no_shard_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(UserError, match=r"is no share; write I/N with I from 0 to N-1, like 0/4"):
        parse_shard(text)


def test_launcher_is_the_sweeps_or_the_one_that_is_named() -> None:
    made = sweep(launcher='{ kind = "mpirun", extra_args = ["--bind-to", "none"] }')
    assert launcher_of(made.file, None) == made.file.launcher
    named = launcher_of(made.file, "srun")
    assert (named.kind, named.extra_args) == ("srun", ("--bind-to", "none"))
    assert made.file.launcher.kind == "mpirun"
    with pytest.raises(UnknownName, match=r"'qsub'.*local, mpirun, srun, sbatch"):
        launcher_of(made.file, "qsub")


def test_simulated_sweep_runs_and_goes_on(tmp_path: Path) -> None:
    summary = start(sweep(), tmp_path)
    assert (summary.ended, summary.rounds_done) == ("done", 2)
    assert store.read(tmp_path / "out").height == 2 * 3 * 10
    with pytest.raises(UserError, match="go on with --resume"):
        start(sweep(), tmp_path)
    again = start(sweep(), tmp_path, resume=True)
    assert (again.rows_written, again.launches_skipped) == (0, 2)


def test_shards_share_the_settings_and_nothing_is_measured_twice(tmp_path: Path) -> None:
    made = sweep(collectives='["AllReduce", "AllGather"]', datatypes='["float", "half"]')
    done = [start(made, tmp_path, shard=f"{index}/3") for index in range(3)]
    whole = start(made, tmp_path / "one")
    assert sum(part.rows_written for part in done) == whole.rows_written
    key = ["trial", "run", "repeat", "time_us"]
    shared = store.read(tmp_path / "out").select(key).sort(key)
    assert shared.equals(store.read(tmp_path / "one" / "out").select(key).sort(key))


ADAPTIVE = '{ kind = "adaptive" }'


@pytest.mark.parametrize(
    ("keys", "more"),
    [
        ({}, {"shard": "0/2"}),
        ({"launcher": '{ kind = "sbatch", array = 4 }'}, {}),
        ({"launcher": "{ array = 4 }"}, {"launcher": "sbatch"}),
    ],
)
def test_adaptive_sweep_is_not_cut_into_shards(
    keys: dict[str, str], more: dict[str, str], tmp_path: Path
) -> None:
    made = sweep(strategy=ADAPTIVE, **keys)
    with pytest.raises(UserError, match=r"each would know a part of the history only; take strat"):
        start(made, tmp_path, **more)
    assert not (tmp_path / "out").exists()


def test_array_means_nothing_to_a_launcher_without_a_queue(tmp_path: Path) -> None:
    made = sweep(strategy=ADAPTIVE, launcher="{ array = 4 }", budget="{ max_measurements = 20 }")
    assert start(made, tmp_path).ended in {"done", "budget"}


@pytest.mark.parametrize("begun", [0, 1])
def test_submitting_a_sweep_that_was_begun_needs_resume(begun: int, tmp_path: Path) -> None:
    made = sweep(launcher='{ kind = "sbatch", array = 2 }')
    wanted = options(tmp_path)
    journal_folder(made, wanted.out, Shard(begun, 2)).mkdir(parents=True)
    with pytest.raises(UserError, match=r"this sweep was begun here; go on with --resume, or"):
        submit(made, wanted, made.file.launcher)


def test_what_cannot_start_is_told_and_nothing_is_begun(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"'mpi-bench'.*nccl-tests, simulator"):
        start(sweep(), tmp_path, runner="mpi-bench")
    real = {"runner": "nccl-tests", "nccl_tests_dir": tmp_path}
    with pytest.raises(MachineError, match=r"no executable all_reduce_perf"):
        start(sweep(), tmp_path, **real)
    with pytest.raises(InvalidSweep, match=r"take launcher mpirun, srun or sbatch"):
        start(sweep(groups="[{ num_nodes = 2, ranks_per_node = 8 }]"), tmp_path, **real)
    with pytest.raises(MissingPath, match=r"gone\.so.*make plugin"):
        start(sweep(runner='{ plugin = "gone.so" }'), tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_sweep_takes_the_library_that_it_names(tmp_path: Path) -> None:
    named = tmp_path / SWEEP_NAME
    file = sweep(runner=f'{{ plugin = "{named}" }}').file
    with pytest.raises(MissingPath, match=r"runner\.plugin"):
        find_plugin(file)
    named.touch()
    assert find_plugin(file) == named
    for name in JOB_NAMES:
        (tmp_path / name).touch()
        job = sweep(runner=f'{{ plugin = "{tmp_path / name}" }}').file
        with pytest.raises(UserError, match=f"for jobs and plays no schedule; name {SWEEP_NAME}"):
            find_plugin(job)
