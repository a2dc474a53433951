"""Recipes: named functions that return a complete, frozen training set-up.

`dynamiccl-train list` shows them; `--set key=value` changes a field for one run and is recorded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from dynamiccl.errors import UnknownName, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A complete training set-up; every field has its unit or meaning beside it."""

    name: str
    summary: str
    #: d3rlpy algorithm.
    algorithm: str
    #: Discount; 0 for static sweeps, whose episodes are one step long.
    gamma: float
    learning_rate: float
    batch_size: int
    #: Gradient steps in all, and between two looks at the validation bins.
    steps: int
    steps_per_epoch: int
    hidden_sizes: tuple[int, ...]
    #: Q functions trained side by side; the policy acts only where all of them agree.
    num_members: int
    #: How strongly rare (system, collective) groups are sampled more often: 0 = as they come,
    #: 1 = every group equally often.
    balance: float
    #: Decay a step of the running average of the weights, which is what is validated and exported:
    #: single weights swing from epoch to epoch by more than the configs differ.
    average_decay: float
    #: Validation regrets (fractions) that differ by less count as equal; the later checkpoint wins.
    checkpoint_tolerance: float
    #: Gradient steps between two copies of the weights to the target network.
    target_update_interval: int
    #: Margins in log time to choose from on validation: a config must be predicted to be this much
    #: faster than NCCL's own choice, else the policy abstains.
    abstain_margins: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data for logs and manifests."""
        return asdict(self)


def ddqn_dueling() -> Recipe:
    """Double DQN with a dueling head, feed-forward over the flattened window."""
    return Recipe(
        name="ddqn-dueling",
        summary="double DQN, dueling head in log time, MLP over window and context",
        algorithm="DoubleDQN",
        gamma=0.0,
        learning_rate=1e-3,
        batch_size=256,
        steps=4_000,
        steps_per_epoch=200,
        hidden_sizes=(128, 128),
        num_members=3,
        balance=1.0,
        average_decay=0.995,
        checkpoint_tolerance=0.002,
        target_update_interval=500,
        abstain_margins=(0.02, 0.03, 0.05),
    )


RECIPES: Final[Mapping[str, Callable[[], Recipe]]] = {"ddqn-dueling": ddqn_dueling}


def make_recipe(name: str, settings: Sequence[str] = ()) -> Recipe:
    """The recipe called `name`, with `key=value` settings applied.

    Raises UnknownName (recipe or key, with the choices) and UserError (a value of the wrong type).
    """
    if name not in RECIPES:
        raise UnknownName("recipe", name, RECIPES)
    recipe = RECIPES[name]()
    for setting in settings:
        key, separator, text = setting.partition("=")
        settable = [
            f.name for f in fields(Recipe) if f.name not in {"name", "summary", "algorithm"}
        ]
        if not separator or key not in settable:
            raise UnknownName("recipe setting", key, settable, where=f"--set {setting}")
        changed: dict[str, Any] = {key: _read(text, getattr(recipe, key), setting)}
        recipe = replace(recipe, **changed)
    return recipe


def _read(text: str, default: object, setting: str) -> object:
    try:
        if isinstance(default, tuple):
            kind = type(default[0])
            return tuple(kind(part) for part in text.split(","))
        return int(text) if isinstance(default, int) else float(text)
    except ValueError as error:
        shape = "a list such as 1,2" if isinstance(default, tuple) else type(default).__name__
        raise UserError(f"--set {setting}: '{text}' is not {shape} (default {default})") from error
