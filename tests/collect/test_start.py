"""From the command's options to a sweep: shards, launchers, runners, the plugin."""

import io
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dynamiccl.collect import start as start_module
from dynamiccl.collect.grid import Trial
from dynamiccl.collect.journal import Shard
from dynamiccl.collect.run import RunSummary
from dynamiccl.collect.runner import Launch
from dynamiccl.collect.sbatch import script_path
from dynamiccl.collect.simulated import SimulatorRunner
from dynamiccl.collect.start import (
    RunOptions,
    find_plugin,
    launcher_of,
    parse_shard,
    start_sweep,
    submit_sweep,
)
from dynamiccl.collect.strategies import Outcome, make_strategy
from dynamiccl.collect.sweep import Sweep
from dynamiccl.datasets import store
from dynamiccl.errors import InvalidSweep, MachineError, MissingPath, UnknownName, UserError
from dynamiccl.libraries import JOB_NAMES, SWEEP_NAME
from tests.collect.benchmark.sweeps import sweep
from tests.collect.test_sbatch import Played

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
    ("keys", "more"), [({}, {"shard": "0/2"}), ({"launcher": "{ array = 4 }"}, {})]
)
def test_adaptive_sweep_is_not_cut_into_shards(
    keys: dict[str, str], more: dict[str, str], tmp_path: Path
) -> None:
    run = partial(start_sweep, console=NOWHERE) if more else submit_sweep
    with pytest.raises(UserError, match=r"each would know a part of the history only; take strat"):
        run(sweep(strategy=ADAPTIVE, **keys), options(tmp_path, **more))
    assert not (tmp_path / "out").exists()


def test_array_means_nothing_to_a_launcher_without_a_queue(tmp_path: Path) -> None:
    made = sweep(strategy=ADAPTIVE, launcher="{ array = 4 }", budget="{ max_measurements = 20 }")
    assert start(made, tmp_path).ended in {"done", "budget"}


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    found = Played(tmp_path)
    found.job = replace(found.job, script=script_path(tmp_path / "out", "grid"))
    found.state("77|PENDING|Priority|")
    found.command("scontrol", "exit 0")
    return found


def test_submitting_says_job_and_progress_again_and_again_until_it_is_done(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, wanted = sweep(), options(tmp_path)
    first = submit_sweep(made, wanted)
    assert (first.job, first.state, first.trials, first.trials_done) == ("77", "submitted", 60, 0)
    (line,) = [line for line in first.script.read_text().splitlines() if line.startswith("exec ")]
    assert line.endswith(
        f" run {tmp_path}/s.toml --out {tmp_path}/out --launcher srun --resume "
        f"--runner simulator --batch-script {first.script}"
    )
    picks = Warned(made, 1)
    monkeypatch.setattr(start_module, "make_strategy", lambda *_: picks)
    start_sweep(made, wanted, console=NOWHERE)
    again = submit_sweep(made, wanted)
    assert (again.job, again.state) == ("77", "PENDING (Priority)")
    assert (again.trials_done, again.launches_done) == (30, 1)
    with pytest.raises(UserError, match=r"is PENDING .Priority.: give --retry-failed when it has"):
        submit_sweep(made, options(tmp_path, retry_failed=True))
    played.state("77|COMPLETED|None|n1")
    with pytest.raises(
        UserError, match=r"no job of it waits or runs .*/grid-\*\.out\); go on with -"
    ):
        submit_sweep(made, wanted)
    assert submit_sweep(made, options(tmp_path, resume=True)).job == "78"
    start_sweep(made, options(tmp_path, resume=True), console=NOWHERE)
    done = submit_sweep(made, wanted)
    assert (done.job, done.state, done.trials_done) == (None, "done", 60)
    assert len(played.asked("sbatch")) == 2
    assert submit_sweep(made, options(tmp_path, retry_failed=True)).job == "79"


class Warned:
    """The sweep's strategy; as it picks a round, we get a signal."""

    def __init__(self, made: Sweep, number: int, name: str = "SIGUSR1") -> None:
        self._strategy = make_strategy(made.file, made.trials)
        self._at = number
        self._signal = signal.Signals[name]

    def next_picks(self, number: int, history: Sequence[Outcome]) -> tuple[Trial, ...] | None:
        if number == self._at:
            signal.raise_signal(self._signal)
        return self._strategy.next_picks(number, history)

    def expected_picks(self) -> int:
        return self._strategy.expected_picks()


@pytest.mark.parametrize(
    ("number", "name", "queued"), [(1, "SIGUSR1", 1), (1, "SIGTERM", 0), (9, "SIGUSR1", 0)]
)
def test_a_job_is_queued_again_where_its_time_limit_left_work(
    number: int,
    name: str,
    queued: int,
    played: Played,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, script = sweep(), played.job.script
    warned = Warned(made, number, name)
    monkeypatch.setattr(start_module, "make_strategy", lambda *_: warned)
    start_sweep(made, options(tmp_path, batch_script=script), console=NOWHERE)
    assert played.asked("scontrol") == ["scontrol requeue 77"] * queued


def test_a_job_that_measured_nothing_ends_with_the_error(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, wanted = sweep(), options(tmp_path, batch_script=played.job.script, resume=True)
    warned = Warned(made, 0)
    monkeypatch.setattr(start_module, "make_strategy", lambda *_: warned)
    with pytest.raises(MachineError, match=r"before anything was measured.*--time"):
        start_sweep(made, wanted, console=NOWHERE)
    assert played.asked("scontrol") == []


@pytest.mark.parametrize("number", [0, 1])
def test_a_job_whose_machine_fails_is_queued_again_if_it_measured_something(
    number: int, played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: SimulatorRunner, launch: Launch, progress: Callable[[int], None]) -> Any:
        if launch.round == number:
            raise MachineError("no node answers")
        return run(self, launch, progress)

    run = SimulatorRunner.run
    monkeypatch.setattr(SimulatorRunner, "run", fails)
    with pytest.raises(MachineError, match="no node answers"):
        start_sweep(sweep(), options(tmp_path, batch_script=played.job.script), console=NOWHERE)
    assert played.asked("scontrol") == ["scontrol requeue 77"] * number


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
