"""Recipes: complete, frozen training set-ups, by name or in a file (docs/add-recipe.md)."""

import importlib.util
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from dynamiccl.datasets.splits import split_by
from dynamiccl.errors import MissingPath, UnknownName, UserError

ONLINE: Final = ("A3C", "IMPALA")
CAUTIOUS: Final = ("GaussianProcess",)

T = TypeVar("T")
Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0, le=1e6)]
Bound = Annotated[float, Field(gt=0, le=1e6)]
Steps = Annotated[int, Field(ge=1, le=10**8)]


def _parts(value: object) -> object:
    return value.split(",") if isinstance(value, str) else value


Listed = Annotated[tuple[T, ...], Field(min_length=1), BeforeValidator(_parts)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(allow_inf_nan=False, extra="forbid"))
class Recipe:
    """A training set-up; comments of fields are what `dynamiccl-train list` shows."""

    name: str
    summary: str
    #: The file that it comes from, when it is not one of ours.
    source: str = ""
    #: d3rlpy's DoubleDQN, DiscreteCQL or DiscreteBC; or GaussianProcess, A3C or IMPALA.
    algorithm: str
    #: How the window is read: mlp (as it is), lstm or cnn.
    window_encoder: str = "mlp"
    #: Whether value and advantage have heads of their own.
    dueling: bool = True
    #: Whether actions are inputs of the head, with NCCL's own costs, and not an output each. Only
    #: where the data hold costs; of actors always.
    action_inputs: bool = False
    #: Share of a batch whose costs are hidden, so that a head learns to do without.
    cost_dropout: Share = 0.1
    #: Discount of the next call of the task key; 0 in static sweeps.
    gamma: Share = 0.0
    #: Calls whose rewards are summed before a value is asked; 1 where gamma is 0.
    num_steps: Annotated[int, Field(ge=1, le=100)] = 1
    #: Reward calls of jobs by the mean over at most so many calls from them on under the same
    #: action: a change of config costs once. In place of looking ahead, so only where gamma is 0.
    held_calls: Annotated[int, Field(ge=1, le=10_000)] = 1
    #: Costs beside a call's time, in units of NCCL's default: of a change of config, and of each
    #: unit of a Trigger's interference level (0.5: it took half as long again).
    lambda_switch: Weight = 0.0
    lambda_congestion: Weight = 0.0
    #: Weight of CQL's conservative loss.
    conservative_weight: Weight = 0.0
    #: Weight of the entropy in the loss, at the first and at the last gradient step.
    entropy_start: Weight = 0.0
    entropy_end: Weight = 0.0
    #: At the first gradient step; it falls to 0 along a cosine.
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-3
    #: Steps of calls and sweeps in a batch.
    batch_size: Annotated[int, Field(ge=2, le=1 << 16)] = 256
    #: Whether half of a batch are calls of jobs, where there are any.
    use_calls: bool = True
    #: Run directory or file of a Trigger, which tells the policy the interference of calls, in
    #: training and deployed; empty = unknown.
    trigger: str = ""
    #: Gradient steps in all, and between two looks at the validation bins.
    steps: Steps = 4_000
    steps_per_epoch: Steps = 200
    #: Units of each layer of the MLP over window and context.
    hidden_sizes: Listed[Annotated[int, Field(ge=1, le=1 << 14)]] = (128, 128)
    #: Units of an LSTM with a state as old as the job, for algorithms that play; 0 = none.
    state_units: Annotated[int, Field(ge=0, le=1 << 12)] = 0
    #: Networks side by side; what they differ by tells how sure they are.
    num_members: Annotated[int, Field(ge=1, le=100)] = 3
    #: How strongly rare (system, collective) groups are favoured: 1 = all equally often.
    balance: Share = 1.0
    #: Decay a step of the averaged weights that are validated and exported: single weights swing by
    #: more than the configs differ.
    average_decay: Annotated[float, Field(ge=0, lt=1)] = 0.995
    #: Validation regrets (fractions) that count as equal; the later checkpoint wins.
    checkpoint_tolerance: Share = 0.002
    #: Gradient steps between updates of the target network.
    target_update_interval: Steps = 500
    #: Margins in log time to choose from on validation: a smaller predicted gain abstains.
    abstain_margins: Listed[Share] = (0.02, 0.03, 0.05)
    #: Whether every member has to gain more than margin and noise band, or their mean the margin.
    unanimous: bool = True
    #: The margin, for the mean of the members, where there are calls to go by.
    warm_margin: Share = 0.02
    #: What is held out for validation and test: octaves of sizes, whole group shapes (shape),
    #: systems or runs; shape:1 is the next turn of shapes, after shape:0.
    split: str = "size"
    #: Of a Gaussian process: the share of sizes at which it acts that may be slower than NCCL's own
    #: choice, in worlds like those drawn.
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.01
    #: The interference level above which a Gaussian process takes what is best where calls take 1.5
    #: times as long, else what is best in quiet; 0: it goes by the level itself.
    level_threshold: Weight = 0.0
    #: Places of actors, by commas; actors, one a place at least; jobs of each; rounds of an
    #: episode. `steps` are updates, of `num_steps` rounds.
    places: str = ""
    actors: Annotated[int, Field(ge=1, le=1024)] = 2
    jobs: Annotated[int, Field(ge=1, le=1024)] = 8
    episode_rounds: Annotated[int, Field(ge=1, le=10**6)] = 50
    #: The latest decisions about a key that the critic sees, pending ones too.
    seen_decisions: Annotated[int, Field(ge=0, le=64)] = 4
    #: How much their episodes differ: factor on slowdowns and dwell times at most; spread of ln
    #: times of each algorithm and protocol.
    vary: Annotated[float, Field(ge=1, le=100)] = 1.4
    vary_times: Annotated[float, Field(ge=0, le=2)] = 0.05
    #: IMPALA's bounds of rho and c in V-trace (Espeholt et al. 2018, section 4.1).
    rho_most: Bound = 1.0
    c_most: Bound = 1.0
    #: Decisions of a job, with `state_units`, from one left to NCCL to the next: a config that
    #: feels no interference tells nothing of its end. Actors draw one for each job, and the fastest
    #: in validation is exported; 0 = never.
    probe_every: Listed[Annotated[int, Field(ge=0, le=10**6)]] = (0,)

    @model_validator(mode="wrap")
    @classmethod
    def _say_what_is_wrong(cls, given: ArgsKwargs, make: Any) -> Self:
        try:
            made: Self = make(given)
        except ValidationError as error:
            first = error.errors()[0]
            key, value = str(first["loc"][0]), (given.kwargs or {}).get(str(first["loc"][0]))
            defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
            told = f" (default {setting_text(defaults[key])})" if key in defaults else ""
            if first["type"] == "unexpected_keyword_argument":
                raise UnknownName("recipe setting", key, [f.name for f in fields(cls)]) from error
            raise UserError(
                f"{key}={setting_text(value)} of recipe '{(given.kwargs or {}).get('name')}' "
                f"(--set): {first['msg']}{told}"
            ) from error
        return made

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        split_by(self.split)
        reason = next((why for is_wrong, why in self._conflicts() if is_wrong), None)
        if reason is not None:
            raise UserError(reason)
        return self

    def _conflicts(self) -> list[tuple[bool, str]]:
        probes, algorithm = setting_text(self.probe_every), f"{self.name}'s is {self.algorithm}"
        return [
            (
                self.held_calls > 1 and self.gamma > 0.0,
                f"held_calls={self.held_calls} takes the place of looking ahead, and gamma is "
                f"{self.gamma}: --set gamma=0, or --set held_calls=1",
            ),
            (
                self.level_threshold > 0.0 and self.algorithm not in CAUTIOUS,
                f"level_threshold={self.level_threshold} is for algorithms of times, and "
                f"{algorithm}: leave it at 0, or take 'threshold-rule'",
            ),
            (
                any(self.probe_every) and not self.state_units,
                f"probe_every={probes} counts in the state of a job, and state_units is 0: leave "
                "it at 0, or take 'a3c-lstm' or 'impala-lstm'",
            ),
            (
                self.state_units > 0 and not self.seen_decisions,
                "seen_decisions=0 with state_units, which needs the last: --set seen_decisions=1",
            ),
            (
                self.state_units > 0 and self.algorithm not in ONLINE,
                f"state_units={self.state_units} is for algorithms that play, and {algorithm}: "
                "leave it out, or take 'a3c-lstm'",
            ),
            (
                self.lambda_congestion > 0.0 and not self.trigger,
                f"lambda_congestion={self.lambda_congestion} needs a Trigger's levels: --set "
                "trigger=RUN_DIRECTORY, or leave it at 0",
            ),
            (
                self.action_inputs and not self.dueling,
                "dueling=false is for a head with an output each action: --set action_inputs=false",
            ),
        ]

    def entropy_weight(self, step: int) -> float:
        """Entropy weight at gradient step 1 to `steps`: linear."""
        share = (step - 1) / max(self.steps - 1, 1)
        return self.entropy_start + share * (self.entropy_end - self.entropy_start)


