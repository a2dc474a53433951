"""From the command's options to a sweep that runs or is submitted (real Slurm: tests/cluster)."""

import json
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect import batch, cli, journal
from dynamiccl.collect.batch import RunOptions, batch_script, queue_again, script_path, submit_sweep
from dynamiccl.collect.cli import start_sweep
from dynamiccl.collect.grid import Trial
from dynamiccl.collect.run import Summary
from dynamiccl.collect.schedule import Launch
from dynamiccl.collect.simulated import SimulatorRunner
from dynamiccl.collect.strategies import Outcome, make_strategy
from dynamiccl.collect.sweep import Sweep
from dynamiccl.errors import InvalidSweep, MachineError, MissingPath, UserError
from dynamiccl.libraries import SWEEP_NAME
from tests.collect.benchmark.stand_in import sweep


def options(folder: Path, **more: Any) -> RunOptions:
    return RunOptions(
        sweep_file=folder / "s.toml", out=folder / "out", **{"runner": "simulator", **more}
    )


def start(made: Sweep, folder: Path, **more: Any) -> Summary:
    return start_sweep(made, options(folder, **more))


def test_a_sweep_takes_the_library_that_it_names(tmp_path: Path) -> None:
    made = sweep(runner=f'{{ plugin = "{tmp_path / SWEEP_NAME}" }}')
    with pytest.raises(MissingPath, match=r"dynamiccl-sweep\.so.*make plugin.*runner\.plugin"):
        start(made, tmp_path)
    assert not (tmp_path / "out").exists()


OUT = Path("/data/100% mine")
WHOLE = f"""\
#!/bin/bash
#SBATCH --job-name=grid
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --output="/data/100%% mine/.slurm/grid-%j.out"
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --time=02:00:00
#SBATCH --gpus-per-node=8

# Written by dynamiccl-collect. It resumes the sweep, so it may run any number of times.
exec {sys.executable} -P -m dynamiccl.collect.cli run '/my sweep.toml' --out '/data/100% mine' \
--resume --batch-script '/data/100% mine/.slurm/grid.sbatch'
"""


def script_of(*header: str) -> str:
    table = f"{{ sbatch_header = {json.dumps(header)} }}"
    wanted = RunOptions(sweep_file=Path("/my sweep.toml"), out=OUT)
    return batch_script(sweep(launcher=table), wanted, script_path(OUT, "grid"))


def test_the_whole_script_and_lines_that_are_refused() -> None:
    assert script_of("--time=02:00:00", "#SBATCH --gpus-per-node=8") == WHOLE
    assert script_path(OUT, "h100 night/1") == OUT / ".slurm" / "h100-night-1.sbatch"
    for line in (
        *("time=1", "module load nccl", "--a\nrm -rf /", "-a 1", "--array=1-4"),
        *("--ar 1", "--arr=1-2", "--arra=1-2"),  # getopt takes what is unambiguous
        *("--time=1 --array=1-4", "-A physics --array=1-8", "--exclusive -a 1-4", "-Ha 1-4"),
        "--comment='a",
    ):
        with pytest.raises(InvalidSweep, match=r"one option a line, .* and no --array"):
            script_of(line)
    # A value is no array.
    for line in ("-A alpha -p array", "-Jg", "--comment='no --array' --acctg-freq=9", "-H # -a 1"):
        assert f"#SBATCH {line}\n" in script_of(line)


