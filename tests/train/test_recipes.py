"""Recipes and their settings."""

import pytest

from dynamiccl.errors import UnknownName, UserError
from dynamiccl.train.recipes import RECIPES, make_recipe


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


@pytest.mark.parametrize("setting", ["lr=1", "steps", "name=x"])
def test_unknown_setting_lists_choices(setting: str) -> None:
    with pytest.raises(UnknownName, match="learning_rate"):
        make_recipe("ddqn-dueling", [setting])


def test_what_is_judged_by_held_calls_does_not_look_ahead_too() -> None:
    assert make_recipe("ddqn-dueling", ["held_calls=8"]).held_calls == 8
    with pytest.raises(UserError, match=r"held_calls=8 .* gamma is 0\.5: --set gamma=0"):
        make_recipe("drqn-lstm", ["held_calls=8"])


@pytest.mark.parametrize("name", ["lambda_switch", "lambda_congestion"])
def test_costs_are_numbers_from_zero_on(name: str) -> None:
    recipe = make_recipe("cql", ["trigger=run", f"{name}=0.1"])
    assert getattr(recipe, name) == 0.1
    for value in ("-0.1", "nan", "inf"):
        with pytest.raises(UserError, match=f"{name}={value} is no cost: --set {name}="):
            make_recipe("cql", ["trigger=run", f"{name}={value}"])


def test_congestion_costs_only_where_a_trigger_tells_it() -> None:
    with pytest.raises(UserError, match=r"lambda_congestion=0\.1 .*--set trigger=RUN_DIRECTORY"):
        make_recipe("cql", ["lambda_congestion=0.1"])


def test_setting_of_the_wrong_type_names_value_and_default() -> None:
    with pytest.raises(UserError, match=r"'many'.*4000"):
        make_recipe("ddqn-dueling", ["steps=many"])
