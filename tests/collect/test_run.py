"""The run loop: rounds, resume, budget, quarantine, retry, and what never begins."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import polars as pl
import pytest

from dynamiccl.collect.grid import Trial
from dynamiccl.collect.journal import how_it_ended, journal_folder
from dynamiccl.collect.run import Summary, SweepProgress, run_sweep
from dynamiccl.collect.schedule import Launch, LaunchMode, Row, deal, lost_row, trial_row
from dynamiccl.collect.simulated import SimulatorRunner
from dynamiccl.collect.strategies import Cycles, Outcome, outcome_of
from dynamiccl.collect.sweep import Sweep, parse_sweep
from dynamiccl.datasets import store
from dynamiccl.datasets.schema import Source, Status
from dynamiccl.errors import InvalidSweep, MachineError, UserError

TEXT = """
name = "grid"
system = "sim"
collectives = ["AllReduce", "AllGather"]
algorithms = ["Ring", "NVLSTree"]
protocols = ["LL", "Simple"]
groups = [{ num_nodes = 2, ranks_per_node = 8 }]
sizes = { min = "1M", max = "4M" }
cycles = 3
"""
ONE = TEXT.replace('"AllReduce", "AllGather"', '"AllReduce"')
#: 3 sizes x 2 collectives x (default twice, Ring/LL, Ring/Simple) and NVLSTree/Simple of AllReduce.
PICKS, INFEASIBLE = 3 * (2 * 4 + 1), 3 * 3


def sweep(text: str = TEXT) -> Sweep:
    return parse_sweep(text, where="s.toml")


def run(
    out: Path, made: Sweep | None = None, *, resume: bool = False, runner: Any = None, **more: Any
) -> Summary:
    made = made or sweep()
    strategy = Cycles(made.file, made.trials)
    runner = runner or SimulatorRunner(made.file)
    return run_sweep(made, strategy, runner, out, resume=resume, **more)


COLUMNS = ("trial", "run", "repeat", "round", "launch", "status", "time_us")


def figures(out: Path, columns: Sequence[str] = COLUMNS) -> list[tuple[object, ...]]:
    return sorted(store.read(out).select(columns).rows(), key=str)


class Interrupted(Exception):
    """Ends a sweep as a crash would."""


class Progress(SweepProgress):
    """Keeps what it is told, and says stop after so many outcomes."""

    def __init__(self, stop_after: int = 10**9) -> None:
        super().__init__("grid", stopping=lambda: self.new >= stop_after)
        self.expected = self.advanced = 0
        self.outcomes: list[Outcome] = []
        self.old: int | None = None

    @property
    def new(self) -> int:
        """Outcomes of this run."""
        return len(self.outcomes) - (self.old or 0)

    def measured(self, trials: int) -> None:
        self.advanced += trials

    def committed(self, expected: int, outcomes: Sequence[Outcome]) -> None:
        self.expected, self.outcomes = expected, list(outcomes)
        self.old = len(outcomes) if self.old is None else self.old


def test_progress_is_told_and_each_round_is_a_part(tmp_path: Path) -> None:
    """Its rows: tests/golden/data/sweeps-simulated.json."""
    progress = Progress()
    summary = run(tmp_path, progress=progress)
    assert progress.expected == len(progress.outcomes) == 3 * PICKS + INFEASIBLE
    assert progress.advanced == 3 * PICKS
    assert sum(not outcome.ok for outcome in progress.outcomes) == INFEASIBLE
    assert (summary["launches_run"], summary["launches_skipped"]) == (6, 0)
    assert summary["rows_written"] == store.read(tmp_path).height == 3 * PICKS + INFEASIBLE
    runs = [set(pl.read_parquet(path)["run"]) for path in store.part_paths(tmp_path)]
    assert sorted(runs, key=str) == [{f"cycle-{number}"} for number in range(3)]


def test_what_does_not_fit_the_journal_is_refused(tmp_path: Path) -> None:
    whole = sweep()
    run(tmp_path / "a", Sweep(whole.file, whole.text, whole.trials[:2]))
    before = store.part_paths(tmp_path / "a")
    path = tmp_path / "a" / ".journal" / "system=sim" / "sweep=grid" / "sweep.json"
    # Rounds of it may have tried failures again.
    path.write_text(json.dumps({**json.loads(path.read_text()), "layout": "5"}))
    with pytest.raises(UserError, match=r"another trials, layout .*another release began it"):
        run(tmp_path / "a", resume=True)
    assert store.part_paths(tmp_path / "a") == before
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "measurements").rename(tmp_path / "b" / "measurements")
    with pytest.raises(UserError, match="no journal says what they are"):
        run(tmp_path / "b")
    with pytest.raises(InvalidSweep):
        run(tmp_path / "out", sweep(TEXT.replace("num_nodes = 2", "num_nodes = 3")))
    assert not (tmp_path / "out").exists()


class Flaky(SimulatorRunner):
    """A machine on which Ring/Simple hangs from 2 MiB on; what comes after it is not reached."""

    name = "flaky"

    def __init__(self, made: Sweep) -> None:
        super().__init__(made.file)
        self.tried: Counter[str] = Counter()
        self.learnt: list[Any] = []

    def run(self, launch: Launch, progress: Callable[[int], None]) -> Launch:  # noqa: ARG002
        done: list[tuple[Trial, tuple[Row, ...]]] = []
        for place, trial in enumerate(launch.trials):
            self.tried[trial.key] += 1
            row = trial_row(self._file, launch, trial) | dict(self.environment())
            is_bad = trial.config.key == "Ring/Simple" and trial.size_bytes >= 2 << 20
            if is_bad:
                return replace(
                    launch,
                    measured=tuple(done),
                    left=launch.trials[place:],
                    culprit=(trial, lost_row(row, Status.TIMED_OUT, "no new row")),
                    facts={"at": place},
                    began=True,
                )
            done.append((trial, (row | {"time_us": 5.0},)))
        return replace(launch, measured=tuple(done), began=True)

    def learn(self, facts: Mapping[str, Any]) -> None:
        self.learnt.append(facts["at"])

    def environment(self) -> Row:
        return {"source": Source.NCCL_TESTS_TEXT.value, "gpu": "H100"}


def test_config_is_kept_out_from_its_size_on(tmp_path: Path) -> None:
    made = sweep(ONE)
    flaky = Flaky(made)
    summary = run(tmp_path, made, runner=flaky)
    rows = store.read(tmp_path)
    hung = rows.filter(pl.col("status") == "timed_out")
    assert set(hung["requested_protocol"]) == {"Simple"}
    assert hung["size_bytes"].min() == 2 << 20
    kept_out = rows.filter(pl.col("status") == "failed")
    assert set(kept_out["size_bytes"]) <= {2 << 20, 4 << 20}
    assert kept_out["reason"][0].startswith("not tried: Ring/Simple hung (no new row) at ")
    # Nothing is a gap: all other picks have a time, in every round.
    times = rows.filter(pl.col("time_us").is_not_null())
    assert times.height == summary["rows_by_status"]["ok"] == 3 * (15 - 2)
    assert hung.height + kept_out.height == 3 * 2
    # Each trial that hung did so twice, and no trial of what was kept out was tried.
    assert len(flaky.learnt) == 2 * hung.height
    assert flaky.tried[f"AllReduce:2x8:{2 << 20}:Ring/Simple"] == 2


def test_ended_launches_are_counted_across_a_resume(tmp_path: Path) -> None:
    made = sweep(ONE)

    class Goes(Flaky):
        def run(self, launch: Launch, progress: Callable[[int], None]) -> Launch:
            if launch.id.endswith("~"):
                raise Interrupted
            return super().run(launch, progress)

    with pytest.raises(Interrupted):
        run(tmp_path, made, runner=Goes(made))
    again = Flaky(made)
    run(tmp_path, made, runner=again, resume=True)
    rows = store.read(tmp_path)
    assert rows.filter(pl.col("status") == "timed_out").height >= 1
    assert len(again.learnt) == 2 * rows.filter(pl.col("status") == "timed_out").height
    # The facts of the launch before are told, and the first size hung but once more.
    asked = Counter(rows.select("trial", "run", "repeat").rows())
    assert set(asked.values()) == {1}


def test_what_fills_the_gaps_of_a_walk_is_paid_too(tmp_path: Path) -> None:
    class Fills(SimulatorRunner):
        def launches(self, number: int, trials: Sequence[Trial]) -> tuple[Launch, ...]:
            laid = super().launches(number, trials)
            return tuple(replace(launch, mode=LaunchMode.SWEEP) for launch in laid)

        def run(self, launch: Launch, progress: Callable[[int], None]) -> Launch:
            grid = deal(launch)
            done = super().run(replace(launch, trials=grid.blocks), progress)
            return replace(done, left=grid.left_over)

    # Eight picks would take three sizes three times.
    small = sweep(ONE + "[budget]\nmax_measurements = 8")
    summary = run(tmp_path, small, runner=Fills(small.file))
    assert (summary["ended"], summary["rows_by_status"]["ok"]) == ("budget", 8)


def test_the_hours_of_a_sweeps_jobs_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job that Slurm ends, or starts anew, would have had all of them again."""
    short = sweep(TEXT + "[budget]\nmax_hours = 3.5")
    launches: list[str] = []
    monkeypatch.setattr("time.monotonic", lambda: 3600.0 * len(launches))

    class Slow(SimulatorRunner):
        def run(self, launch: Launch, progress: Callable[[int], None]) -> Launch:
            launches.append(launch.id)
            return super().run(launch, progress)

    folder = journal_folder(short, tmp_path)
    while how_it_ended(folder, short.text) is None:
        stops, slow = Progress(stop_after=1), Slow(short.file)
        run(tmp_path, short, runner=slow, resume=folder.is_dir(), progress=stops)
    assert how_it_ended(folder, short.text) == "budget"
    assert len(launches) == 4
    assert how_it_ended(folder, short.text.replace("3.5", "8")) is None


