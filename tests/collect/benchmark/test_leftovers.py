"""kill -9 in the middle of a launch: its rows are kept, the rest is measured, none is twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from dynamiccl.collect.benchmark.leftovers import LaunchFolders, ran_before
from dynamiccl.collect.runner import Launch, LaunchMode, Pick
from dynamiccl.collect.sweep.trial import Trial
from tests.collect.benchmark.stand_in import ROOT, rows, run
from tests.collect.benchmark.sweeps import sweep

RUN = """
import sys
from pathlib import Path
from tests.collect.benchmark.stand_in import run
from tests.collect.benchmark.sweeps import sweep

run(sweep(), Path(sys.argv[1]), Path(sys.argv[2]))
"""
#: One row of each measurement.
ONCE = ("trial", "run", "repeat", "default_scope")


def kill_in_a_launch(folder: Path, plugin: Path, num_rows: int) -> None:
    """Start the sweep and kill it when a launch that plays a schedule has so many rows."""
    environment = {**os.environ, "FAKE_SECONDS_PER_ROW": "0.05"}
    command = [sys.executable, "-c", RUN, str(folder), str(plugin)]
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        deadline = time.monotonic() + 60
        while not rows_on_disk(folder, num_rows):
            assert process.poll() is None, "the sweep ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)


def rows_on_disk(folder: Path, num_rows: int) -> bool:
    work = "out/.journal/system=*/sweep=*/work/launch-*"
    return any(
        (place / "schedule").is_file()
        and json.loads((place / "launch.json").read_text())["mode"] == "sweep"
        and len(ran_before(place).row_times) >= num_rows
        for place in folder.glob(work)
        if (place / "output.jsonl").is_file()
    )


def test_killed_launch_keeps_its_rows_and_only_the_rest_runs_again(
    tmp_path: Path, sweep_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kill_in_a_launch(tmp_path, sweep_path, 5)
    summary = run(sweep(), tmp_path, sweep_path, resume=True)
    assert summary.ended == "done"
    assert "was cut short by a kill" in caplog.text
    found = rows(tmp_path)
    partial = found.filter(pl.col("partial_launch"))
    # Each block has a row out of place and one in place.
    assert 2 * 5 <= partial.height < found.height
    [launch] = set(partial["launch"])
    assert f"{launch}~" in set(found["launch"])
    assert (partial["status"] == "ok").all()
    run(sweep(), tmp_path / "whole", sweep_path)
    whole = rows(tmp_path / "whole")
    keys = [frame.select(*ONCE, "in_place").rows() for frame in (found, whole)]
    assert len(keys[0]) == len(set(keys[0]))
    asked = {key for key in keys[1] if key in set(keys[0])}
    # What fills gaps of a schedule has numbers of its own in a launch that goes on.
    missing = set(keys[1]) - asked
    assert all(key[0] in set(whole.filter("is_default")["trial"]) for key in missing)
    assert not list(tmp_path.glob("out/.journal/system=*/sweep=*/work/launch-*"))


def launch(name: str, sizes: tuple[int, ...]) -> Launch:
    trial = sweep().trials[0]
    picks = tuple(Pick(Trial(trial.setting, size, trial.config)) for size in sizes)
    return Launch(name, 0, trial.setting, LaunchMode.SWEEP, picks, is_scheduled=True)


def begun(work: Path, one: Launch, text: str = "") -> Path:
    folder = LaunchFolders(work).begin(one)
    (folder / "output.jsonl").write_text(text)
    return folder


def test_leftover_is_known_by_its_launch_and_picks(tmp_path: Path) -> None:
    folder = begun(tmp_path, launch("a", (1024, 2048)))
    for other in (launch("b", (1024, 2048)), launch("a", (1024,))):
        assert LaunchFolders(tmp_path).left_over(other) is None
    assert LaunchFolders(tmp_path).left_over(launch("a", (1024, 2048))) == folder


def test_leftover_waits_for_its_launch_and_is_taken_once(tmp_path: Path) -> None:
    folder = begun(tmp_path, launch("a", (1024,)))
    folders = LaunchFolders(tmp_path)
    assert folders.left_over(launch("b", (1024,))) is None
    folders.begin(launch("b", (1024,)))
    assert folders.left_over(launch("a", (1024,))) == folder
    assert folders.left_over(launch("a", (1024,))) is None
    folders.begin(launch("c", (1024,)))
    assert not folder.exists()


def test_what_no_launch_takes_goes_at_the_end(tmp_path: Path) -> None:
    begun(tmp_path, launch("a", (1024,)))
    folders = LaunchFolders(tmp_path)
    folders.begin(launch("b", (1024,)))
    folders.clear()
    assert list(tmp_path.iterdir()) == []


def test_torn_line_ends_what_is_believed(tmp_path: Path) -> None:
    row = "        1024           256     float     sum      -1    10.0    0.10    0.18      0"
    lines = [json.dumps([float(at), row]) for at in (1, 2)]
    folder = begun(tmp_path, launch("a", (1024,)), "\n".join([*lines, '[3.0, "   40']))
    ran = ran_before(folder)
    assert ran.row_times == [1.0, 2.0]
    assert ran.texts == [row, row]


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_folder_that_does_not_say_whose_it_is_is_not_taken(text: str, tmp_path: Path) -> None:
    folder = begun(tmp_path, launch("a", (1024,)))
    (folder / "launch.json").write_text(text)
    assert LaunchFolders(tmp_path).left_over(launch("a", (1024,))) is None