class Played:
    """Slurm's commands as shell scripts on PATH, and what they were asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "asked").touch()
        self.script = script_path(folder / "out", "grid")
        self.command("sbatch", "echo $((76 + $(grep -c sbatch asked)))")
        self.command("scontrol", "exit 0")
        self.state()

    def command(self, name: str, script: str) -> None:
        path = self.folder / name
        head = f'#!/bin/sh\ncd {self.folder}; echo "{name} $*" >> asked\n'
        path.write_text(f"{head}{script}\n")
        path.chmod(0o755)

    def state(self, *lines: str, script: Path | None = None) -> None:
        shown = "".join(f"{line}|{script or self.script}\n" for line in lines)
        self.command("squeue", f"cat <<'E'\n{shown}E")

    def asked(self, name: str) -> list[str]:
        lines = (self.folder / "asked").read_text().splitlines()
        return [line for line in lines if line.startswith(name)]

    def submit(self, **more: Any) -> dict[str, Any]:
        return submit_sweep(sweep(), options(self.folder, **more))


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    return Played(tmp_path)


def test_submitting_again(played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sweep()
    first = played.submit()
    played.state("77|PENDING|Priority|")
    told = [first[name] for name in ("job", "state", "trials", "trials_done")]
    assert told == ["77", "submitted", 60, 0]
    assert Path(first["script"]).read_text().startswith("#!/bin/bash\n#SBATCH --job-name=grid\n")
    picks = Warned(made, 1)
    monkeypatch.setattr(cli, "make_strategy", lambda *_: picks)
    start(made, tmp_path)
    again = played.submit()
    assert (again["job"], again["state"]) == ("77", "PENDING (Priority)")
    assert (again["trials_done"], again["launches_done"]) == (30, 1)
    played.state("77|COMPLETED|None|n1")
    gone = r"no job of it waits or runs .*/grid-\*\.out\); go on with -"
    with pytest.raises(UserError, match=gone):
        played.submit()
    assert played.submit(resume=True)["job"] == "78"
    start(made, tmp_path, resume=True)
    done = played.submit()
    assert (done["job"], done["state"], done["trials_done"]) == (None, "done", 60)
    assert len(played.asked("sbatch")) == 2


def test_a_job_is_alive_unless_its_end_is_known(played: Played) -> None:
    for line, state in (
        ("RUNNING|None|n[1-2]", "RUNNING on n[1-2]"),
        ("PENDING|PartitionTimeLimit|", "PENDING (PartitionTimeLimit: more than its partition"),
        ("REQUEUED|None|", "REQUEUED"),
        ("A_STATE_OF_TOMORROW|None|", "A_STATE_OF_TOMORROW"),
        *((f"{ended}|None|n1", None) for ended in ("COMPLETED", "NODE_FAIL", "TIMEOUT")),
    ):
        played.state(f"77|{line}")
        found = batch.find(played.script)
        assert found is None if state is None else found and found[1].startswith(state)
        # Another script's job is none of ours.
        played.state(f"77|{line}", script=Path("/elsewhere/s.sbatch"))
        assert batch.find(played.script) is None


def test_the_jobs_number_is_the_last_that_has_a_line(played: Played) -> None:
    for says in ("1234 \\n", "1234\\r\\n", "took 5\\n 1234;gpu \\n", "5\\n1234\\n"):
        played.command("sbatch", f"printf '{says}'")
        assert played.submit()["job"] == "1234"


def test_what_slurm_refuses_is_said(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(said: str, **commands: str | None) -> None:
        for name, script in commands.items():
            played.command(name, script or "")
            if script is None:
                (played.folder / name).unlink()
        with pytest.raises(MachineError, match=said):
            played.submit()

    bad = r"invalid partition; correct launcher\.sbatch_header"
    refused(bad, sbatch="echo 'invalid partition' >&2; exit 1")
    refused(r"sbatch refused .*no lua", sbatch="echo 'no lua' >&2; exit 127")
    with monkeypatch.context() as patched:
        (played.folder / "env").symlink_to("/usr/bin/env")
        (played.folder / "cat").symlink_to("/bin/cat")
        patched.setenv("PATH", str(played.folder))
        refused(r"no sbatch on PATH: .*; run this where Slurm's", sbatch=None)
    monkeypatch.setattr(batch, "_ANSWER_S", 0.3)
    late = r"no answer from Slurm to .*sbatch.*: no end after 0\.3 s"
    refused(late, sbatch="exec sleep 60")
    unheard = "echo 'Unable to contact slurm controller' >&2; exit 1"
    refused("nothing about our jobs: Unable to contact", squeue=unheard)
    monkeypatch.setenv("PATH", str(played.folder))
    refused(r"no answer .*: squeue: No such file", squeue=None)


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


NOTHING = pytest.raises(MachineError, match=r"before anything was measured.*--time")


@pytest.mark.parametrize(
    ("number", "name", "queued", "ends"),
    [
        (1, "SIGUSR1", 1, nullcontext()),
        (1, "SIGTERM", 0, nullcontext()),
        (9, "SIGUSR1", 0, nullcontext()),
        (0, "SIGUSR1", 0, NOTHING),
    ],
)
def test_a_job_is_queued_again_where_its_time_limit_left_work(
    number: int, name: str, queued: int, ends: Any, played: Played, monkeypatch: Any
) -> None:
    made = sweep()
    warned = Warned(made, number, name)
    monkeypatch.setattr(cli, "make_strategy", lambda *_: warned)
    with ends:
        start(made, played.folder, batch_script=played.script)
    assert played.asked("scontrol") == ["scontrol requeue 77"] * queued


@pytest.mark.parametrize("number", [0, 1])
def test_a_job_that_measured_something_is_queued_again(
    number: int, played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: SimulatorRunner, launch: Launch, progress: Callable[[int], None]) -> Any:
        if launch.round == number:
            raise MachineError("no node answers")
        return run(self, launch, progress)

    run = SimulatorRunner.run
    monkeypatch.setattr(SimulatorRunner, "run", fails)
    with pytest.raises(MachineError, match="no node answers"):
        start(sweep(), tmp_path, batch_script=played.script)
    assert played.asked("scontrol") == ["scontrol requeue 77"] * number


@pytest.mark.parametrize("locale", ["", "LC_ALL=POSIX "])
def test_another_job_follows(locale: str, played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LC_ALL", raising=False)
    for name in ("SLURM_RESTART_COUNT", "SLURM_CONF", "NCCL_DEBUG", *(["LC_ALL"] * bool(locale))):
        monkeypatch.setenv(name, "POSIX")
    played.command("scontrol", "echo 'presently disabled' >&2; exit 1")
    variables = "echo env $(env | grep -E '^(SLURM|NCCL|LC_ALL)' | sort) >> asked"
    played.command("sbatch", f"{variables}; echo 78")
    queue_again(played.script, {"SLURM_JOB_ID": "77"})
    assert played.asked("scontrol") == ["scontrol requeue 77"]
    wanted = f"sbatch --parsable --dependency=afterany:77 {played.script}"
    assert played.asked("sbatch") == [wanted]
    assert played.asked("env") == [f"env {locale}NCCL_DEBUG=POSIX SLURM_CONF=POSIX"]


def test_a_job_that_another_call_submits_meanwhile_is_found(played: Played) -> None:
    line = f"77|RUNNING|None|n1|{played.script}"
    played.command("squeue", f"[ $(grep -c squeue asked) = 1 ] || echo '{line}'")
    journal.journal_folder(sweep(), played.folder / "out").mkdir(parents=True)  # it has begun
    told = played.submit()
    assert (told["job"], told["state"]) == ("77", "RUNNING on n1")
    assert not played.asked("sbatch")


def test_two_calls_at_once_submit_one_job(played: Played) -> None:
    shown = f"[ $has = 0 ] || echo '77|PENDING|None||{played.script}'"
    played.command("squeue", f"has=$(grep -c sbatch asked); sleep 0.5; {shown}")
    played.command("sbatch", "sleep 0.5; echo 77")

    def submit(_: int) -> str:
        try:
            return str(played.submit()["job"])
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(submit, range(2)))
    assert len(played.asked("sbatch")) == 1
    assert "77" in told
    assert all(one == "77" or "is submitting this sweep" in one for one in told)
    with journal.hold(played.script.with_suffix("")):  # what only asks is told all the same
        assert played.submit()["job"] == "77"


def test_what_is_lacking_is_told_before(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamiccl.collect.launch.find_spec", lambda _: None)
    made = sweep(algorithms="[]", interference='[{ kind = "matmul", level = 96 }]')
    with pytest.raises(MachineError, match="'matmul' runs torch, which is not installed"):
        submit_sweep(made, options(played.folder))
    assert not played.asked("sbatch")
