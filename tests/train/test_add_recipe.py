"""docs/add-recipe.md and its file, followed to the letter."""

import json
from dataclasses import asdict
from pathlib import Path

from mlflow import MlflowClient

from dynamiccl.datasets.manifest import Manifest
from dynamiccl.serve.export import export_artifact
from dynamiccl.train.fit import resume
from dynamiccl.train.policy import load_script
from dynamiccl.train.recipe import make_recipe
from tests.stores import new_store
from tests.train.runs import broken_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "attention.py"
FEW = ["steps=60", "steps_per_epoch=20", "num_members=2", "hidden_sizes=16"]
PLAIN_HEAD = ["dueling=false", "action_inputs=false"]


def test_one_file_gets_tracking_resume_and_export(data_dir: Path, tmp_path: Path) -> None:
    uri, attention = new_store(tmp_path), tmp_path / "attention.py"  # a user's copy
    attention.write_text(EXAMPLE.read_text(encoding="utf-8"))
    assert len(attention.read_text().splitlines()) < 60
    recipe = make_recipe(str(attention), [*FEW, *PLAIN_HEAD])
    assert json.loads(json.dumps(asdict(recipe)))["source"] == str(attention)

    broken = broken_run(data_dir, uri, recipe, at=20)
    assert MlflowClient(uri).get_run(broken).data.params["window_encoder"] == "attention"
    summary = resume(data_dir, broken, tracking_uri=uri)
    directory = Path(summary.run_directory)
    assert (directory / "recipe.py").read_text() == attention.read_text()
    policy = directory / "policy"
    assert Manifest.read(policy).recipe == "attention"
    weights = {name for name in load_script(policy / "policy.pt").state_dict() if ".head." in name}
    assert {name.split(".head.")[1] for name in weights} == {"layer.weight", "layer.bias"}
    assert export_artifact(policy, tmp_path / "artifact").tables
