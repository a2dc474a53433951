"""The batch script, and what is submitted when; shell scripts play Slurm (real: tests/cluster)."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dynamiccl import slurm
from dynamiccl.collect.sbatch import (
    BatchJob,
    QueuedJob,
    batch_script,
    find_job,
    queue_again,
    script_path,
    submit,
)
from dynamiccl.errors import InvalidSweep, MachineError, UserError

OUT = Path("/data/100% mine")
JOB = BatchJob(
    script=script_path(OUT, "h100 night/1"),
    command=("/venv/bin/dynamiccl-collect", "run", "/home/me/my sweep.toml"),
    num_nodes=4,
    ranks_per_node=8,
    header=("--time=02:00:00", "#SBATCH --gpus-per-node=8"),
)
WHOLE = """\
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

# Written by dynamiccl-collect. It resumes the sweep, so it may run any number of times.
exec /venv/bin/dynamiccl-collect run '/home/me/my sweep.toml'
"""


def test_whole_script() -> None:
    assert batch_script(JOB) == WHOLE
    assert JOB.script == OUT / ".slurm" / "h100-night-1.sbatch"


def test_an_array_shares_the_sweep() -> None:
    text = batch_script(replace(JOB, array=3))
    assert "#SBATCH --array=0-2\n" in text
    assert "/.slurm/h100-night-1-%A_%a.out" in text
    assert text.endswith(" '/home/me/my sweep.toml' --shard \"$SLURM_ARRAY_TASK_ID/3\"\n")


@pytest.mark.parametrize("line", ["time=1", "module load nccl", "", "--a\nrm -rf /"])
def test_a_line_that_is_no_option_is_refused(line: str) -> None:
    with pytest.raises(InvalidSweep, match="is no option of sbatch; write one option a line"):
        batch_script(replace(JOB, header=(line,)))


@pytest.mark.parametrize("line", ["--array=0-9", "-a 1"])
def test_the_array_is_set_elsewhere(line: str) -> None:
    with pytest.raises(InvalidSweep, match=r"set launcher\.array"):
        batch_script(replace(JOB, header=(line,)))


#: Ready, then waits for two signals, says which, and ends in its own way.
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


def test_signals_to_the_batch_shell_reach_the_sweep_and_its_exit_code_is_the_jobs(
    tmp_path: Path,
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(batch_script(replace(JOB, command=(sys.executable, "-c", CHILD))))
    with subprocess.Popen(["bash", str(script)], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "ready\n"
        shell.send_signal(signal.SIGUSR1)
        shell.send_signal(signal.SIGTERM)
        assert shell.stdout.read() == "SIGTERM SIGUSR1\n"
    assert shell.returncode == 7


class Played:
    """Slurm's commands as shell scripts on PATH, and what they were asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "asked").touch()
        self.job = replace(JOB, script=script_path(folder / "out", "s"))
        self.command("sbatch", "echo $((76 + $(grep -c sbatch asked)))")
        self.state("77|RUNNING|None|n1")

    def command(self, name: str, script: str) -> None:
        path = self.folder / name
        head = f'#!/bin/sh\ncd {self.folder}; echo "{name} $*" >> asked\n'
        path.write_text(f"{head}{script}\n")
        path.chmod(0o755)

    def state(self, *lines: str, script: Path | None = None) -> None:
        shown = "\n".join(f"{line}|{script or self.job.script}" for line in lines)
        self.command("squeue", f"cat <<'E'\n{shown}\nE")

    def asked(self, name: str) -> list[str]:
        lines = (self.folder / "asked").read_text().splitlines()
        return [line for line in lines if line.startswith(name)]

    def numbers(self, submission: int) -> str:
        return (self.job.script.with_suffix(".jobs") / str(submission)).read_text()


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return Played(tmp_path)


def test_a_sweep_is_submitted_once_as_long_as_its_job_is_there(played: Played) -> None:
    assert find_job(played.job.script) is None
    assert submit(played.job) == QueuedJob("77", "submitted")
    assert played.job.script.read_text() == batch_script(played.job)
    assert find_job(played.job.script) == QueuedJob("77", "RUNNING on n1")
    assert submit(played.job) == QueuedJob("77", "RUNNING on n1")
    assert played.asked("sbatch") == [f"sbatch --parsable {played.job.script}"]


def test_of_many_calls_at_once_one_submits(played: Played) -> None:
    played.command("sbatch", "sleep 0.5; echo 77")

    def one(_: int) -> str:
        try:
            return submit(played.job).number
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        said = sorted(pool.map(one, range(8)))
    assert said[0] == "77"
    assert all("another call is submitting this sweep" in words for words in said[1:])
    assert len(played.asked("sbatch")) == 1
    assert submit(played.job).number == "77"


@pytest.mark.parametrize(
    "gone", ["77|COMPLETED|None|n1", "77|CANCELLED|None|n1", "", "another's script"]
)
def test_a_job_that_is_gone_is_submitted_anew(gone: str, played: Played) -> None:
    submit(played.job)
    if gone == "another's script":
        played.state("77|RUNNING|None|n1", script=Path("/elsewhere/s.sbatch"))
    elif gone:
        played.state(gone)
    else:
        played.command("squeue", "echo 'error: Invalid job id specified' >&2; exit 1")
    assert find_job(played.job.script) is None
    assert submit(played.job).number == "78"
    assert (played.numbers(1), played.numbers(2)) == ("77\n", "78\n")


def test_a_job_that_is_refused_can_be_submitted_later(played: Played) -> None:
    played.command("sbatch", "echo 'invalid partition' >&2; exit 1")
    with pytest.raises(MachineError, match=r"invalid partition; correct launcher\.sbatch_header"):
        submit(played.job)
    played.command("sbatch", "echo 80")
    assert submit(played.job).number == "80"


def test_a_job_that_may_have_been_submitted_is_not_submitted_again(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "_ANSWER_S", 0.3)
    played.command("sbatch", "exec sleep 60")
    with pytest.raises(MachineError, match="no answer from 'sbatch"):
        submit(played.job)
    with pytest.raises(UserError, match=r"s\.jobs/1 waits for its job's number; .*squeue --me"):
        submit(played.job)


ARRAY = {"SLURM_JOB_ID": "79", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "2"}


@pytest.mark.parametrize(
    ("environ", "name", "more"),
    [({"SLURM_JOB_ID": "77"}, "77", ""), (ARRAY, "77_2", " --array=2")],
)
def test_a_job_is_queued_again_or_followed(
    environ: dict[str, str], name: str, more: str, played: Played
) -> None:
    submit(played.job)
    played.command("scontrol", "exit 0")
    queue_again(played.job.script, environ)
    assert played.asked("scontrol") == [f"scontrol requeue {name}"]
    assert played.numbers(1) == "77\n"
    played.command("scontrol", "echo 'presently disabled' >&2; exit 1")
    queue_again(played.job.script, environ)
    wanted = f"sbatch --parsable --dependency=afterany:{name}{more} {played.job.script}"
    assert played.asked("sbatch")[1:] == [wanted]
    assert played.numbers(1) == "77\n78\n"
    played.state("77_0|RUNNING|None|n1", "77_2|COMPLETED|None|n2", "78_2|PENDING|Dependency|")
    assert find_job(played.job.script) == QueuedJob(
        "77,78", "1 PENDING (Dependency), 1 RUNNING on n1"
    )
