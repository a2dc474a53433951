"""Recipes: complete, frozen training set-ups, by name.

`dynamiccl-train list` shows them; `--set key=value` changes a field for one run and is recorded. A
recipe can also be a file of one's own (`docs/add-recipe.md`).
"""

import importlib.util
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from dynamiccl.errors import MissingPath, UnknownName, UserError
from dynamiccl.train.recipe import Recipe, setting_text

#: What a recipe is, and not a setting of it.
_FIXED: Final = ("name", "summary", "source", "algorithm")


#: Double DQN with a dueling head, feed-forward over the flattened window.
_DDQN_DUELING: Final = Recipe(
    name="ddqn-dueling",
    summary="double DQN, dueling head in log time, MLP over window and context",
    algorithm="DoubleDQN",
)
#: A Gaussian process over configs, with NCCL's cost model as its mean; not RL.
_GAUSSIAN_PROCESS: Final = Recipe(
    name="gaussian-process",
    summary="Gaussian process over NCCL's own costs: for tables of quiet systems",
    algorithm="GaussianProcess",
    use_calls=False,
)
#: Asynchronous advantage actor-critic (Mnih et al. 2016), in the simulator.
_A3C: Final = Recipe(
    name="a3c",
    summary="A3C: actors that play in simulated worlds, one policy",
    algorithm="A3C",
    action_inputs=True,
    places="b300-nvlink:decode+lora:busy-host,b300-nvlink:moe:busy-host",
    # Rounds of 28 ms, and states that last for seconds.
    gamma=0.9,
    num_steps=20,
    # Longer than states last, so that first uses of algorithms are the few that they are.
    episode_rounds=400,
    # An LSTM takes as long for 32 jobs as for 8: most of it is the way from key to key.
    jobs=32,
    learning_rate=0.004,
    average_decay=0.98,
    entropy_start=0.02,
    steps=2_000,
    num_members=1,
    unanimous=False,
    # Of log odds, not of log time.
    abstain_margins=(0.0, 0.2, 0.5, 1.0),
    warm_margin=0.0,
)
#: As a3c, with a state that lives as long as a job (Mnih et al. 2016, section 5.6).
_A3C_LSTM: Final = replace(
    _A3C,
    name="a3c-lstm",
    summary="A3C with an LSTM over all keys of a job, its state as old as the job",
    state_units=64,
    probe_every=(0, 24, 48, 96),
)
_OURS: Final = (
    _DDQN_DUELING,
    # A head that has actions as inputs, over NCCL's own costs.
    replace(
        _DDQN_DUELING,
        name="ddqn-actions",
        summary="double DQN, actions as inputs beside NCCL's own costs: for sweeps",
        action_inputs=True,
        use_calls=False,
    ),
    # Recurrent double DQN (Hausknecht and Stone 2015) over the window of calls.
    Recipe(
        name="drqn-lstm",
        summary="recurrent double DQN: LSTM over the window, dueling, 3-step returns",
        algorithm="DoubleDQN",
        window_encoder="lstm",
        gamma=0.5,
        num_steps=3,
        entropy_start=0.01,
    ),
    # Conservative Q-learning (Kumar et al. 2020), for logs of exploration.
    Recipe(
        name="cql",
        summary="conservative Q-learning, dueling, MLP: for adaptive or deployed logs",
        algorithm="DiscreteCQL",
        conservative_weight=0.1,
        gamma=0.5,
        num_steps=3,
        entropy_start=0.01,
    ),
    # Behaviour cloning: the most frequent action of the data, as an offline baseline.
    Recipe(
        name="bc",
        summary="behaviour cloning: the action that the data took most; a baseline",
        algorithm="DiscreteBC",
        num_members=1,
    ),
    _GAUSSIAN_PROCESS,
    # The manual approach to interference: two tables and a threshold.
    replace(
        _GAUSSIAN_PROCESS,
        name="threshold-rule",
        summary="two tables and a threshold, on a Trigger's level: what one would try by hand",
        level_threshold=0.15,
    ),
    _A3C,
    _A3C_LSTM,
    # IMPALA (Espeholt et al. 2018), as in mvfst-rl (Sivakumar et al. 2019).
    replace(
        _A3C_LSTM,
        name="impala-lstm",
        summary="IMPALA with V-trace: actors play and one learner learns, LSTM as in a3c-lstm",
        algorithm="IMPALA",
    ),
)
RECIPES: Final[Mapping[str, Recipe]] = {each.name: each for each in _OURS}


def make_recipe(name: str, settings: Sequence[str] = ()) -> Recipe:
    """The recipe called `name`, with `key=value` settings applied.

    Raises UnknownName (recipe or key, with the choices) and UserError (a value of the wrong type or
    out of its bounds, or two that exclude each other).
    """
    if name not in RECIPES and not name.endswith(".py"):
        raise UnknownName("recipe", name, [*RECIPES, "FILE.py"])
    recipe = RECIPES[name] if name in RECIPES else recipe_of_file(Path(name))
    changed: dict[str, Any] = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        if key not in settable():
            raise UnknownName("recipe setting", key, settable(), where=f"--set {setting}")
        if not separator:
            value = setting_text(getattr(recipe, key))
            raise UserError(f"--set {key} has no value; write --set {key}={value}")
        changed[key] = text
    return replace(recipe, **changed)


def settable() -> list[str]:
    """The names that `--set` takes."""
    return [f.name for f in fields(Recipe) if f.name not in _FIXED]


def setting_meanings() -> dict[str, str]:
    """Setting -> its meaning: the comment above it in recipe.py, which may be above several."""
    found: dict[str, str] = {}
    comment: list[str] = []
    is_over = False
    for line in map(str.strip, inspect.getsource(Recipe).splitlines()):
        if line.startswith("#:"):
            comment, is_over = ([] if is_over else comment) + [line[2:].strip()], False
        elif field := re.match(r"(\w+): ", line):
            found[field[1]], is_over = " ".join(comment), True
    return found


def recipe_of_file(path: Path) -> Recipe:
    """The recipe that a Python file's function `recipe` returns; the file is run.

    Raises MissingPath, and UserError for a file that fails or has no such function.
    """
    if not path.is_file():
        raise MissingPath("recipe", path, "give the name of a recipe, or a Python file with one")
    spec = importlib.util.spec_from_file_location(f"dynamiccl_recipe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        made = module.recipe()
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except Exception as error:  # whatever somebody's file may raise is told with its name
        raise UserError(f"{path} gives no recipe: {type(error).__name__}: {error}") from error
    if not isinstance(made, Recipe):
        raise UserError(f"{path}: recipe() returns {type(made).__name__}, not a Recipe")
    return replace(made, source=str(path.resolve()))
