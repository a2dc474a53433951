import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dynamiccl.collect.runs.carry_out import (
    RunOptions,
    carry_out,
    launcher_of,
    parse_shard,
    site_of,
    submit,
)
from dynamiccl.collect.runs.run import RunSummary, Shard, journal_folder
from dynamiccl.collect.sweep import Sweep
from dynamiccl.datasets import store
from dynamiccl.errors import InvalidSweep, MachineError, MissingPath, UnknownName, UserError
from tests.collect.benchmark.sweeps import sweep

NOWHERE = Console(file=io.StringIO())


def order(folder: Path, **more: Any) -> RunOptions:
    return RunOptions(
        sweep_file=folder / "s.toml", out=folder / "out", **{"runner": "simulator", **more}
    )


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


def test_launcher_that_nobody_knows_is_refused_with_the_choices() -> None:
    with pytest.raises(UnknownName, match=r"'qsub'.*local, mpirun, srun, sbatch"):
        launcher_of(sweep().file, "qsub")


def test_simulated_sweep_is_carried_out(tmp_path: Path) -> None:
    summary = carry_out(sweep(), order(tmp_path), console=NOWHERE)
    assert (summary.ended, summary.rounds_done) == ("done", 2)
    assert store.read(tmp_path / "out").height == 2 * 3 * 10
    with pytest.raises(UserError, match="go on with --resume"):
        carry_out(sweep(), order(tmp_path), console=NOWHERE)
    again = carry_out(sweep(), order(tmp_path, resume=True), console=NOWHERE)
    assert (again.rows_written, again.launches_skipped) == (0, 2)


def test_shards_share_the_settings_and_nothing_is_measured_twice(tmp_path: Path) -> None:
    made = sweep(collectives='["AllReduce", "AllGather"]', datatypes='["float", "half"]')
    done = [
        carry_out(made, order(tmp_path, shard=f"{index}/3"), console=NOWHERE) for index in range(3)
    ]
    whole = carry_out(made, order(tmp_path / "one"), console=NOWHERE)
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
        carry_out(made, order(tmp_path, **more), console=NOWHERE)
    assert not (tmp_path / "out").exists()


def test_array_means_nothing_to_a_launcher_without_a_queue(tmp_path: Path) -> None:
    made = sweep(strategy=ADAPTIVE, launcher="{ array = 4 }", budget="{ max_measurements = 20 }")
    assert carry_out(made, order(tmp_path), console=NOWHERE).ended in {"done", "budget"}


@pytest.mark.parametrize("begun", [0, 1])
def test_submitting_a_sweep_that_was_begun_needs_resume(begun: int, tmp_path: Path) -> None:
    made = sweep(launcher='{ kind = "sbatch", array = 2 }')
    wanted = order(tmp_path)
    journal_folder(made, wanted.out, Shard(begun, 2)).mkdir(parents=True)
    with pytest.raises(UserError, match=r"this sweep was begun here; go on with --resume, or"):
        submit(made, wanted, made.file.launcher)


def test_site_names_where_things_are(tmp_path: Path) -> None:
    plugin = tmp_path / "lib.so"
    plugin.touch()
    made = sweep(runner=f'{{ plugin = "{plugin}" }}')
    wanted = order(tmp_path, nccl_tests_dir=tmp_path / "bin")
    found = site_of(made, wanted, Shard(1, 2), made.file.launcher)
    assert found.out == tmp_path / "out"
    assert found.work == journal_folder(made, found.out, Shard(1, 2)) / "work"
    assert found.work.parent.name == "sweep=grid.shard-1-of-2"
    assert (found.plugin, found.nccl_tests_dir) == (plugin, tmp_path / "bin")


def test_plugin_that_is_named_must_be_there(tmp_path: Path) -> None:
    made = sweep(runner='{ plugin = "gone.so" }')
    with pytest.raises(MissingPath, match=r"gone\.so.*make plugin"):
        carry_out(made, order(tmp_path), console=NOWHERE)


def real(made: Sweep, folder: Path) -> RunSummary:
    wanted = order(folder, runner="nccl-tests", nccl_tests_dir=folder)
    return carry_out(made, wanted, console=NOWHERE)


def test_machine_without_nccl_tests_is_told_and_nothing_is_begun(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"no executable all_reduce_perf"):
        real(sweep(), tmp_path)
    assert not (tmp_path / "out").exists()


def test_several_nodes_need_a_launcher_that_reaches_them(tmp_path: Path) -> None:
    with pytest.raises(InvalidSweep, match=r"take launcher mpirun, srun or sbatch"):
        real(sweep(groups="[{ num_nodes = 2, ranks_per_node = 8 }]"), tmp_path)


def test_runner_that_nobody_knows_is_refused_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"'mpi-bench'.*nccl-tests, simulator"):
        carry_out(sweep(), order(tmp_path, runner="mpi-bench"), console=NOWHERE)
