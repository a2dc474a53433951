"""kill -9 at every step that a sweep makes on disk: nothing is lost, nothing is there twice."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from dynamiccl.datasets import store
from dynamiccl.errors import MachineError
from tests.collect.test_run import ONE, figures, parts, run, sweep

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
        before = store.read(out).height if parts(out) else 0
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
        kept = store.read(out).height if parts(out) else 0
        subprocess.run(["mount", "-o", "remount,size=64m", str(out)], check=True)
        assert run(out, resume=True)["ended"] == "done"
        assert store.read(out).height > kept
        run(tmp_path / "whole")
        assert figures(out) == figures(tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(out)], check=True)
