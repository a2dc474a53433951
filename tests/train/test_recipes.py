"""Recipes and their settings."""

from dataclasses import fields
from pathlib import Path

import pytest

from dynamiccl.errors import UnknownName, UserError
from dynamiccl.train.bounds import bounds_of, check_bounds
from dynamiccl.train.recipe import Recipe
from dynamiccl.train.recipes import RECIPES, make_recipe, settable, setting_meanings


def test_every_recipe_is_complete_under_its_own_name() -> None:
    for name in RECIPES:
        recipe = make_recipe(name)
        assert recipe.name == name
        assert recipe.summary
        assert recipe.abstain_margins == tuple(sorted(recipe.abstain_margins))


def test_settings_take_the_type_of_the_default() -> None:
    recipe = make_recipe("ddqn-dueling", ["steps=10", "learning_rate=1e-4", "hidden_sizes=8,4"])
    assert (recipe.steps, recipe.learning_rate, recipe.hidden_sizes) == (10, 1e-4, (8, 4))


def test_unknown_recipe_lists_choices() -> None:
    with pytest.raises(UnknownName, match="ddqn-dueling"):
        make_recipe("ddqn-duelling")


@pytest.mark.parametrize("setting", ["lr=1", "stpes", "name=x"])
def test_unknown_setting_lists_choices(setting: str) -> None:
    with pytest.raises(UnknownName, match="learning_rate"):
        make_recipe("ddqn-dueling", [setting])


@pytest.mark.parametrize(
    ("setting", "fix"), [("steps", "steps=4000"), ("hidden_sizes", "hidden_sizes=128,128")]
)
def test_a_setting_without_a_value_is_told_how_to_write_it(setting: str, fix: str) -> None:
    with pytest.raises(UserError, match=f"--set {setting} has no value; write --set {fix}"):
        make_recipe("ddqn-dueling", [setting])


def test_every_setting_has_a_meaning() -> None:
    meanings = setting_meanings()
    assert all(meanings[name].endswith((".", "none", "empty")) for name in settable())
    assert meanings["steps"] == meanings["steps_per_epoch"] != meanings["batch_size"]


def test_what_is_judged_by_held_calls_does_not_look_ahead_too() -> None:
    assert make_recipe("ddqn-dueling", ["held_calls=8"]).held_calls == 8
    with pytest.raises(UserError, match=r"held_calls=8 .* gamma is 0\.5: --set gamma=0"):
        make_recipe("drqn-lstm", ["held_calls=8"])


@pytest.mark.parametrize("name", ["lambda_switch", "lambda_congestion"])
def test_costs_are_numbers_from_zero_on(name: str) -> None:
    recipe = make_recipe("cql", ["trigger=run", f"{name}=0.1"])
    assert getattr(recipe, name) == 0.1
    for value in ("-0.1", "nan", "inf"):
        with pytest.raises(UserError, match=f"{name}={value} of recipe .* is out of bounds"):
            make_recipe("cql", ["trigger=run", f"{name}={value}"])


def test_congestion_costs_only_where_a_trigger_tells_it() -> None:
    with pytest.raises(UserError, match=r"lambda_congestion=0\.1 .*--set trigger=RUN_DIRECTORY"):
        make_recipe("cql", ["lambda_congestion=0.1"])


def test_a_threshold_is_for_a_policy_that_reads_levels() -> None:
    with pytest.raises(UserError, match=r"level_threshold=0\.2 .*take 'threshold-rule'"):
        make_recipe("cql", ["trigger=run", "level_threshold=0.2"])


def test_setting_of_the_wrong_type_names_value_and_default() -> None:
    with pytest.raises(UserError, match=r"'many'.*4000"):
        make_recipe("ddqn-dueling", ["steps=many"])


NUMBERS = sorted(
    f.name
    for f in fields(Recipe)
    if isinstance(f.default, int | float | tuple) and not isinstance(f.default, bool)
)


def test_every_number_of_a_recipe_has_bounds() -> None:
    assert sorted(bounds_of(Recipe)) == NUMBERS
    for recipe in RECIPES.values():
        check_bounds(recipe, "ours")


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_out_of_bounds_are_refused_with_the_bounds(name: str) -> None:
    bounds = bounds_of(Recipe)[name]
    for value in (bounds.low - 1, bounds.high + 1):
        text = f"{value:.0f}"
        with pytest.raises(UserError) as caught:
            make_recipe("ddqn-dueling", [f"{name}={text}"])
        said = str(caught.value)
        assert said.startswith(f"{name}={text}")
        assert str(bounds) in said
        assert "recipe 'ddqn-dueling'" in said


def test_bounds_hold_for_a_recipe_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dynamiccl.train.recipes import Recipe\n"
        "def recipe():\n"
        "    return Recipe(name='mine', summary='', algorithm='DoubleDQN', hidden_sizes=())\n"
    )
    with pytest.raises(UserError, match=r"hidden_sizes of recipe 'mine' .* is an empty list"):
        make_recipe(str(file))
