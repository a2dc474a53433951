"""Recipes: their settings; and docs/add-recipe.md and its file, followed to the letter."""

import json
from dataclasses import asdict
from pathlib import Path

from mlflow import MlflowClient

from dynamiccl.datasets.manifest import Manifest
from dynamiccl.serve.export import export_artifact
from dynamiccl.train.fit import resume
from dynamiccl.train.policy import load_script
from dynamiccl.train.recipe import RECIPES, make_recipe, settable, setting_meanings
from tests.stores import new_store
from tests.train.test_fit import broken_run

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


def test_recipes_are_complete_and_every_setting_has_a_type_and_a_meaning() -> None:
    for name in RECIPES:
        recipe = make_recipe(name)
        assert recipe.name == name
        assert recipe.summary
        assert recipe.abstain_margins == tuple(sorted(recipe.abstain_margins))
    recipe = make_recipe("ddqn-dueling", ["steps=10", "learning_rate=1e-4", "hidden_sizes=8,4"])
    assert (recipe.steps, recipe.learning_rate, recipe.hidden_sizes) == (10, 1e-4, (8, 4))
    meanings = setting_meanings()
    assert all(meanings[name].endswith((".", "none", "empty")) for name in settable())
    assert meanings["steps"] == meanings["steps_per_epoch"] != meanings["batch_size"]
    # Settings are looked at together.
    recipe = make_recipe("a3c-lstm", ["seen_decisions=0", "probe_every=0", "state_units=0"])
    assert (recipe.seen_decisions, recipe.state_units) == (0, 0)
