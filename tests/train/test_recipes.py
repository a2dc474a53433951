"""Recipes and their settings."""

from pathlib import Path

import pytest

from dynamiccl.errors import MissingPath, UserError
from dynamiccl.train.recipe import RECIPES, make_recipe, settable, setting_meanings


def test_every_recipe_is_complete_under_its_own_name() -> None:
    for name in RECIPES:
        recipe = make_recipe(name)
        assert recipe.name == name
        assert recipe.summary
        assert recipe.abstain_margins == tuple(sorted(recipe.abstain_margins))


def test_settings_take_the_type_of_the_default() -> None:
    recipe = make_recipe("ddqn-dueling", ["steps=10", "learning_rate=1e-4", "hidden_sizes=8,4"])
    assert (recipe.steps, recipe.learning_rate, recipe.hidden_sizes) == (10, 1e-4, (8, 4))


def test_every_setting_has_a_meaning() -> None:
    meanings = setting_meanings()
    assert all(meanings[name].endswith((".", "none", "empty")) for name in settable())
    assert meanings["steps"] == meanings["steps_per_epoch"] != meanings["batch_size"]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("ddqn-duelling", [], "ddqn-dueling"),
        *(("cql", [text], "learning_rate") for text in ("lr=1", "stpes", "name=x")),
        ("cql", ["steps"], "--set steps has no value; write --set steps=4000"),
        ("cql", ["hidden_sizes"], "no value; write --set hidden_sizes=128,128"),
        ("cql", ["steps=many"], "steps=many of recipe 'cql' .*valid integer.*default 4000"),
        ("cql", ["dueling=maybe"], "valid boolean.*default True"),
        ("cql", ["lambda_switch=nan"], "lambda_switch=nan of recipe .*finite"),
        (
            "cql",
            ["hidden_sizes=8,0"],
            "hidden_sizes=8,0 of recipe 'cql' .*greater than or equal to 1",
        ),
        ("cql", ["average_decay=1"], "average_decay=1 of recipe .*less than 1.*default 0.995"),
        ("cql", ["hidden_sizes=8,x"], "hidden_sizes=8,x of .*valid integer.*default 128,128"),
        ("drqn-lstm", ["held_calls=8"], r"held_calls=8 .* gamma is 0\.5: --set gamma=0"),
        ("cql", ["lambda_congestion=0.1"], r"lambda_congestion=0\.1 .*--set trigger=RUN_DIRECTORY"),
        ("cql", ["trigger=run", "level_threshold=0.2"], "=0.2 .*take 'threshold-rule'"),
        ("a3c", ["probe_every=24"], "probe_every=24 counts in the state of a job"),
        ("a3c-lstm", ["seen_decisions=0"], "seen_decisions=0 with state_units"),
        ("cql", ["state_units=8"], "state_units=8 is for algorithms that play"),
        ("ddqn-dueling", ["dueling=false"], "dueling=false .*--set action_inputs=false"),
        ("cql", ["split=rows"], "unknown split 'rows' .*shape:1.*choose from size, shape"),
    ],
)
def test_what_cannot_be_set_is_refused_with_value_choices_and_fix(
    name: str, settings: list[str], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        make_recipe(name, settings)


def test_settings_are_looked_at_together() -> None:
    recipe = make_recipe("a3c-lstm", ["seen_decisions=0", "probe_every=0", "state_units=0"])
    assert (recipe.seen_decisions, recipe.state_units) == (0, 0)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing"),
        ("return 7", "returns int"),
        ("return make_recipe('dqn')", r"mine\.py: unknown recipe 'dqn'"),
        (
            "return Recipe(name='mine', summary='', algorithm='DoubleDQN', hidden_sizes=())",
            r"mine\.py: hidden_sizes= of recipe 'mine' .* at least 1 item",
        ),
        (
            "return Recipe(name='mine', summary='', algorithm='DoubleDQN', learning_rte=1e-5)",
            r"mine\.py: .*'learning_rte' \(did you mean 'learning_rate'\?\)",
        ),
    ],
)
def test_a_recipe_of_ones_own_is_checked_as_ours(body: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    with pytest.raises(MissingPath, match="Python file"):
        make_recipe(str(file))
    head = "from dynamiccl.train.recipe import Recipe, make_recipe\ndef recipe():\n"
    file.write_text(f"{head}    {body}\n")
    with pytest.raises(UserError, match=said):
        make_recipe(str(file))
