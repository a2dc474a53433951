"""What the runner makes of configs that hang, crash or lie, and of being told to stop."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dynamiccl.collect.benchmark.launching import ProcessOutput, Site, Starter
from dynamiccl.collect.benchmark.runner import NcclTestsRunner
from dynamiccl.collect.process import Finished, Interrupt
from dynamiccl.collect.runner import Launch
from dynamiccl.collect.runs.progress import SweepProgress
from dynamiccl.errors import InvalidSweep, MachineError
from tests.collect.benchmark.stand_in import ROOT, rows, run, site, statuses
from tests.collect.benchmark.sweeps import sweep

QUICK = "{ startup_timeout_s = 6, stall_timeout_s = 3, retry_after_s = 0 }"
TIMED_ONLY = "{ startup_timeout_s = 6, stall_timeout_s = 4, retry_after_s = 0, read_back = false }"
#: Where a launch is lost without waiting for it: the others may be late on a busy machine.
PATIENT = "{ startup_timeout_s = 40, stall_timeout_s = 20, retry_after_s = 0 }"
PATIENT_TIMED = PATIENT.replace(" }", ", read_back = false }")


def test_hung_config_is_quarantined_and_everything_else_is_measured(
    tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HANG", "Tree/LL/4ch")
    run(sweep(cycles="1", runner=TIMED_ONLY), tmp_path, sweep_path)
    found = rows(tmp_path)
    hung = found.filter(pl.col("status") == "timed_out")
    assert hung.height >= 1
    assert all(reason.startswith("no ") for reason in hung["reason"])
    lost = found.filter(pl.col("status") != "ok")
    key = ("requested_algorithm", "requested_protocol", "requested_num_channels")
    assert set(lost.select(key).rows()) == {("Tree", "LL", 4)}
    assert lost.height == 3
    # Both halves of: each size x (7 other configs, default twice here and in the reference).
    assert found.filter(pl.col("status") == "ok").height >= 2 * 3 * (7 + 2 + 2)


def test_crashed_config_is_quarantined_with_what_was_said(
    tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CRASH", "Ring/Simple/4ch")
    run(sweep(cycles="1", runner=TIMED_ONLY), tmp_path, sweep_path)
    found = rows(tmp_path)
    lost = found.filter(pl.col("status") == "failed")
    assert lost.height == 3
    assert set(lost["requested_num_channels"]) == {4}
    assert any("exit code" in reason for reason in lost["reason"])
    assert found.filter(pl.col("status") == "ok").height >= 2 * 3 * (7 + 2 + 2)


@pytest.mark.parametrize("mode", ["read-back", "sweep"])
@pytest.mark.parametrize("ending", ["FAKE_CRASH", "FAKE_HANG"])
def test_config_in_play_when_something_went_once_runs_again(
    ending: str, mode: str, tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node or a cable that fails once is no reason to leave a config out."""
    ids: list[str] = []

    def goes_once(launch: Launch, _: int) -> bool:
        ids.extend([launch.id] if launch.mode == mode else [])
        if len(ids) == 1 and launch.mode == mode:
            monkeypatch.setenv(ending, "Ring/Simple/4ch")
        else:
            monkeypatch.delenv(ending, raising=False)
        return False

    Launches(monkeypatch, goes_once)
    run(sweep(cycles="1", runner=PATIENT), tmp_path, sweep_path)
    assert ids[1] == f"{ids[0]}~"
    found = rows(tmp_path)
    assert statuses(found).keys() == {"ok"}
    assert found.filter(~pl.col("is_default"))["verified"].all()


