"""Recipes: named functions that return a complete, frozen training set-up.

`dynamiccl-train list` shows them; `--set key=value` changes a field for one run and is recorded. A
recipe can also be a file of one's own (`docs/new-recipe.md`).
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, Self

from dynamiccl.errors import MissingPath, UnknownName, UserError
from dynamiccl.train.bounds import Within
from dynamiccl.train.recipe_checks import Caution, CostBase, RewardScale, check_recipe

#: What a recipe is, and not a setting of it.
_FIXED: Final = ("name", "summary", "source", "algorithm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A complete training set-up; every field has its unit or meaning beside it."""

    name: str
    summary: str
    #: The file that it comes from, when it is not one of ours.
    source: str = ""
    #: d3rlpy algorithm: DQN, DoubleDQN, DiscreteCQL or DiscreteBC; or GaussianProcess,
    #: ResidualBoosting, A3C or IMPALA.
    algorithm: str
    #: How the window is read: mlp (as it is), lstm, gru or cnn.
    window_encoder: str = "mlp"
    #: Whether value and advantage have heads of their own.
    dueling: bool = True
    #: Whether actions are inputs of the head, with NCCL's own costs of them where the data hold
    #: these (action_head.py), and not an output each.
    action_inputs: bool = False
    #: What a head with actions as inputs learns: how far a time is from NCCL's cost, the time, or
    #: whichever held-out sizes speak for (cost_base.py).
    cost_base: str = CostBase.HELD_OUT.value
    #: Share of the rows of a batch whose costs are hidden, for a head with actions as inputs: so it
    #: learns to do without where NCCL's costs are not known.
    cost_dropout: Annotated[float, Within(0, 1)] = 0.1
    #: Discount of the next call of the task key. Steps of static sweeps end their episodes, so
    #: that it comes to nothing there.
    gamma: Annotated[float, Within(0, 1)] = 0.0
    #: Calls whose rewards are summed before the value of what follows is asked; 1 where gamma is 0.
    num_steps: Annotated[int, Within(1, 100)] = 1
    #: Calls of jobs are rewarded by the mean over the calls from them on that took the same action,
    #: at most so many: a decision stays in force for a while, and a change of config costs once. It
    #: takes the place of looking ahead, so only where gamma is 0.
    held_calls: Annotated[int, Within(1, 10_000)] = 1
    #: What a call of a job that runs another config than the call of its task key before costs
    #: beside its time, in units of NCCL's default; and each unit of the interference level (0.5: a
    #: call that took half as long again as quiet), which a Trigger tells.
    lambda_switch: Annotated[float, Within(0, 1e6)] = 0.0
    lambda_congestion: Annotated[float, Within(0, 1e6)] = 0.0
    #: Weight of CQL's conservative loss.
    conservative_weight: Annotated[float, Within(0, 1e6)] = 0.0
    #: Weight of the entropy in the loss, at the first and at the last gradient step.
    entropy_start: Annotated[float, Within(0, 1e6)] = 0.0
    entropy_end: Annotated[float, Within(0, 1e6)] = 0.0
    #: At the first gradient step; it falls to 0 along a cosine.
    learning_rate: Annotated[float, Within(0, 1, low_is_open=True)] = 1e-3
    batch_size: Annotated[int, Within(2, 1 << 16)] = 256
    #: Whether half of every batch comes from the calls of jobs, where the data set holds any.
    use_calls: bool = True
    #: Run directory of a Trigger (`dynamiccl-train trigger`), or its file: it tells the policy the
    #: interference of calls, in training and where it is deployed; empty = unknown.
    trigger: str = ""
    #: Gradient steps in all, and between two looks at the validation bins.
    steps: Annotated[int, Within(1, 10**8)] = 4_000
    steps_per_epoch: Annotated[int, Within(1, 10**8)] = 200
    hidden_sizes: Annotated[tuple[int, ...], Within(1, 1 << 14)] = (128, 128)
    #: Units of an LSTM whose state lives as long as the job (stateful_trunk.py), of algorithms that
    #: play in the simulator; 0 = none.
    state_units: Annotated[int, Within(0, 1 << 12)] = 0
    #: Networks trained side by side; what they differ by tells how sure they are.
    num_members: Annotated[int, Within(1, 100)] = 3
    #: How strongly rare (system, collective) groups are sampled more often: 0 = as they come,
    #: 1 = every group equally often.
    balance: Annotated[float, Within(0, 1)] = 1.0
    #: Decay a step of the running average of the weights, which is what is validated and exported:
    #: single weights swing from epoch to epoch by more than the configs differ.
    average_decay: Annotated[float, Within(0, 1, high_is_open=True)] = 0.995
    #: Validation regrets (fractions) that differ by less count as equal; the later checkpoint wins.
    checkpoint_tolerance: Annotated[float, Within(0, 1)] = 0.002
    #: Gradient steps between two copies of the weights to the target network.
    target_update_interval: Annotated[int, Within(1, 10**8)] = 500
    #: What a cold policy must be sure of: a gain beyond a margin that validation chooses (margin),
    #: or one of so many spreads that P(acts and is slower) <= `alpha` (bound, cross_fitting.py).
    caution: str = Caution.MARGIN.value
    #: Margins in log time to choose from on validation: a config must be predicted to be this much
    #: faster than NCCL's own choice, else the policy abstains.
    abstain_margins: Annotated[tuple[float, ...], Within(0, 1)] = (0.02, 0.03, 0.05)
    #: Whether every member has to predict a gain beyond the margin and the noise band, or their
    #: mean one beyond the margin.
    unanimous: bool = True
    #: The margin where there are calls to go by, of which cold validation says nothing: the mean of
    #: the members, not each of them, has to be this much faster.
    warm_margin: Annotated[float, Within(0, 1)] = 0.02
    #: What is held out for validation and test (datasets/splits.py): octaves of sizes, whole group
    #: shapes (shape), or whole systems (system).
    split: str = "size"
    #: Bound on P(acts and is slower than NCCL's own choice), over tasks like those measured; for a
    #: Gaussian process, boosting, and networks with caution=bound. With fewer than 1 / alpha - 1
    #: tasks of a machine to calibrate on it abstains there.
    alpha: Annotated[float, Within(0, 1, low_is_open=True, high_is_open=True)] = 0.01
    #: Above which interference level a Gaussian process takes what is best where calls take 1.5
    #: times as long, and below it what is best in quiet; 0: it goes by the level itself.
    level_threshold: Annotated[float, Within(0, 1e6)] = 0.0
    #: Where actors play (train/online/places.py), by commas; how many there are, one a place
    #: at least; jobs of each, and rounds of an episode. `steps` are updates, of `num_steps` rounds.
    places: str = ""
    actors: Annotated[int, Within(1, 1024)] = 2
    jobs: Annotated[int, Within(1, 1024)] = 8
    episode_rounds: Annotated[int, Within(1, 10**6)] = 50
    #: How much their episodes differ: slowdowns and dwell times of the scenario by a factor of so
    #: much at most; times of each algorithm and protocol by so much, as ln (online/variation.py).
    vary: Annotated[float, Within(1, 100)] = 1.4
    vary_times: Annotated[float, Within(0, 2)] = 0.05
    #: IMPALA's bounds of how far it corrects for weights that have moved since: rho and c of
    #: V-trace (Espeholt et al. 2018, section 4.1).
    rho_most: Annotated[float, Within(0, 1e6, low_is_open=True)] = 1.0
    c_most: Annotated[float, Within(0, 1e6, low_is_open=True)] = 1.0
    #: What actors earn (recipe_checks.py): by the logarithm, a connection of 20 ms at first use
    #: does not drown all else.
    reward_scale: str = RewardScale.LOG.value

    def to_json(self) -> dict[str, Any]:
        """Plain data for logs and manifests."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """What `to_json` gave; raises TypeError for fields that this release does not have."""
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**known)

    def entropy_weight(self, step: int) -> float:
        """Weight of the entropy at a gradient step, 1 to `steps`: a straight line."""
        share = (step - 1) / max(self.steps - 1, 1)
        return self.entropy_start + share * (self.entropy_end - self.entropy_start)


def dqn() -> Recipe:
    """DQN as it was (Mnih et al. 2015), feed-forward over the flattened window."""
    return Recipe(
        name="dqn",
        summary="DQN, one head in log time, MLP over window and context",
        algorithm="DQN",
        dueling=False,
    )


def ddqn_dueling() -> Recipe:
    """Double DQN with a dueling head, feed-forward over the flattened window."""
    return Recipe(
        name="ddqn-dueling",
        summary="double DQN, dueling head in log time, MLP over window and context",
        algorithm="DoubleDQN",
    )


def ddqn_actions() -> Recipe:
    """Double DQN whose head has actions as inputs, over NCCL's own costs."""
    return replace(
        ddqn_dueling(),
        name="ddqn-actions",
        summary="double DQN, actions as inputs beside NCCL's own costs: for sweeps",
        action_inputs=True,
        use_calls=False,
        caution=Caution.BOUND.value,
        num_members=6,
        unanimous=False,
        abstain_margins=(0.0, 0.005, 0.01, 0.02, 0.03, 0.05),
    )


