"""Hyperparameter search by Optuna: the next settings to try, given earlier results.

Nothing of Optuna's has to outlive a process: the parent run holds what was asked, its children what
that came to, and every round tells both to a new sampler, seeded by how much was asked. So a search
that was killed goes on as if it had not been, in any place, with any tracking store.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from dynamiccl.errors import UserError
from dynamiccl.train.recipe import Recipe
from dynamiccl.train.recipes import make_recipe

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

JOURNAL_NAME: Final = "optuna.journal"
#: The parameter that chooses between recipes; no setting has this name.
_RECIPE: Final = "recipe"
#: How often a sampler may say what was tried already, for each new setting that is wanted.
_PATIENCE: Final = 20

#: What a sampler chose: numbers, and choices as they were written.
Value = float | int | str
Chosen = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Search:
    """The search space, and the settings tried so far."""

    recipes: tuple[str, ...]
    #: `key=value` for all trials.
    settings: tuple[str, ...]
    #: `key=low:high`, `key=low:high:log` or `key=value,value`, as given.
    space: tuple[str, ...]
    #: How many settings are to be tried, with how many seeds each, how many at a time.
    count: int
    seeds: int
    per_round: int
    asked: tuple[Chosen, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """From the JSON of `dataclasses.asdict`."""
        lists: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in values.items()
        }
        return cls(**lists)

    def recipe_of(self, chosen: Chosen) -> Recipe:
        """The recipe with the chosen settings; raises as `make_recipe`."""
        texts = [_text(key, value) for key, value in chosen.items() if key != _RECIPE]
        return make_recipe(str(chosen.get(_RECIPE, self.recipes[0])), [*self.settings, *texts])

    def setting_of(self, chosen: Chosen) -> str:
        """The setting as text."""
        shown = [f"{key}={value}" for key, value in chosen.items() if key != _RECIPE]
        return " ".join([self.recipe_of(chosen).name, *shown])


def check_space(search: Search) -> None:
    """Raise UserError, or UnknownName, for a space that cannot be searched."""
    _distributions(search)
    keys = [text.partition("=")[0] for text in search.space]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise UserError(f"--space gives {twice[0]} twice: give one range or list of it")
    for recipe in search.recipes:
        make_recipe(recipe, search.settings)


def suggest(search: Search, regrets: Sequence[float | None], count: int) -> list[Chosen]:
    """New settings to try; fewer than `count` where no more are left.

    `regrets` are the results of those tried, None for failed ones.
    """
    import optuna

    study = _told(search, regrets)
    distributions = _distributions(search)
    known = [dict(chosen) for chosen in search.asked]
    found: list[Chosen] = []
    for _ in range(_PATIENCE * count):
        trial = study.ask(distributions)
        if trial.params in known:
            at = known.index(trial.params)
            regret = regrets[at] if at < len(regrets) else None
            state = optuna.trial.TrialState.FAIL if regret is None else None
            study.tell(trial, regret, state=state)
            continue
        known.append(trial.params)
        found.append(trial.params)
        if len(found) == count:
            break
    return found


def write_journal(search: Search, regrets: Sequence[float | None], folder: Path) -> None:
    """Write the search as an Optuna journal, for tools such as its dashboard."""
    _told(search, regrets, str(folder / JOURNAL_NAME))


def _told(search: Search, regrets: Sequence[float | None], journal: str | None = None) -> "Study":
    """An Optuna study that contains the settings tried, with results."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name="dynamiccl",
        storage=None if journal is None else JournalStorage(JournalFileBackend(journal)),
        sampler=optuna.samplers.TPESampler(seed=len(search.asked), constant_liar=True),
    )
    distributions = _distributions(search)
    for chosen, regret in zip(search.asked, regrets, strict=True):
        state = TrialState.FAIL if regret is None else TrialState.COMPLETE
        study.add_trial(
            create_trial(
                state=state, value=regret, params=dict(chosen), distributions=distributions
            )
        )
    return study


def _distributions(search: Search) -> dict[str, "BaseDistribution"]:
    from optuna.distributions import CategoricalDistribution

    recipe = make_recipe(search.recipes[0], search.settings)
    found = {text.partition("=")[0]: _distribution(text, recipe) for text in search.space}
    if len(search.recipes) > 1:
        found[_RECIPE] = CategoricalDistribution(search.recipes)
    return found


def _distribution(text: str, recipe: Recipe) -> "BaseDistribution":
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    key, _, values = text.partition("=")
    fix = "write key=low:high, key=low:high:log or key=value,value"
    if not values:
        raise UserError(f"--space {text} has no values; {fix}")
    name = recipe.source or recipe.name
    if ":" not in values:
        choices = values.split(",")
        for choice in choices:
            make_recipe(name, [_text(key, choice)])
        return CategoricalDistribution(choices)
    low, high, *scale = values.split(":")
    if scale not in ([], ["log"]):
        raise UserError(f"--space {text}: '{':'.join(scale)}' is no scale; {fix}")
    # Its error names a key that no recipe has, and a bound of the wrong type.
    bounds = [getattr(make_recipe(name, [f"{key}={end}"]), key) for end in (low, high)]
    least, most = bounds
    if any(isinstance(bound, bool | str | tuple) for bound in bounds):
        raise UserError(f"--space {text}: {key} is no number; give its values as {key}=value,value")
    if least >= most or (scale and least <= 0):
        more = " above 0" if scale else ""
        raise UserError(f"--space {text}: low must be below high{more}; {fix}")
    if isinstance(least, int):
        return IntDistribution(least, most, log=bool(scale))
    return FloatDistribution(least, most, log=bool(scale))


def _text(key: str, value: Value) -> str:
    """A value as `--set` takes it; list items are joined with `+`."""
    return f"{key}={value.replace('+', ',') if isinstance(value, str) else value}"
