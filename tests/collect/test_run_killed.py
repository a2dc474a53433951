"""kill -9 at any moment: nothing that was committed is lost, nothing is measured twice."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynamiccl.datasets import store
from dynamiccl.errors import MachineError
from tests.collect.test_run import TEXT, figures, parts, run, sweep
from tests.conftest import Soak

KILLED = """
import random, sys, time
from pathlib import Path
from dynamiccl.collect.runs.run import run_sweep
from dynamiccl.collect.simulated.runner import SimulatorRunner
from dynamiccl.collect.sweep import parse_sweep
from tests.collect.cycles import Cycles

class Slow(SimulatorRunner):
    def run(self, launch, progress):
        time.sleep(0.004)
        return super().run(launch, progress)

made = parse_sweep(Path(sys.argv[1]).read_text(), where="s.toml")
print("begun", flush=True)
cycles = Cycles(made.trials, made.file.cycles)
run_sweep(made, cycles, Slow(made.file), Path(sys.argv[2]), resume=True)
"""


@pytest.mark.parametrize("wanted", [4, pytest.param(50, marks=pytest.mark.soak)])
def test_kill_9_at_any_moment_loses_nothing_and_repeats_nothing(
    wanted: int, tmp_path: Path, soak: Soak
) -> None:
    text = TEXT.replace(
        "groups = [{ num_nodes = 2, ranks_per_node = 8 }]",
        "groups = ["
        + ", ".join(
            f"{{ num_nodes = {n}, ranks_per_node = {r} }}" for n in (2, 4) for r in (2, 4, 8)
        )
        + "]",
    ).replace("cycles = 3", f"cycles = {max(3, wanted // 4)}")
    (tmp_path / "s.toml").write_text(text)
    out = tmp_path / "killed"
    draw = random.Random(7 + soak.seed)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", KILLED, str(tmp_path / "s.toml"), str(out)]
    kills = 0
    committed = 0
    while kills < wanted:
        with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            time.sleep(draw.uniform(0.0, 0.09))
            process.send_signal(signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
        if parts(out.parent) and not parts(out):
            continue
        if out.is_dir() and parts(out):
            found = store.read(out).height
            assert found >= committed
            committed = found
            if process.returncode == 0:
                break
    assert kills == wanted, "the sweep was over before it was killed often enough"
    made = sweep(text)
    run(out, made, resume=True)
    run(tmp_path / "whole", made)
    assert figures(out) == figures(tmp_path / "whole")


def test_full_disk_stops_the_sweep_and_it_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "small"
    out.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48k", "none", str(out)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system of a size of our own: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(MachineError, match=r"disk is full|No space left"):
            run(out)
        kept = store.read(out).height if parts(out) else 0
        subprocess.run(["mount", "-o", "remount,size=64m", str(out)], check=True)
        assert run(out, resume=True).ended == "done"
        assert store.read(out).height > kept
        run(tmp_path / "whole")
        assert figures(out) == figures(tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(out)], check=True)