class Dead(SimulatorRunner):
    """A machine on which some launches never begin."""

    def __init__(self, made: Sweep, is_dead: Callable[[Launch], bool]) -> None:
        super().__init__(made.file)
        self._is_dead = is_dead
        self.begun: list[str] = []
        self.tried = 0

    def run(self, launch: Launch, progress: Callable[[int], None]) -> Launch:
        self.tried += 1
        if not self._is_dead(launch):
            self.begun.append(launch.id)
            return super().run(launch, progress)
        source = {"source": Source.SIMULATOR.value}
        rows = (trial_row(self._file, launch, trial) | source for trial in launch.trials)
        lost = ((lost_row(row, Status.FAILED, "gone"),) for row in rows)
        measured = tuple(zip(launch.trials, lost, strict=True))
        return replace(launch, measured=measured, never_began="gone")


def test_what_never_begins_while_others_do_is_failed(tmp_path: Path) -> None:
    made = sweep()
    dead = Dead(made, lambda launch: launch.setting.collective.wire == "AllGather")
    assert run(tmp_path, made, runner=dead)["ended"] == "done"
    rows = store.read(tmp_path).filter(pl.col("status") != "infeasible")
    gather = pl.col("collective") == "AllGather"
    assert set(rows.filter(gather)["status"]) == {"failed"}
    assert set(rows.filter(gather)["reason"]) == {"gone"}
    assert set(rows.filter(~gather)["status"]) == {"ok"}
    assert rows.filter(gather).height == 3 * 3 * 4


