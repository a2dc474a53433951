"""A budget is the sweep's: of all the jobs and shards that it takes."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dynamiccl.collect.runner import Launch, LaunchResult
from dynamiccl.collect.runs.choices import choices_path
from dynamiccl.collect.runs.journal import how_it_ended
from dynamiccl.collect.runs.run import Shard, journal_folder
from dynamiccl.collect.simulated.runner import SimulatorRunner
from dynamiccl.collect.sweep import Sweep
from tests.collect.test_run import TEXT, Watch, figures, run, sweep


class Slow(SimulatorRunner):
    """The simulator on a machine whose launches take a while."""

    def __init__(self, made: Sweep, seconds: float) -> None:
        super().__init__(made.file)
        self._seconds = seconds
        self.launches_run = 0

    def run(self, launch: Launch, progress: Callable[[int], None]) -> LaunchResult:
        time.sleep(self._seconds)
        self.launches_run += 1
        return super().run(launch, progress)


def test_measurements_end_the_run_and_more_of_them_go_on(tmp_path: Path) -> None:
    small = sweep(TEXT + "[budget]\nmax_measurements = 40")
    summary = run(tmp_path, small)
    assert summary.ended == "budget"
    assert summary.rows_by_status["ok"] == 40
    assert choices_path(tmp_path, small.file).is_file()
    again = run(tmp_path, small, resume=True)
    assert (again.ended, again.launches_run) == ("budget", 0)
    assert run(tmp_path, resume=True).ended == "done"
    run(tmp_path / "whole")
    names = ("trial", "run", "repeat", "round", "status", "time_us")
    assert figures(tmp_path, names) == figures(tmp_path / "whole", names)


def test_the_hours_of_a_sweeps_jobs_add_up(tmp_path: Path) -> None:
    """Each job that Slurm ends, or starts anew, would have had all of them again."""
    short = sweep(TEXT + "[budget]\nmax_hours = 0.0003")  # 1.08 s: at most four launches
    runner = Slow(short, seconds=0.3)
    folder = journal_folder(short, tmp_path, Shard())
    jobs = 0
    while how_it_ended(folder, short.text) is None:
        run(tmp_path, short, runner=runner, resume=jobs > 0, watcher=Watch(stop_after=1))
        jobs += 1
    assert how_it_ended(folder, short.text) == "budget"
    assert jobs > 1
    assert runner.launches_run <= 4
    assert how_it_ended(folder, short.text.replace("0.0003", "8")) is None


def test_shards_share_the_measurements(tmp_path: Path) -> None:
    small = sweep(TEXT + "[budget]\nmax_measurements = 21")
    counts = [
        run(tmp_path, small, shard=Shard(index, 2), resume=True).rows_by_status["ok"]
        for index in range(2)
    ]
    assert counts == [11, 10]


class Filled(SimulatorRunner):
    """Each launch of two picks or more measures the default once more, to fill a gap."""

    def measurements(self, launch: Launch) -> int:
        return len(launch.picks) + (len(launch.picks) > 1)

    def run(self, launch: Launch, progress: Callable[[int], None]) -> LaunchResult:
        result = super().run(launch, progress)
        more = result.measured[:1] if len(launch.picks) > 1 else ()
        return replace(result, measured=(*result.measured, *more))


def test_what_fills_gaps_is_paid_too(tmp_path: Path) -> None:
    small = sweep(TEXT + "[budget]\nmax_measurements = 40")
    summary = run(tmp_path, small, runner=Filled(small.file))
    assert summary.ended == "budget"
    assert summary.rows_by_status["ok"] == 40
