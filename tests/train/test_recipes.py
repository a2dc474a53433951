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