def test_where_no_launch_is_left_nccls_own_choice_tells(tmp_path: Path) -> None:
    """A launch of many configs never begins: NCCL's own choice does, and the configs are failed."""
    made = sweep(ONE)
    dead = Dead(made, lambda launch: len(launch.trials) > 1)
    assert run(tmp_path, made, runner=dead)["ended"] == "done"
    assert len(dead.begun) == 3
    rows = store.read(tmp_path)
    # What NCCL's own choice gave there is no row.
    assert set(rows["status"]) == {"failed", "infeasible"}
    assert rows.filter(pl.col("status") == "failed").height == 3 * 15


@pytest.mark.parametrize("text", [TEXT, ONE])
def test_machine_that_went_marks_nothing(text: str, tmp_path: Path) -> None:
    made = sweep(text)
    begun = 2 if text == TEXT else 1  # the launches of the first round
    gone = Dead(made, lambda _: len(gone.begun) == begun)
    with pytest.raises(MachineError, match=r"did not start, twice: gone; no config is marked as"):
        run(tmp_path, made, runner=gone)
    assert set(store.read(tmp_path)["status"]) == {"ok", "infeasible"}
    assert run(tmp_path, made, resume=True)["ended"] == "done"
    run(tmp_path / "whole", made)
    assert figures(tmp_path) == figures(tmp_path / "whole")


@pytest.mark.parametrize("number", [1, 2])
def test_a_stop_leaves_what_was_set_aside_to_the_next_run(number: int, tmp_path: Path) -> None:
    made, progress = sweep(ONE), Progress()
    gone = Dead(made, lambda _: True)
    progress.stopping = lambda: gone.tried >= number
    assert run(tmp_path, made, runner=gone, progress=progress)["ended"] == "interrupted"
    assert gone.tried == number
    run(tmp_path, made, resume=True)
    assert set(store.read(tmp_path)["status"]) == {"ok", "infeasible"}


