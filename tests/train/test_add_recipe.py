"""docs/add-recipe.md and its file, followed to the letter."""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.gate import pass_gate, write_gated
from dynamiccl.evaluate.report import make_report
from dynamiccl.serve.export import export_artifact
from dynamiccl.serve.table import DecisionTable
from dynamiccl.train.fit import resume
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipe import make_recipe
from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414
from tests.data_sets import SWEEP, make_data
from tests.stores import new_store
from tests.train.runs import broken_run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "add-recipe.md"
FEW = ["steps=60", "steps_per_epoch=20", "num_members=2", "hidden_sizes=16"]


@pytest.fixture
def attention(tmp_path: Path) -> Path:
    """The page's file, where a user has a copy of it."""
    path = tmp_path / "attention.py"
    path.write_text((ROOT / "examples" / "attention.py").read_text(encoding="utf-8"))
    assert len(path.read_text().splitlines()) < 60
    return path


def test_one_file_gets_tracking_resume_evaluation_gate_and_export(
    attention: Path, data_dir: Path, tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    recipe = make_recipe(str(attention), FEW)
    assert json.loads(json.dumps(recipe.to_json()))["source"] == str(attention)

    broken = broken_run(data_dir, uri, recipe, at=20)
    assert MlflowClient(uri).get_run(broken).data.params["window_encoder"] == "attention"
    summary = resume(data_dir, broken, tracking_uri=uri)
    directory = Path(summary.run_directory)
    assert (directory / "recipe.py").read_text() == attention.read_text()
    policy = directory / "policy"
    assert Manifest.read(policy).recipe == "attention"
    report = make_report(data_dir, [("policy", policy)], tmp_path / "report")
    assert set(next(iter(report.told["systems"].values()))["policies"]) >= {"policy", "oracle"}
    fresh = SWEEP.replace('name = "tiny"', 'name = "fresh"').replace("cycles = 3", "cycles = 6")
    gated = pass_gate(TorchPolicy.load(policy), read(make_data(tmp_path / "fresh", fresh)))
    write_gated(gated, policy, tmp_path / "gated")
    assert gated.cells
    artifact = export_artifact(tmp_path / "gated", tmp_path / "artifact").directory
    tables = [DecisionTable.read(path) for path in (artifact / "tables").rglob("*.*")]
    assert tables