def setting_text(value: object) -> str:
    """A value as `--set` takes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


_FIXED: Final = ("name", "summary", "source", "algorithm")


_GAUSSIAN_PROCESS: Final = Recipe(
    name="gaussian-process",
    summary="Gaussian process over NCCL's own costs: for tables of quiet systems",
    algorithm="GaussianProcess",
    use_calls=False,
)
_A3C: Final = Recipe(
    name="a3c",
    summary="A3C: actors that play in simulated worlds, one policy",
    algorithm="A3C",
    action_inputs=True,
    places="b300-nvlink:decode+lora:busy-host,b300-nvlink:moe:busy-host",
    # Rounds of 28 ms, and states that last for seconds.
    gamma=0.9,
    num_steps=20,
    # Longer than states, so that first uses of algorithms stay few.
    episode_rounds=400,
    # An LSTM takes as long for 32 jobs as for 8.
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
#: Mnih et al. 2016, section 5.6.
_A3C_LSTM: Final = replace(
    _A3C,
    name="a3c-lstm",
    summary="A3C with an LSTM over all keys of a job, its state as old as the job",
    state_units=64,
    probe_every=(0, 24, 48, 96),
)
_OURS: Final = (
    Recipe(
        name="ddqn-dueling",
        summary="double DQN, dueling head in log time beside NCCL's own costs, MLP over the window",
        algorithm="DoubleDQN",
        action_inputs=True,
    ),
    # Hausknecht and Stone 2015.
    Recipe(
        name="drqn-lstm",
        summary="recurrent double DQN: LSTM over the window, dueling, 3-step returns",
        algorithm="DoubleDQN",
        window_encoder="lstm",
        gamma=0.5,
        num_steps=3,
        entropy_start=0.01,
    ),
    # Kumar et al. 2020.
    Recipe(
        name="cql",
        summary="conservative Q-learning, dueling, MLP: for adaptive or deployed logs",
        algorithm="DiscreteCQL",
        conservative_weight=0.1,
        gamma=0.5,
        num_steps=3,
        entropy_start=0.01,
    ),
    Recipe(
        name="bc",
        summary="behaviour cloning: the action that the data took most; a baseline",
        algorithm="DiscreteBC",
        num_members=1,
    ),
    _GAUSSIAN_PROCESS,
    replace(
        _GAUSSIAN_PROCESS,
        name="threshold-rule",
        summary="two tables and a threshold, on a Trigger's level: what one would try by hand",
        level_threshold=0.15,
    ),
    _A3C,
    _A3C_LSTM,
    # Espeholt et al. 2018, as in mvfst-rl (Sivakumar et al. 2019).
    replace(
        _A3C_LSTM,
        name="impala-lstm",
        summary="IMPALA with V-trace: actors play and one learner learns, LSTM as in a3c-lstm",
        algorithm="IMPALA",
    ),
)
RECIPES: Final[Mapping[str, Recipe]] = {each.name: each for each in _OURS}


def make_recipe(name: str, settings: Sequence[str] = ()) -> Recipe:
    """The recipe called `name`, with `key=value` settings; raises UnknownName and UserError."""
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
    """Setting -> the comment above it, which may be above several."""
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
    """What a Python file's function `recipe` returns; raises MissingPath and UserError."""
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