def test_wrong_values_belong_to_their_config_alone(
    tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WRONG", "Tree/Simple")
    run(sweep(cycles="1"), tmp_path, sweep_path)
    found = rows(tmp_path)
    wrong = found.filter(pl.col("status") == "wrong_values")
    assert wrong.height == 2 * 2 * 3  # both halves, with and without a number of channels
    assert set(wrong.select("requested_algorithm", "requested_protocol").rows()) == {
        ("Tree", "Simple")
    }
    assert (wrong["wrong_values"] > 0).all()
    assert all(reason.endswith(" wrong values") for reason in wrong["reason"])
    right = found.filter(pl.col("status") == "ok")
    assert (right["wrong_values"] == 0).all()


def test_benchmark_that_never_begins_ends_the_sweep_and_nothing_is_marked(
    tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = sweep(cycles="1", runner=TIMED_ONLY)
    monkeypatch.setenv("FAKE_NCCL_VERSION", "2.21.5")  # the plugin refuses the sweep mode there
    with pytest.raises(MachineError, match=r"did not start, twice: exit code 3: .*--resume"):
        run(made, tmp_path, sweep_path)
    assert statuses(rows(tmp_path)).keys() <= {"ok"}
    monkeypatch.delenv("FAKE_NCCL_VERSION")
    assert run(made, tmp_path, sweep_path, resume=True).ended == "done"
    assert statuses(rows(tmp_path)).keys() == {"ok"}


def test_plugin_that_does_not_load_is_no_measurement(tmp_path: Path) -> None:
    broken = tmp_path / "libbroken.so"
    broken.write_text("no library")
    with pytest.raises(MachineError, match="the configs are not known"):
        run(sweep(cycles="1", runner=TIMED_ONLY), tmp_path, broken)
    assert "sweep" not in "".join(rows(tmp_path)["launch"])


def test_a_folder_that_nfs_keeps_hinders_no_later_launch(
    tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has not ended yet has a file open there, and the folder stays."""
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setenv("FAKE_HANG", "Tree/LL/4ch")
    assert run(sweep(cycles="1", runner=TIMED_ONLY), tmp_path, sweep_path).ended == "done"


class Launches:
    """Starts launches; those that are named never begin, as with a node that went."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, lost: Callable[[Launch, int], bool]
    ) -> None:
        self.started: list[str] = []
        start = Starter.start

        def begin(starter: Starter, launch: Launch, *others: Any, **named: Any) -> ProcessOutput:
            self.started.append(launch.id)
            if lost(launch, len(self.started)):
                return ProcessOutput(0.0, finished=Finished(1, None, (), 0.1))
            return start(starter, launch, *others, **named)

        monkeypatch.setattr(Starter, "start", begin)


@pytest.mark.parametrize("mode", ["read-back", "sweep", "reference"])
def test_launch_that_never_began_is_tried_once_more(
    mode: str, tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[str] = []

    def is_first(launch: Launch, _: int) -> bool:
        ids.extend([launch.id] if launch.mode == mode else [])
        return len(ids) == 1 and launch.mode == mode

    Launches(monkeypatch, is_first)
    run(sweep(cycles="1", runner=PATIENT), tmp_path, sweep_path)
    assert ids[0] == ids[1]
    found = rows(tmp_path)
    assert statuses(found).keys() == {"ok"}
    assert found.filter(~pl.col("is_default"))["verified"].all()


def test_node_that_goes_in_the_night_marks_nothing(
    tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = sweep(cycles="2", runner=PATIENT_TIMED)
    with monkeypatch.context() as gone:
        launches = Launches(gone, lambda _, count: count > 2)
        with pytest.raises(MachineError, match="did not start, twice"):
            run(made, tmp_path, sweep_path)
        assert len(launches.started) in {4, 5}
        assert statuses(rows(tmp_path)).keys() == {"ok"}
    assert run(made, tmp_path, sweep_path, resume=True).ended == "done"
    assert statuses(rows(tmp_path)).keys() == {"ok"}


def test_what_fails_while_others_begin_is_marked_and_the_rest_goes_on(
    tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches of the second cycle, say because they are too large for the machine."""
    Launches(monkeypatch, lambda launch, _: launch.is_scheduled and launch.round == 1)
    run(sweep(cycles="2", runner=TIMED_ONLY), tmp_path, sweep_path)
    found = rows(tmp_path).group_by("run").agg(lost=(pl.col("status") == "failed").any())
    assert dict(found.iter_rows()) == {"cycle-0": False, "cycle-1": True}


def test_asked_to_stop_it_keeps_the_rows_of_the_running_process(
    tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SECONDS_PER_ROW", "0.05")
    made = sweep(cycles="1", runner="{ read_back = false }")
    seen = itertools.count(1)

    def stop_at_the_tenth_row(_: SweepProgress, __: int) -> None:
        if next(seen) == 10:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched, Interrupt() as interrupt:
        patched.setattr(SweepProgress, "advance", stop_at_the_tenth_row)
        first = run(made, tmp_path, sweep_path, interrupt=interrupt)
    assert first.ended == "interrupted"
    before = rows(tmp_path)
    assert 0 < before.height < 2 * 3 * 12
    monkeypatch.delenv("FAKE_SECONDS_PER_ROW")
    assert run(made, tmp_path, sweep_path, resume=True).ended == "done"
    after = rows(tmp_path)
    # A launch that was cut short leaves gaps, which further repeats of the default fill.
    assert after.filter(pl.col("repeat") < 2).height == 2 * 3 * 12
    # What was measured is still there, and nothing was measured twice.
    assert after.join(before, on=before.columns[:9], how="semi").height >= before.height
    key = ["trial", "run", "repeat", "default_scope"]
    assert after.select(key).unique().height == after.height


def command_of_a_sweep(tmp_path: Path, sweep_path: Path) -> tuple[list[str], Site]:
    made = sweep(cycles="1")
    where = site(made, tmp_path, sweep_path)
    (tmp_path / "s.toml").write_text(made.text + f'\n[runner]\nplugin = "{sweep_path}"\n')
    command = [sys.executable, "-m", "dynamiccl.collect.cli", "run", str(tmp_path / "s.toml")]
    command += ["--out", str(where.out), "--nccl-tests-dir", str(where.nccl_tests_dir)]
    return command, where


def test_interrupting_the_sweep_twice_ends_the_benchmark(tmp_path: Path, sweep_path: Path) -> None:
    command, where = command_of_a_sweep(tmp_path, sweep_path)
    environment = {**os.environ, "FAKE_SECONDS_PER_ROW": "60"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        assert wait_for(lambda: bool(children(str(where.nccl_tests_dir))))
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
    assert wait_for(lambda: not children(str(where.nccl_tests_dir)))


def wait_for(condition: object, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


def children(mark: str) -> list[int]:
    """Benchmarks below the folder `mark` that are measuring."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        ours = any(word.startswith(mark.encode()) and word.endswith(b"_perf") for word in words)
        if ours and b"-b" in words:  # and not only asked for its options
            found.append(int(path.parent.name))
    return found


def test_missing_binary_and_wrong_program_say_what_to_do(tmp_path: Path) -> None:
    made = sweep()
    where = site(made, tmp_path, None)
    (tmp_path / "bin" / "all_reduce_perf").unlink()
    with pytest.raises(MachineError, match=r"no executable all_reduce_perf in .*/bin; build"):
        NcclTestsRunner(made.file, where).check(made.trials)
    other = tmp_path / "bin" / "all_reduce_perf"
    other.write_text(
        "#!/bin/sh\necho libcudart.so.12: cannot open shared object file >&2\nexit 127"
    )
    other.chmod(0o755)
    with pytest.raises(MachineError, match=r"exit code 127, output: libcudart\.so\.12"):
        NcclTestsRunner(made.file, where).check(made.trials)


def test_what_cannot_be_measured_here_is_refused_before_anything_runs(tmp_path: Path) -> None:
    congested = sweep(interference='[{ kind = "congestion", level = 0.5 }]')
    with pytest.raises(InvalidSweep, match="is for the simulator"):
        NcclTestsRunner(congested.file, site(congested, tmp_path, None)).check(congested.trials)
    nodes = sweep(groups="[{ num_nodes = 2, ranks_per_node = 8 }]")
    with pytest.raises(InvalidSweep, match="take launcher mpirun, srun or sbatch"):
        NcclTestsRunner(nodes.file, site(nodes, tmp_path, None)).check(nodes.trials)
    chunks = sweep(chunk_sizes="[0, 65536]")
    with pytest.raises(InvalidSweep, match="chunk_sizes need the sweep mode"):
        NcclTestsRunner(chunks.file, site(chunks, tmp_path, None)).check(chunks.trials)


def test_sweep_mode_that_cannot_work_says_why(tmp_path: Path, sweep_path: Path) -> None:
    made = sweep(runner='{ mode = "sweep" }')
    with pytest.raises(MachineError, match="there is no tuner plugin; build it with"):
        NcclTestsRunner(made.file, site(made, tmp_path, None)).check(made.trials)
    old = sweep(runner='{ mode = "sweep" }', nccl_version='"2.21.5"')
    with pytest.raises(MachineError, match=r"it needs NCCL 2\.22\.\d and this is 2\.21\.5"):
        NcclTestsRunner(old.file, site(old, tmp_path, sweep_path)).check(old.trials)


def test_forced_combination_that_nccl_refuses_is_infeasible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NCCL_VERSION", "2.27.7")
    made = sweep(cycles="1", algorithms='["CollNetDirect"]', protocols='["Simple"]')
    run(made, tmp_path, None)
    lost = rows(tmp_path).filter(~pl.col("is_default"))
    assert statuses(lost) == {"infeasible": 3 * 2}
    assert all("algorithm/protocol available" in reason for reason in lost["reason"])


@pytest.mark.parametrize("mischief", ["FAKE_HANG", "FAKE_CRASH"])
def test_config_that_fails_in_the_read_back_pass_is_kept_out_and_the_rest_verified(
    mischief: str, tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(mischief, "Ring/LL/4ch")
    run(sweep(cycles="1", runner=QUICK), tmp_path, sweep_path)
    found = rows(tmp_path)
    lost = found.filter(pl.col("status") != "ok")
    key = ("requested_algorithm", "requested_protocol", "requested_num_channels")
    assert set(lost.select(key).rows()) == {("Ring", "LL", 4)}
    assert lost.height == 3
    assert found.filter(pl.col("status") == "ok", ~pl.col("is_default"))["verified"].all()


def test_stopped_sweep_ends_with_the_code_of_an_interrupt(tmp_path: Path, sweep_path: Path) -> None:
    command, where = command_of_a_sweep(tmp_path, sweep_path)
    environment = {**os.environ, "FAKE_SECONDS_PER_ROW": "0.1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        assert wait_for(lambda: bool(children(str(where.nccl_tests_dir))))
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"stopped; go on with --resume" in said