def drqn_lstm() -> Recipe:
    """Recurrent double DQN (Hausknecht and Stone 2015) over the window of calls."""
    return Recipe(
        name="drqn-lstm",
        summary="recurrent double DQN: LSTM over the window, dueling, 3-step returns",
        algorithm="DoubleDQN",
        window_encoder="lstm",
        gamma=0.5,
        num_steps=3,
        entropy_start=0.01,
    )


def drqn_gru() -> Recipe:
    """As drqn-lstm, with gated recurrent units."""
    return replace(
        drqn_lstm(),
        name="drqn-gru",
        summary="recurrent double DQN: GRU over the window, dueling, 3-step returns",
        window_encoder="gru",
    )


def ddqn_cnn() -> Recipe:
    """Pensieve's encoder (Mao et al. 2017, section 5.1) under double DQN."""
    return replace(
        drqn_lstm(),
        name="ddqn-cnn",
        summary="double DQN: 1-D convolution over the window, scalars joined after it, dueling",
        window_encoder="cnn",
    )


def cql() -> Recipe:
    """Conservative Q-learning (Kumar et al. 2020) for logs of a policy that chose what it tried."""
    return Recipe(
        name="cql",
        summary="conservative Q-learning, dueling, MLP: for adaptive or deployed logs",
        algorithm="DiscreteCQL",
        conservative_weight=0.1,
        gamma=0.5,
        num_steps=3,
        entropy_start=0.01,
    )


