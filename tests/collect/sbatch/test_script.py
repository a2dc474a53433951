"""The batch script: its text, and what its body does with signals (run by bash, without Slurm)."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dynamiccl.collect.sbatch import BatchJob, batch_script, run_command
from dynamiccl.errors import InvalidSweep

JOB = BatchJob(
    name="h100 night/1",
    out=Path("/data/100% mine"),
    command=run_command(
        Path("/home/me/my sweep.toml"),
        Path("/data/100% mine"),
        "--nccl-tests-dir",
        "/opt/nccl-tests/build",
        program=("/venv/bin/dynamiccl-collect",),
    ),
    num_nodes=4,
    ranks_per_node=8,
    header=("--time=02:00:00", "#SBATCH --gpus-per-node=8"),
)
HEAD = """\
#!/bin/bash
#SBATCH --job-name=h100-night-1
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --output="/data/100%% mine/.slurm/h100-night-1-%j.out"
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --time=02:00:00
#SBATCH --gpus-per-node=8

"""
COMMAND = (
    "/venv/bin/dynamiccl-collect run '/home/me/my sweep.toml' --out '/data/100% mine' "
    "--launcher srun --resume --nccl-tests-dir /opt/nccl-tests/build"
)


def test_whole_script() -> None:
    text = batch_script(JOB)
    assert text.startswith(HEAD)
    body = text.removeprefix(HEAD)
    assert body.endswith(f"\nexec {COMMAND}\n")
    assert "SBATCH" not in body
    assert JOB.script == Path("/data/100% mine/.slurm/h100-night-1.sbatch")


def test_an_array_shares_the_sweep() -> None:
    text = batch_script(replace(JOB, array=3))
    assert "#SBATCH --array=0-2\n" in text
    assert "/.slurm/h100-night-1-%A_%a.out" in text
    assert text.endswith(f'\nexec {COMMAND} --shard "$SLURM_ARRAY_TASK_ID/3"\n')


@pytest.mark.parametrize(
    ("line", "absent"),
    [
        ("--signal=B:USR1@600", "--signal=B:USR1@120"),
        ("--no-requeue", "--requeue\n"),
        ("--requeue", "--requeue\n#SBATCH --requeue"),
        ("-J mine", "--job-name"),
        ("-N8", "--nodes"),
        ("--nodes 8", "--nodes=4"),
        ("-o /tmp/x", "--output"),
        ("#SBATCH --open-mode=truncate", "--open-mode=append"),
    ],
)
def test_the_users_options_replace_ours(line: str, absent: str) -> None:
    text = batch_script(replace(JOB, header=(line,)))
    assert absent not in text
    assert f"#SBATCH {line.removeprefix('#SBATCH ')}\n" in text


@pytest.mark.parametrize("line", ["time=1", "module load nccl", "", "--a\nrm -rf /"])
def test_a_line_that_is_no_option_is_refused(line: str) -> None:
    with pytest.raises(InvalidSweep, match="is no option of sbatch; write one option a line"):
        batch_script(replace(JOB, header=(line,)))


@pytest.mark.parametrize("line", ["--array=0-9", "-a 1"])
def test_the_array_is_set_elsewhere(line: str) -> None:
    with pytest.raises(InvalidSweep, match=r"set launcher\.array"):
        batch_script(replace(JOB, header=(line,)))


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    argv = run_command(Path("s.toml"), Path("out"))
    assert argv[:5] == (sys.executable, "-P", "-m", "dynamiccl.collect.cli", "run")
    assert argv[5:8] == (f"{tmp_path}/s.toml", "--out", f"{tmp_path}/out")


#: Ready, then waits for two signals and says which.
CHILD = """
import signal, sys, time
seen = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: seen.append(signal.Signals(number).name))
print("ready", flush=True)
while len(seen) < 2:
    time.sleep(0.01)
print(*sorted(seen), flush=True)
sys.exit(7)
"""


def started(tmp_path: Path, *command: str) -> subprocess.Popen[str]:
    script = tmp_path / "job.sh"
    script.write_text(batch_script(replace(JOB, command=command)), encoding="utf-8")
    return subprocess.Popen(["bash", str(script)], stdout=subprocess.PIPE, text=True)


def test_signals_to_the_batch_shell_reach_the_sweep(tmp_path: Path) -> None:
    with started(tmp_path, sys.executable, "-c", CHILD) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "ready\n"
        shell.send_signal(signal.SIGUSR1)
        shell.send_signal(signal.SIGTERM)
        assert shell.stdout.read() == "SIGTERM SIGUSR1\n"
    assert shell.returncode == 7


@pytest.mark.parametrize("code", [0, 3])
def test_the_sweeps_exit_code_is_the_jobs(tmp_path: Path, code: int) -> None:
    with started(tmp_path, "sh", "-c", f"exit {code}") as shell:
        pass
    assert shell.returncode == code
