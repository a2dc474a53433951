"""What Slurm's commands are asked, and how answers are read; shell scripts play them here."""

from pathlib import Path

import pytest

from dynamiccl.errors import MachineError
from dynamiccl.slurm import Element, capture, elements, requeue, submit

FIX = "correct --time"


def command(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n{script}\n', encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def bin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return tmp_path


@pytest.mark.parametrize("answer", ["77", "77;cluster-b"])
def test_submit_keeps_a_jobs_own_variables(
    bin_dir: Path, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_CONF", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "x")
    told = f"env | cut -d= -f1 | grep -E 'SLURM|NCCL' | sort >> {bin_dir}/asked; echo '{answer}'"
    command(bin_dir, "sbatch", told)
    assert submit(Path("/d/x y.sbatch"), "--dependency=afterany:7", fix=FIX) == "77"
    asked = (bin_dir / "asked").read_text(encoding="utf-8").splitlines()
    assert asked == ["--parsable --dependency=afterany:7 /d/x y.sbatch", "NCCL_DEBUG", "SLURM_CONF"]


def test_a_refusal_is_passed_on_and_a_command_that_is_not_there_named(bin_dir: Path) -> None:
    with pytest.raises(MachineError, match="cannot start 'no-squeue'"):
        capture(("no-squeue",), timeout_s=20)
    command(bin_dir, "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    refused = "/d/s: sbatch: error: invalid partition; correct --time"
    with pytest.raises(MachineError, match=refused):
        submit(Path("/d/s"), fix=FIX)
    with pytest.raises(MachineError, match=r"no answer from 'sleep 60' in 0\.2 s"):
        capture(("sleep", "60"), timeout_s=0.2)


def test_elements(bin_dir: Path) -> None:
    command(
        bin_dir,
        "squeue",
        "echo '77_0|RUNNING|None|n[1-2]|/d/a|b.sbatch'; echo '77_1|PENDING|Resources||/d/x'",
    )
    assert elements("77") == (
        Element("77_0", "RUNNING", "None", "n[1-2]", "/d/a|b.sbatch"),
        Element("77_1", "PENDING", "Resources", "", "/d/x"),
    )
    assert (
        (bin_dir / "asked").read_text(encoding="utf-8").startswith("--jobs=77 --noheader --array")
    )


def test_a_forgotten_job_has_no_elements_and_a_silent_controller_is_an_error(bin_dir: Path) -> None:
    fails = "echo 'slurm_load_jobs error: {}' >&2; exit 1"
    command(bin_dir, "squeue", fails.format("Invalid job id specified"))
    assert elements("77") == ()
    command(bin_dir, "squeue", fails.format("Unable to contact slurm controller"))
    with pytest.raises(MachineError, match="nothing about job 77: slurm_load_jobs error: Unable"):
        elements("77")


def test_requeue(bin_dir: Path) -> None:
    command(bin_dir, "scontrol", "exit 0")
    assert requeue("77_1") is None
    assert (bin_dir / "asked").read_text(encoding="utf-8") == "requeue 77_1\n"
    command(bin_dir, "scontrol", "echo 'Access denied' >&2; exit 1")
    assert requeue("77") == "Access denied"


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        ("RUNNING", False),
        ("COMPLETING", False),
        ("REQUEUED", False),
        ("A_STATE_OF_TOMORROW", False),
        ("TIMEOUT", True),
        ("NODE_FAIL", True),
    ],
)
def test_a_state_is_alive_unless_it_is_known_to_be_the_end(state: str, *, ended: bool) -> None:
    assert Element("1", state, "None", "", "s").ended is ended