def cql_lstm() -> Recipe:
    """As cql, recurrent over the window."""
    return replace(
        cql(),
        name="cql-lstm",
        summary="conservative Q-learning, dueling, LSTM over the window",
        window_encoder="lstm",
    )


def bc() -> Recipe:
    """Behaviour cloning: what the data did most, as a baseline for offline learning."""
    return Recipe(
        name="bc",
        summary="behaviour cloning: the action that the data took most; a baseline",
        algorithm="DiscreteBC",
        num_members=1,
    )


def gaussian_process() -> Recipe:
    """A Gaussian process over configs, with NCCL's cost model as its mean; no reinforcement."""
    return Recipe(
        name="gaussian-process",
        summary="Gaussian process over NCCL's own costs: for tables of quiet systems",
        algorithm="GaussianProcess",
        use_calls=False,
    )


def a3c() -> Recipe:
    """Asynchronous advantage actor-critic (Mnih et al. 2016), in the simulator."""
    return Recipe(
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
        learning_rate=0.002,
        entropy_start=0.02,
        steps=4_000,
        num_members=1,
        unanimous=False,
        # Of log odds, not of log time.
        abstain_margins=(0.0, 0.2, 0.5, 1.0),
        warm_margin=0.0,
    )


def a3c_lstm() -> Recipe:
    """As a3c, with a state that lives as long as a job (Mnih et al. 2016, section 5.6)."""
    return replace(
        a3c(),
        name="a3c-lstm",
        summary="A3C with an LSTM over all keys of a job, its state as old as the job",
        state_units=64,
    )


