"""kill -9 in the middle of a launch: it runs again, nothing of it is kept, and nothing is twice."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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
ONCE = ("trial", "run", "repeat", "default_scope", "in_place")
FOLDERS = "out/.journal/system=*/sweep=*/work/launch-*"


def kill_in_a_launch(folder: Path, plugin: Path) -> None:
    """Start the sweep, and kill it when a launch that plays a schedule has begun to."""
    environment = {**os.environ, "FAKE_SECONDS_PER_ROW": "0.05"}
    command = [sys.executable, "-c", RUN, str(folder), str(plugin)]
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        deadline = time.monotonic() + 60
        while not list(folder.glob(f"{FOLDERS}/report*")):
            assert process.poll() is None, "the sweep ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)


def test_killed_launch_runs_again_and_nothing_is_twice(tmp_path: Path, sweep_path: Path) -> None:
    kill_in_a_launch(tmp_path, sweep_path)
    assert list(tmp_path.glob(FOLDERS))
    assert run(sweep(), tmp_path, sweep_path, resume=True).ended == "done"
    run(sweep(), tmp_path / "whole", sweep_path)
    found, whole = rows(tmp_path), rows(tmp_path / "whole")
    assert not found["partial_launch"].any()
    assert sorted(found.select(ONCE).rows()) == sorted(whole.select(ONCE).rows())
    assert not list(tmp_path.glob(FOLDERS))
