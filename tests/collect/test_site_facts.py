import json
import logging
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect.launchers import LauncherSettings
from dynamiccl.collect.node_facts import row_columns
from dynamiccl.collect.nodes import Nodes, SiteFacts, agreed, ask_nodes, environment, exclusive
from dynamiccl.datasets.schema import MEASUREMENTS
from tests.fakes.nvml.build import build_fake_nvml

NODE: dict[str, Any] = {
    "host": "n1",
    "nvml_error": None,
    "num_gpus": 8,
    "gpu": "FAKE H100",
    "driver_version": "999.10",
    "compute_capability": 9.0,
    "nvlink_generation": 4,
    "nvlinks_per_gpu": 18,
    "nvswitch": True,
    "mig": False,
    "cpu_vendor": "intel",
    "nic_kind": "infiniband",
    "nic_gbits_per_s": 400.0,
    "nics_per_node": 8,
    "node_fingerprint": "gpu=FAKE H100*8;mig=0;nic=infiniband*8",
}
COLUMNS = row_columns(NODE)
LOCAL = Nodes(LauncherSettings())


class Answers(Nodes):
    """Nodes that answer what a test says."""

    def __init__(self, *lines: str) -> None:
        super().__init__(LauncherSettings())
        self._lines = list(lines)

    def ask(self, argv: object, num_nodes: int) -> list[str]:  # noqa: ARG002
        return self._lines


def test_nodes_that_agree_give_columns() -> None:
    found = agreed([NODE, NODE | {"host": "n2"}])
    assert found == COLUMNS
    assert found.keys() <= {field.name for field in MEASUREMENTS}


def test_what_nodes_differ_in_is_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    found = agreed([NODE, NODE | {"driver_version": "1.0", "nic_kind": None}])
    assert found.keys() == COLUMNS.keys() - {"driver_version", "nic_kind"}
    assert "the nodes differ in driver_version, nic_kind: not recorded" in caplog.text


def test_mig_on_one_node_is_mig() -> None:
    for other in (NODE | {"mig": True}, NODE | {"mig": None}):
        assert agreed([NODE, other]).get("mig") == other["mig"]
    assert agreed([NODE | {"mig": None}, NODE | {"mig": True}])["mig"] is True
    assert "mig" not in agreed([NODE, NODE | {"mig": None}])


def test_no_node_says_nothing() -> None:
    assert agreed([]) == {}


def test_nodes_are_asked_and_other_lines_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Answers("srun: step created", json.dumps(NODE), "", json.dumps(NODE | {"host": "n2"}))
    assert ask_nodes(nodes, 2, {}) == SiteFacts(COLUMNS, 8)
    assert caplog.text == ""


def test_silent_and_garbled_nodes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    strange = json.dumps({**NODE, "colour": "red"})
    assert ask_nodes(Answers("{torn", strange, json.dumps(NODE)), 3, {}).num_gpus == 8
    assert "only 1 of 3 nodes reported their facts" in caplog.text
    assert caplog.text.count("no facts about a node, but: {") == 2
    assert ask_nodes(Answers(), 1, {}) == SiteFacts({}, None)


def test_number_of_gpus_is_known_when_all_have_as_many() -> None:
    lines = [json.dumps(NODE | {"num_gpus": count}) for count in (8, 4)]
    assert ask_nodes(Answers(*lines), 2, {}).num_gpus is None
    assert ask_nodes(Answers(lines[1]), 1, {}).num_gpus == 4


def test_this_node_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build_fake_nvml(tmp_path)))
    monkeypatch.setenv("FAKE_NVML_GPUS", "4")
    monkeypatch.setenv("FAKE_NVML_MIG", "1")
    found = ask_nodes(LOCAL, 1, {})
    assert found.num_gpus == 4
    assert found.columns["gpu"] == "FAKE H100"
    assert found.columns["mig"] is True
    assert "exclusive_node" not in found.columns


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scontrol that prints the file `job` when asked for job 42."""
    fake = tmp_path / "scontrol"
    fake.write_text(f'#!/bin/sh\n[ "$*" = "show job --oneliner 42" ] && cat {tmp_path}/job\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "job"


@pytest.mark.parametrize(
    ("word", "alone"),
    [("NO", True), ("EXCLUSIVE", True), ("OK", False), ("YES", False), ("USER", False)],
)
def test_slurm_says_whether_the_nodes_are_ours_alone(
    word: str, alone: bool, slurm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slurm.write_text(f"JobId=42 JobName=x OverSubscribe={word} Contiguous=0 Licenses=(null)\n")
    assert exclusive({"SLURM_JOB_ID": "42"}) is alone
    found = ask_nodes(Answers(json.dumps(NODE)), 1, {"SLURM_JOB_ID": "42"})
    assert found.columns["exclusive_node"] is alone
    assert found.columns["job_id"] == "42"
    assert ("the nodes are shared with other jobs" in caplog.text) != alone


def test_without_a_job_or_an_answer_nobody_knows(slurm: Path) -> None:
    assert exclusive({}) is None
    slurm.write_text("JobId=42 JobName=x\n")
    assert exclusive({"SLURM_JOB_ID": "42"}) is None
    assert exclusive({"SLURM_JOB_ID": "43"}) is None


def test_job_without_slurms_programs_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert exclusive({"SLURM_JOB_ID": "42"}) is None
    assert "not known whether the nodes are ours alone: cannot start 'scontrol'" in caplog.text


def test_environment_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert environment()["SLURM_JOB_ID"] == "7"
