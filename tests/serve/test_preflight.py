"""The pre-flight: what each rank says, and what is made of it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.errors import MachineError, UserError
from dynamiccl.serve.plugin_index import PluginIndex
from dynamiccl.serve.preflight import compare
from tests.cli.conftest import Shell, refused

SAID: dict[str, Any] = {
    "plugin_version": "0.1.0",
    "plugin_sha256": "p",
    "loads": True,
    "fingerprint": "gpu=H100*8;mig=0;nic=infiniband*8;nccl=22809",
    "artifact_sha256": "a",
    "system": "box",
    "num_ranks": 4,
}


def line(rank: int, **other: Any) -> str:
    return f"rank {rank} {json.dumps({**SAID, 'host': f'n{rank // 2}', **other})}"


def test_ranks_that_are_alike_agree() -> None:
    noise = ["srun: job 12 queued", "", "1: " + line(1)]
    agreed = compare([line(3), line(0), *noise, line(2)])
    assert (agreed.num_ranks, agreed.artifact_sha256, agreed.system) == (4, "a", "box")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"artifact_sha256": "b"}, "artifact_sha256 is 'b' on n1 (rank 3) and 'a' on n0, n1"),
        ({"fingerprint": "gpu=A100*8"}, "fingerprint is 'gpu=A100*8' on n1 (rank 3)"),
        ({"loads": False}, "loads is 'False' on n1"),
        ({"plugin_sha256": "q"}, "plugin_sha256 is 'q'"),
        ({"plugin_version": "9"}, "plugin_version is '9'"),
    ],
)
def test_one_that_differs_is_named_with_what_it_has(other: dict[str, Any], said: str) -> None:
    with pytest.raises(MachineError) as error:
        compare([line(0), line(1), line(2), line(3, **other)])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"loads": False}, "loads on no rank"),
        ({"system": None}, "does not know their machine"),
        ({"artifact_problem": "it is cut off", "artifact_sha256": None}, "it is cut off"),
    ],
)
def test_all_may_be_alike_and_of_no_use(other: dict[str, Any], said: str) -> None:
    with pytest.raises(MachineError, match=said):
        compare([line(rank, **other) for rank in range(4)])


def test_silent_ranks_are_named() -> None:
    with pytest.raises(MachineError, match="2 of 4 ranks reported; missing: 1, 3"):
        compare([line(0), line(2)])
    with pytest.raises(MachineError, match=r"5 of 4 ranks .* one from elsewhere did"):
        compare([line(rank) for rank in range(5)])


def test_what_is_no_list_of_ranks_is_wrong_input() -> None:
    with pytest.raises(UserError, match="no line 'rank N"):
        compare(["hello"])
    with pytest.raises(UserError, match="line of rank 0 is cut off"):
        compare(["rank 0 {nonsense}"])


def test_each_rank_says_and_one_command_compares(
    artifact: Path, plugin_path: Path, libnccl: Path, shell: Shell, tmp_path: Path
) -> None:
    """Two processes as a launcher starts them, their lines through a file and through a pipe."""
    options = [str(artifact), "--plugin", str(plugin_path), "--nccl", str(libnccl)]
    assert shell("dynamiccl-deploy", "bind", *options).code == 0
    command = [sys.executable, "-m", "dynamiccl.serve.cli", "doctor"]
    lines = ""
    for rank in ("0", "1"):
        env = {**os.environ, "SLURM_PROCID": rank, "SLURM_NTASKS": "2"}
        ran = subprocess.run(
            [*command, "--all-ranks", *options], env=env, capture_output=True, text=True, check=True
        )
        assert ran.stderr == ""
        lines += ran.stdout
    assert [text.split()[:2] for text in lines.splitlines()] == [["rank", "0"], ["rank", "1"]]
    (tmp_path / "ranks").write_text(lines)
    said = shell("dynamiccl-deploy", "doctor", "--compare", "ranks", "--json").json
    assert said["artifact_sha256"] == PluginIndex.read(artifact).sha256
    piped = subprocess.run(
        [*command, "--compare", "-"], input=lines, capture_output=True, text=True, check=True
    )
    assert piped.stdout == (
        f"2 ranks are alike: {said['system']}, artifact {said['artifact_sha256'][:16]}\n"
    )


def test_rank_outside_of_a_launcher_is_wrong_usage(
    artifact: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    doctor = ("dynamiccl-deploy", "doctor")
    assert "no launcher says" in refused(shell(*doctor, "--all-ranks", artifact), 2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("DYNAMICCL_ARTIFACT", raising=False)
    assert "no artifact to compare" in refused(shell(*doctor, "--all-ranks"), 2)
    assert "give a file, or -" in refused(shell(*doctor, "--compare", "gone"), 2)
