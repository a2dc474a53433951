"""Studies: recipes x settings grid x seeds; one parent run in MLflow, one child run a trial.

The parent holds `study.json`: every trial with its resolved recipe and seed. So a trial is a
command of its own, `dynamiccl-train trial STUDY NUMBER`, for whatever runs commands
(`train/fanout`). It goes on where it was killed, and does nothing when it is done.
"""

import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import stats

from dynamiccl.errors import MissingPath, UserError
from dynamiccl.train import SUMMARY_NAME, tracking
from dynamiccl.train.export import FitSummary
from dynamiccl.train.fit import fit, resume
from dynamiccl.train.recipe import Recipe
from dynamiccl.train.recipes import make_recipe
from dynamiccl.train.search import Search, check_space, suggest, write_journal

STUDY_NAME: Final = "study.json"
_TRIAL_TAG: Final = "dynamiccl.trial"
_CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Trial:
    """One training run of a study."""

    #: What is varied, e.g. `cql learning_rate=0.001`; alike for all seeds.
    setting: str
    recipe: Recipe
    seed: int


@dataclass(frozen=True, slots=True)
class Study:
    """The definition of a study."""

    data: str
    experiment: str
    trials: tuple[Trial, ...]
    #: Where more trials come from when these are done; None: these are all.
    search: Search | None = None


@dataclass(frozen=True, slots=True)
class SettingSummary:
    """One setting over its seeds; regrets are fractions, with Student's interval."""

    setting: str
    seeds: int
    mean: float
    low: float | None
    high: float | None
    best_run: str
    train_seconds: float


@dataclass(frozen=True, slots=True)
class StudySummary:
    """The results of a study so far, best setting first."""

    run_id: str
    data: str
    trials: int
    done: int
    default_regret: float | None
    settings: list[SettingSummary]


def plan_study(
    data: Path,
    *,
    experiment: str,
    recipes: Sequence[str],
    settings: Sequence[str],
    grid: Sequence[str],
    seeds: int,
) -> Study:
    """Every recipe with every combination of the grid's values, each with the seeds 0 to `seeds`-1.

    `settings` are `key=value` for all trials, `grid` is `key=value,value,...`; a list inside a
    value is written with `+` (`hidden_sizes=64+64,128+128`). Raises as `make_recipe`, and UserError
    for a grid without values.
    """
    axes = [_axis(text) for text in grid]
    trials = []
    for name in recipes:
        for chosen in itertools.product(*axes):
            recipe = make_recipe(name, [*settings, *(s.replace("+", ",") for s in chosen)])
            setting = " ".join([recipe.name, *chosen])
            trials += [Trial(setting, recipe, seed) for seed in range(seeds)]
    return Study(str(data.resolve()), experiment, tuple(trials))


def plan_search(data: Path, *, experiment: str, search: Search) -> Study:
    """A study without trials, which `extend_study` adds.

    Raises UserError and UnknownName for what cannot be searched.
    """
    check_space(search)
    return Study(str(data.resolve()), experiment, (), search)


def begin_study(study: Study, tracking_uri: str) -> str:
    """Create the parent run; returns its id."""
    search = study.search
    count = len(study.trials) if search is None else search.count * search.seeds
    run = tracking.open_run(tracking_uri, study.experiment, f"study of {count} trials")
    run.log_params({"data": study.data, "trials": count})
    run.describe(f"Study of {count} trials on `{study.data}`; each is a run below this one.")
    if search is not None:
        run.log_params({"space": " ".join(search.space), "recipes": ", ".join(search.recipes)})
    _write_study(run, study)
    return run.run_id


def extend_study(run_id: str, tracking_uri: str) -> bool:
    """Add a round of trials to a search, given the results so far; returns whether there are any.

    Raises as `read_study`.
    """
    study = read_study(run_id, tracking_uri)
    search = study.search
    wanted = 0 if search is None else min(search.per_round, search.count - len(search.asked))
    if search is None or wanted <= 0:
        return False
    found = suggest(search, _regrets(search, done_trials(run_id, tracking_uri)), wanted)
    trials = list(study.trials)
    for chosen in found:
        recipe, setting = search.recipe_of(chosen), search.setting_of(chosen)
        trials += [Trial(setting, recipe, seed) for seed in range(search.seeds)]
    asked = replace(search, asked=(*search.asked, *found))
    run = tracking.reopen_run(tracking_uri, run_id)
    _write_study(run, replace(study, trials=tuple(trials), search=asked))
    return bool(found)


def _write_study(run: tracking.Run, study: Study) -> None:
    run.log_text(json.dumps(asdict(study), indent=1), STUDY_NAME)


def _regrets(search: Search, done: Mapping[int, FitSummary]) -> list[float | None]:
    """Mean regret of each setting tried, over its seeds; None while a seed is missing."""
    found: list[float | None] = []
    for first in range(0, len(search.asked) * search.seeds, search.seeds):
        runs = [done[n] for n in range(first, first + search.seeds) if n in done]
        whole = len(runs) == search.seeds
        found.append(float(np.mean([r.validation_regret for r in runs])) if whole else None)
    return found


def read_study(run_id: str, tracking_uri: str) -> Study:
    """The study of a parent run; raises MissingPath when the run is none, and UserError."""
    text = tracking.read_text(tracking_uri, run_id, STUDY_NAME)
    if text is None:
        raise MissingPath("study", Path(run_id), "begin one with 'dynamiccl-train study'")
    read = json.loads(text)
    trials = tuple(
        Trial(each["setting"], Recipe.from_json(each["recipe"]), each["seed"])
        for each in read["trials"]
    )
    search = None if read.get("search") is None else Search.from_json(read["search"])
    return Study(read["data"], read["experiment"], trials, search)


