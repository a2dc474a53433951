"""`dynamiccl-train promote`: only what a gate let through becomes the champion."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from mlflow import MlflowClient

from dynamiccl.datasets.manifest import Manifest
from dynamiccl.train import tracking
from tests.cli.conftest import Done, Shell, refused
from tests.cli.test_gate import fresh_data
from tests.stores import new_store

Promote = Callable[..., Done]
Gate = Callable[[str, float], Path]


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return new_store(tmp_path)


@pytest.fixture
def run_id(policy: Path, uri: str) -> str:
    """A run with the hand-made policy."""
    return made_run(policy, uri)


@pytest.fixture
def promote(shell: Shell) -> Promote:
    return partial(shell, "dynamiccl-train", "promote")


@pytest.fixture
def gate(shell: Shell, run_id: str, tmp_path: Path) -> Gate:
    """Judge the run by fresh runs in which the configs gain so much."""

    def judge(name: str, gain: float) -> Path:
        data = fresh_data(tmp_path / f"{name}-fresh", gain)
        words = ("--data", data, "--policy", run_id, "--out", name)
        assert shell("dynamiccl-evaluate", "gate", *words, "--json").code == 0
        return tmp_path / name

    return judge


def champion(uri: str) -> str | None:
    models = MlflowClient(uri).search_registered_models()
    version = models[0].aliases.get(tracking.CHAMPION) if models else None
    return None if version is None else str(version)


def made_run(policy: Path, uri: str) -> str:
    with tracking.open_run(uri, "x", "hand-made") as run:
        run.log_folder(policy, "policy")
    tracking.register(uri, run.run_id, tracking.CANDIDATE)
    return run.run_id


def test_gated_champions(run_id: str, uri: str, gate: Gate, promote: Promote, shell: Shell) -> None:
    gated = gate("gated", 0.3)
    found = promote(run_id, "--gated", gated, "--json").json
    assert (found["passed_bins"], found["version_before"]) == (2, None)
    client = MlflowClient(uri)
    champion = client.get_model_version_by_alias("dynamiccl", "champion")
    assert (str(champion.version), champion.run_id) == (found["version"], run_id)
    assert champion.tags == {"gate": "passed 2 size bins"}
    candidate = client.get_model_version_by_alias("dynamiccl", "candidate")
    assert candidate.version != champion.version  # the policy as it was trained
    held_back = Manifest.read(tracking.policy_directory("models:/dynamiccl@champion", uri))
    assert held_back == Manifest.read(gated)
    exported = shell("dynamiccl-deploy", "export", found["policy"], "--out", "a", "--json").json
    assert exported["tables"][0]["acting"] == 2
    for name in (run_id, "models:/dynamiccl@candidate"):
        again = promote(name, "--gated", gated, "--json").json
        assert again == {**found, "version_before": found["version"]}
    said = refused(promote(gated, "--gated", gated), 2)
    assert f"{gated} is no run, and a champion is a version of one: give the run's id" in said


def test_a_former_champion_can_come_back(run_id: str, gate: Gate, promote: Promote) -> None:
    first = gate("first", 0.3)
    second = gate("second", 0.5)
    one = promote(run_id, "--gated", first, "--json").json
    two = promote(run_id, "--gated", second, "--json").json
    assert (two["version_before"], two["version"] != one["version"]) == (one["version"], True)
    for found, folder in [(one, first), (two, second)]:
        assert Manifest.read(Path(found["policy"])) == Manifest.read(folder)
    back = promote(run_id, "--gated", first)
    assert f"champion is version {one['version']}, acts in 2 size bins (before: " in back.out


def test_what_no_gate_let_through_is_refused(
    run_id: str, uri: str, gate: Gate, promote: Promote, tmp_path: Path
) -> None:
    ungated = tmp_path / "ungated"
    shutil.copytree(tracking.policy_directory(run_id, uri), ungated)
    for folder in (gate("nothing", 0.0), ungated):
        said = refused(promote(run_id, "--gated", folder), 2)
        assert f"no gate let the policy of {folder} act in any size bin" in said
        assert f"gate --data FRESH --policy {run_id}" in said
    assert champion(uri) is None


def test_a_verdict_on_another_policy_is_refused(
    run_id: str, uri: str, policy: Path, gate: Gate, promote: Promote, tmp_path: Path
) -> None:
    gated = gate("gated", 0.3)
    other = tmp_path / "other"
    shutil.copytree(policy, other)
    with (other / "policy.pt").open("ab") as file:
        file.write(b"\0")
    Manifest.read_unchecked(other).write(other)
    another = made_run(other, uri)
    said = refused(promote(another, "--gated", gated), 2)
    assert f"is not about the policy of run '{another}'" in said
    assert "no policy manifest at gone" in refused(promote(run_id, "--gated", "gone"), 2)
    assert "id=no-such-run not found" in refused(promote("no-such-run", "--gated", gated), 2)