def impala_lstm() -> Recipe:
    """IMPALA (Espeholt et al. 2018), as in mvfst-rl (Sivakumar et al. 2019)."""
    return replace(
        a3c_lstm(),
        name="impala-lstm",
        summary="IMPALA with V-trace: actors play and one learner learns, LSTM as in a3c-lstm",
        algorithm="IMPALA",
    )


def threshold_rule() -> Recipe:
    """What one would try by hand where surroundings change: two tables and a threshold."""
    return replace(
        gaussian_process(),
        name="threshold-rule",
        summary="two tables and a threshold, on a Trigger's level: what one would try by hand",
        level_threshold=0.15,
    )


def residual_boosting() -> Recipe:
    """Boosted trees over configs, of what NCCL's cost model leaves over; no reinforcement."""
    return Recipe(
        name="residual-boosting",
        summary="boosted trees over NCCL's own costs: for tables of quiet systems",
        algorithm="ResidualBoosting",
        use_calls=False,
    )


RECIPES: Final[Mapping[str, Callable[[], Recipe]]] = {
    "dqn": dqn,
    "ddqn-dueling": ddqn_dueling,
    "ddqn-actions": ddqn_actions,
    "drqn-lstm": drqn_lstm,
    "drqn-gru": drqn_gru,
    "ddqn-cnn": ddqn_cnn,
    "cql": cql,
    "cql-lstm": cql_lstm,
    "bc": bc,
    "gaussian-process": gaussian_process,
    "threshold-rule": threshold_rule,
    "residual-boosting": residual_boosting,
    "a3c": a3c,
    "a3c-lstm": a3c_lstm,
    "impala-lstm": impala_lstm,
}


def make_recipe(name: str, settings: Sequence[str] = ()) -> Recipe:
    """The recipe called `name`, with `key=value` settings applied.

    Raises UnknownName (recipe or key, with the choices) and UserError (a value of the wrong type,
    or two that exclude each other).
    """
    recipe = recipe_of_file(Path(name)) if name.endswith(".py") else _ours(name)
    for setting in settings:
        key, separator, text = setting.partition("=")
        settable = [f.name for f in fields(Recipe) if f.name not in _FIXED]
        if not separator or key not in settable:
            raise UnknownName("recipe setting", key, settable, where=f"--set {setting}")
        changed: dict[str, Any] = {key: _read(text, getattr(recipe, key), setting)}
        recipe = replace(recipe, **changed)
    check_recipe(recipe)
    return recipe


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
    except Exception as error:  # whatever somebody's file may raise is told with its name
        raise UserError(f"{path} gives no recipe: {type(error).__name__}: {error}") from error
    if not isinstance(made, Recipe):
        raise UserError(f"{path}: recipe() returns {type(made).__name__}, not a Recipe")
    return replace(made, source=str(path.resolve()))


def _ours(name: str) -> Recipe:
    if name not in RECIPES:
        raise UnknownName("recipe", name, [*RECIPES, "FILE.py"])
    return RECIPES[name]()


def _read(text: str, default: object, setting: str) -> object:
    try:
        if isinstance(default, tuple):
            kind = type(default[0])
            return tuple(kind(part) for part in text.split(","))
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        return text if isinstance(default, str) else type(default)(text)  # type: ignore[call-arg]
    except (ValueError, KeyError) as error:
        shape = "a list such as 1,2" if isinstance(default, tuple) else type(default).__name__
        raise UserError(f"--set {setting}: '{text}' is not {shape} (default {default})") from error