def run_trial(run_id: str, number: int, tracking_uri: str) -> FitSummary:
    """Run or resume a study's trial; does nothing if it is done.

    Raises as `read_study` and `fit`, and UserError for a number that the study does not have.
    """
    study = read_study(run_id, tracking_uri)
    if not 0 <= number < len(study.trials):
        raise UserError(f"trial {number}: the study has trials 0 to {len(study.trials) - 1}")
    trial = study.trials[number]
    data = Path(study.data)
    known = trial_summary(run_id, number, tracking_uri)
    if known is not None:
        return known
    for child in tracking.children(tracking_uri, run_id, {_TRIAL_TAG: str(number)}):
        try:
            return resume(data, child.run_id, tracking_uri=tracking_uri)
        except MissingPath:
            continue  # killed before its first epoch: nothing to go on from
    return fit(
        data,
        trial.recipe,
        experiment=study.experiment,
        tracking_uri=tracking_uri,
        seed=trial.seed,
        tags=tracking.child_tags(run_id) | {_TRIAL_TAG: str(number), "setting": trial.setting},
    )


def trial_summary(run_id: str, number: int, tracking_uri: str) -> FitSummary | None:
    """The summary of one trial; None while it is not done."""
    return done_trials(run_id, tracking_uri, {_TRIAL_TAG: str(number)}).get(number)


def done_trials(
    run_id: str, tracking_uri: str, tags: Mapping[str, str] = tracking.NO_TAGS
) -> dict[int, FitSummary]:
    """The summaries of finished trials with some tags, by number; raises as `read_study`."""
    done: dict[int, FitSummary] = {}
    for child in tracking.children(tracking_uri, run_id, tags):
        text = tracking.read_text(tracking_uri, child.run_id, SUMMARY_NAME)
        if text is not None:
            done[int(child.tags[_TRIAL_TAG])] = FitSummary(**json.loads(text))
    return done


def missing_trials(run_id: str, tracking_uri: str) -> list[int]:
    """Numbers of the trials that are not done; raises as `read_study`."""
    trials = read_study(run_id, tracking_uri).trials
    return sorted(set(range(len(trials))) - set(done_trials(run_id, tracking_uri)))


def summarise_study(run_id: str, tracking_uri: str) -> StudySummary:
    """The results by setting, over the finished trials."""
    study = read_study(run_id, tracking_uri)
    done = done_trials(run_id, tracking_uri)
    by_setting: dict[str, list[FitSummary]] = {}
    for number, summary in sorted(done.items()):
        by_setting.setdefault(study.trials[number].setting, []).append(summary)
    found = [_summary(setting, runs) for setting, runs in by_setting.items()]
    defaults = {summary.validation_default_regret for summary in done.values()}
    return StudySummary(
        run_id=run_id,
        data=study.data,
        trials=len(study.trials),
        done=len(done),
        default_regret=min(defaults, default=None),
        settings=sorted(found, key=lambda each: each.mean),
    )


def end_study(summary: StudySummary, tracking_uri: str) -> None:
    """Log a study's outcome in its parent run, and end it: as failed while a trial is missing.

    The best run of the best setting becomes the candidate.
    """
    metrics: dict[str, float] = {"trials_done": summary.done}
    tags: dict[str, str] = {}
    if summary.settings:
        best = summary.settings[0]
        metrics["best_validation_regret"] = best.mean
        tags = {"best_setting": best.setting, "best_run": best.best_run}
        tracking.register(tracking_uri, best.best_run, tracking.CANDIDATE)
    run = tracking.reopen_run(tracking_uri, summary.run_id)
    run.log_metrics(metrics, step=0)
    run.set_tags(tags)
    run.log_text(json.dumps(asdict(summary), indent=1), SUMMARY_NAME)
    search = read_study(summary.run_id, tracking_uri).search
    if search is not None:
        with tempfile.TemporaryDirectory() as scratch:
            done = done_trials(summary.run_id, tracking_uri)
            write_journal(search, _regrets(search, done), Path(scratch))
            run.log_folder(Path(scratch))
    run.end(finished=summary.done == summary.trials)


def _axis(text: str) -> list[str]:
    key, _, values = text.partition("=")
    if not values:
        raise UserError(f"--grid {text}: give key=value,value, for example learning_rate=1e-3,3e-4")
    return [f"{key}={value}" for value in values.split(",")]


def student_interval(values: npt.ArrayLike) -> tuple[float, float] | tuple[None, None]:
    """Student's 95 % interval of the mean of some replicates; None of fewer than two."""
    drawn = np.asarray(values, dtype=np.float64)
    if len(drawn) < 2:
        return None, None
    reach = float(stats.t.ppf(0.5 + _CONFIDENCE / 2, len(drawn) - 1) * stats.sem(drawn))
    return float(drawn.mean()) - reach, float(drawn.mean()) + reach


def _summary(setting: str, runs: Sequence[FitSummary]) -> SettingSummary:
    regrets = np.array([run.validation_regret for run in runs])
    low, high = student_interval(regrets)
    return SettingSummary(
        setting=setting,
        seeds=len(runs),
        mean=float(regrets.mean()),
        low=low,
        high=high,
        best_run=runs[int(regrets.argmin())].run_id,
        train_seconds=float(np.mean([run.seconds for run in runs])),
    )
