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
def test_submit(bin_dir: Path, answer: str) -> None:
    command(bin_dir, "sbatch", f"echo '{answer}'")
    assert submit(Path("/d/x y.sbatch"), fix=FIX) == "77"
    assert (bin_dir / "asked").read_text(encoding="utf-8") == "--parsable /d/x y.sbatch\n"


def test_a_refusal_is_passed_on(bin_dir: Path) -> None:
    command(bin_dir, "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(
        MachineError, match="/d/s: sbatch: error: invalid partition; correct --time"
    ):
        submit(Path("/d/s"), fix=FIX)


def test_without_slurm_the_message_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="cannot start 'sbatch'"):
        submit(Path("/d/s"), fix=FIX)


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


def test_a_job_that_submits_another_keeps_its_own_variables(
    bin_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_CONF", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "x")
    command(bin_dir, "sbatch", "env | cut -d= -f1 | grep -E 'SLURM|NCCL' | sort | xargs")
    submitted = submit(Path("/d/s"), "--dependency=afterany:7", fix=FIX)
    assert submitted == "NCCL_DEBUG SLURM_CONF"
    asked = "--parsable --dependency=afterany:7 /d/s\n"
    assert (bin_dir / "asked").read_text(encoding="utf-8") == asked


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


def test_capture_names_what_is_missing_or_silent() -> None:
    with pytest.raises(MachineError, match="cannot start 'no-squeue'"):
        capture(("no-squeue",), timeout_s=20)
    with pytest.raises(MachineError, match=r"no answer from 'sleep 60' in 0\.2 s"):
        capture(("sleep", "60"), timeout_s=0.2)