def test_outcome_of_a_trial_is_read_from_its_rows() -> None:
    halves: list[Row] = [{"time_us": 7.0, "in_place": True}, {"time_us": 5.0, "in_place": False}]
    cases: list[tuple[list[Row], tuple[Any, ...]]] = [
        # The time is that of the out-of-place half, where there is one.
        (halves, (5.0, True)),
        (halves[:1], (7.0, True)),
        # The time of GPUs that are not well is none, and no failure.
        ([{"time_us": 5.0, "throttled": True}], (None, True)),
        ([{"time_us": 5.0, "ecc_errors": 1}], (None, True)),
        ([{"time_us": 5.0}, {"time_us": 7.0, "status": "wrong_values"}], (None, False)),
        ([{"status": "timed_out"}], (None, False)),
        ([{"status": "infeasible"}], (None, False, True)),
    ]
    for rows, outcome in cases:
        assert outcome_of("key", 3, rows) == Outcome("key", 3, *outcome)


#: Runs the sweep in a process of its own for each step, which dies there: before a file is
#: replaced, removed or synchronised, and with half of what it was to write.
KILLED: Final = """
import os, signal, sys
from pathlib import Path
import pandas  # pyarrow does at its first use: once, not in each process
from dynamiccl.collect.run import run_sweep
from dynamiccl.collect.simulated import SimulatorRunner
from dynamiccl.collect.sweep import parse_sweep
from dynamiccl.collect.strategies import make_strategy

made = parse_sweep(Path(sys.argv[1]).read_text(), where="s.toml")
folder = Path(sys.argv[2])

def die_at(step):
    left = step
    def dies(half):
        nonlocal left
        left -= 1
        if left == 0:
            half()
            os.kill(os.getpid(), signal.SIGKILL)
    def before(call):
        def called(*words, **named):
            dies(lambda: None)
            return call(*words, **named)
        return called
    write, write_bytes = os.write, Path.write_bytes
    def half_a_line(descriptor, data):
        dies(lambda: write(descriptor, data[: len(data) // 2]))
        return write(descriptor, data)
    def half_a_part(path, data):
        dies(lambda: write_bytes(path, data[: len(data) // 2]))
        return write_bytes(path, data)
    os.write, Path.write_bytes = half_a_line, half_a_part
    os.fsync = before(os.fsync)
    Path.replace, Path.unlink = before(Path.replace), before(Path.unlink)

step, ended = 0, signal.SIGKILL
while ended == signal.SIGKILL:
    step += 1
    child = os.fork()
    if child == 0:
        out = folder / f"step-{step}"
        die_at(step)
        strategy = make_strategy(made.file, made.trials)
        run_sweep(made, strategy, SimulatorRunner(made.file), out, resume=False)
        os._exit(0)
    ended = os.waitpid(child, 0)[1]
print(step, ended)
"""


def test_kill_9_at_every_step_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    text = ONE.replace("cycles = 3", "cycles = 2")
    made = sweep(text)
    (tmp_path / "s.toml").write_text(text)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", KILLED, str(tmp_path / "s.toml"), str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    last, ended = map(int, done.stdout.split())
    assert ended == 0
    # Its grid, two rounds and three launches written down, two parts, two segments cut, the end.
    assert last > 20
    run(tmp_path / "whole", made)
    whole = figures(tmp_path / "whole")
    for step in range(1, last):
        out = tmp_path / f"step-{step}"
        before = store.read(out).height if store.part_paths(out) else 0
        summary = run(out, made, resume=True)
        found = figures(out)
        assert found == whole, step
        assert len(found) - before >= summary["rows_written"], step


def test_full_disk_stops_the_sweep_and_it_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "small"
    out.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48k", "none", str(out)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system of a size of our own: {mounted.stderr.strip()}")
    try:
        with pytest.raises(MachineError, match=r"disk is full|No space left"):
            run(out)
        kept = store.read(out).height if store.part_paths(out) else 0
        subprocess.run(["mount", "-o", "remount,size=64m", str(out)], check=True)
        assert run(out, resume=True)["ended"] == "done"
        assert store.read(out).height > kept
        run(tmp_path / "whole")
        assert figures(out) == figures(tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(out)], check=True)
