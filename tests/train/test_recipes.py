"""Recipes and their settings."""

from dynamiccl.train.recipe import RECIPES, make_recipe, settable, setting_meanings


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
