"""Studies: recipes x settings x seeds; a parent run in MLflow, a child run for each training.

The queue is Optuna's journal, a file that several hosts may append to, on NFS too (SQLite's locks
fail there). When a worker's heartbeat stops, its trial is queued again, and goes on from its last
epoch. All trials are queued at the beginning, a grid's with one seed each (GridSampler would give
two workers the same one); a search's setting is chosen by TPE when it is taken.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from scipy import stats

from dynamiccl.errors import CorruptFile, DynamicclError, MissingPath, UserError
from dynamiccl.train import tracking
from dynamiccl.train.fit import FitSummary, fit, resume
from dynamiccl.train.recipe import Recipe, make_recipe

JOURNAL_NAME: Final = "optuna.journal"
#: Seconds between heartbeats, and until a trial without one is another worker's.
BEAT_S = 20
STALE_S = 120.0
_PAUSE_S: Final = 1.0
_RETRIES: Final = 3
_TRIAL_TAG: Final = "dynamiccl.trial"
#: No setting has this name.
_RECIPE: Final = "recipe"

Value = float | int | str
Chosen = Mapping[str, Value]
Distribution = CategoricalDistribution | FloatDistribution | IntDistribution


@dataclass(frozen=True, slots=True)
class Plan:
    """What a study trains."""

    data: str
    experiment: str
    recipes: Sequence[str]
    settings: Sequence[str]
    #: `key=value,value`, of a search also `key=low:high` and `key=low:high:log`.
    axes: Sequence[str]
    seeds: int
    #: Settings that a search tries; 0: a grid.
    count: int = 0

    def recipe_of(self, chosen: Chosen) -> Recipe:
        """The recipe with chosen settings, lists joined with `+`; raises as `make_recipe`."""
        texts = [
            f"{key}={value.replace('+', ',') if isinstance(value, str) else value}"
            for key, value in chosen.items()
            if key != _RECIPE
        ]
        return make_recipe(str(chosen.get(_RECIPE, self.recipes[0])), [*self.settings, *texts])

    def setting_of(self, chosen: Chosen) -> str:
        """What is varied, e.g. `cql learning_rate=0.001`; alike for all seeds."""
        shown = [f"{key}={value}" for key, value in chosen.items() if key != _RECIPE]
        return " ".join([self.recipe_of(chosen).name, *shown])

    def combinations(self) -> Iterator[dict[str, Value]]:
        """All settings of a grid."""
        found = self.distributions()
        choices = [d.choices for d in found.values() if isinstance(d, CategoricalDistribution)]
        for values in itertools.product(*choices):
            yield dict(zip(found, map(str, values), strict=True))

    def distributions(self) -> dict[str, Distribution]:
        """Optuna's choices by setting; raises UserError and UnknownName."""
        found: dict[str, Distribution] = {}
        if len(self.recipes) > 1:
            found[_RECIPE] = CategoricalDistribution(self.recipes)
        for text in self.axes:
            key, _, values = text.partition("=")
            if not values:
                raise UserError(
                    f"--grid {text} has no values; write key=value,value, for example "
                    "learning_rate=1e-3,3e-4, with --optuna also key=low:high and key=low:high:log"
                )
            if key in found:
                raise UserError(f"--grid gives {key} twice: give all its values in one")
            if self.count and ":" in values and "," not in values:
                found[key] = self._range(key, values)
            else:
                found[key] = CategoricalDistribution(values.split(","))
        return found

    def _range(self, key: str, values: str) -> Distribution:
        low, high, *scale = values.split(":")
        given, fix = f"--grid {key}={values}", "write key=low:high or key=low:high:log"
        if scale not in ([], ["log"]):
            raise UserError(f"{given}: '{':'.join(scale)}' is no scale; {fix}")
        # Raises for a key that no recipe has, and a bound of the wrong type.
        least, most = [getattr(self.recipe_of({key: end}), key) for end in (low, high)]
        if any(isinstance(bound, bool | str | tuple) for bound in (least, most)):
            raise UserError(f"{given}: {key} is no number; give its values as {key}=value,value")
        if least >= most or (scale and least <= 0):
            more = " above 0" if scale else ""
            raise UserError(f"{given}: low must be below high{more}; {fix}")
        kind = IntDistribution if isinstance(least, int) else FloatDistribution
        return kind(least, most, log=bool(scale))


def checked(plan: Plan) -> Plan:
    """The plan with whole paths; raises as `make_recipe`, and UserError for values."""
    names = [make_recipe(name, plan.settings).source or name for name in plan.recipes]
    plan = replace(plan, data=str(Path(plan.data).resolve()), recipes=names)
    found = plan.distributions()
    if plan.count and not found:
        raise UserError("--optuna needs something to search: give --grid, or several --recipe")
    # A search for more settings than there are is a grid.
    sizes = [len(getattr(each, "choices", range(plan.count + 1))) for each in found.values()]
    plan = replace(plan, count=plan.count if plan.count < math.prod(sizes) else 0)
    alone = ({k: str(v)} for k, d in found.items() for v in getattr(d, "choices", ()))
    for chosen in alone if plan.count else plan.combinations():
        plan.recipe_of(chosen)  # its errors
    return plan


class _File(JournalFileBackend):
    """An interrupt while its lock is held would leave others out."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with tracking.uninterrupted():
            super().append_logs(logs)


@contextmanager
def _beating(study: optuna.Study, trial: optuna.Trial) -> Iterator[None]:
    """Give signs of life by this host's clock, which Optuna's journal does not."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(BEAT_S):
            # Another took it over, the lock was lost, or NFS failed: the next beat comes.
            with suppress(RuntimeError, OSError):
                study._storage.set_trial_system_attr(trial._trial_id, "heartbeat", time.time())

    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    try:
        yield
    finally:
        is_over.set()
        beating.join()


def _fail_stale(study: optuna.Study) -> None:
    """End trials whose workers died, and queue them again, up to three times."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        began = 0.0 if trial.datetime_start is None else trial.datetime_start.timestamp()
        silent_s = time.time() - trial.system_attrs.get("heartbeat", began)
        if silent_s > STALE_S and _end(study, trial.number):
            deaths = trial.user_attrs.get("deaths", 0) + 1
            if deaths <= _RETRIES:
                _queue_again(study, trial, deaths=deaths)


def _end(study: optuna.Study, number: int, value: float = math.nan) -> bool:
    """End a trial, failed if without a value; False where another worker has."""
    told = (None, TrialState.FAIL) if math.isnan(value) else (value, TrialState.COMPLETE)
    with suppress(ValueError, UpdateFinishedTrialError):
        study.tell(number, *told)
        return True
    return False


def _queue_again(study: optuna.Study, trial: FrozenTrial, **told: int) -> None:
    chosen = trial.system_attrs.get("fixed_params", {}) | trial.params
    told = {**trial.user_attrs, "number": _number(trial), **told}
    study.enqueue_trial(chosen, user_attrs=told)


def begin_study(plan: Plan, tracking_uri: str) -> optuna.Study:
    """Create the parent run and the queue, named by the run's id."""
    seeds = list(range(plan.seeds))
    queue: list[tuple[Chosen, list[int]]] = [({}, seeds)] * plan.count
    if not queue:
        queue = [(chosen, [seed]) for chosen in plan.combinations() for seed in seeds]
    count = sum(len(seeds) for _, seeds in queue)
    run = tracking.open_run(tracking_uri, plan.experiment, f"study of {count} trials")
    params = {"data": plan.data, "trials": count, "space": " ".join(plan.axes)}
    text = f"Study of {count} trials on `{plan.data}`; each is a run below this one."
    run.log(params=params | {"recipes": ", ".join(plan.recipes)}, text=text)
    path = run.kept_folder / JOURNAL_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(study_name=run.run_id, storage=_journal(path))
    study.set_user_attr("plan", asdict(plan))
    for chosen, its_seeds in queue:
        study.enqueue_trial(dict(chosen), user_attrs={"seeds": its_seeds})
    return study


def open_study(run_id: str, tracking_uri: str) -> optuna.Study:
    """The queue of a parent run; raises MissingPath and UserError."""
    run = tracking.reopen_run(tracking_uri, run_id)
    path = run.kept_folder / JOURNAL_NAME
    if not path.is_file():
        raise MissingPath("study", path, "begin one with 'dynamiccl-train study'")
    return optuna.load_study(study_name=run_id, storage=_journal(path))


def _journal(path: Path) -> JournalStorage:
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # failures are told in our words
    return JournalStorage(_File(str(path)))


def plan_of(study: optuna.Study) -> Plan:
    """What a study trains."""
    return Plan(**study.user_attrs["plan"])


def latest_trials(study: optuna.Study) -> dict[int, FrozenTrial]:
    """The latest try of each trial, by number."""
    queued = [trial for trial in study.get_trials(deepcopy=False) if "seeds" in trial.user_attrs]
    return {_number(trial): trial for trial in queued}


def _number(trial: FrozenTrial) -> int:
    """The number of a trial's first try."""
    return int(trial.user_attrs.get("number", trial.number))


def retry_failed(study: optuna.Study) -> None:
    """Queue failed trials again."""
    for trial in latest_trials(study).values():
        if trial.state is TrialState.FAIL:
            _queue_again(study, trial, deaths=0)


def work(
    study: optuna.Study, tracking_uri: str, is_stopped: Callable[[], bool] = lambda: False
) -> Iterator[tuple[str, bool]]:
    """Run trials until all are over, also those of workers that die meanwhile.

    Yields lines, and whether they are of failures. Raises KeyboardInterrupt where `is_stopped`: a
    library may have swallowed the signal's.
    """
    while True:
        if is_stopped():
            raise KeyboardInterrupt
        _fail_stale(study)
        states = {trial.state for trial in latest_trials(study).values()}
        if TrialState.WAITING in states:
            trial = study.ask()
            if "seeds" in trial.user_attrs:
                yield from _run(study, trial, tracking_uri, is_stopped)
            else:  # another worker took the last of the queue, and Optuna made a new one
                _end(study, trial.number)
        elif TrialState.RUNNING in states:
            time.sleep(_PAUSE_S)
        else:
            return


def _run(
    study: optuna.Study, trial: optuna.Trial, tracking_uri: str, is_stopped: Callable[[], bool]
) -> list[tuple[str, bool]]:
    """Train a trial's setting with its seeds; lines as of `work`."""
    plan, known = plan_of(study), study.get_trials(deepcopy=False)[trial.number]
    number, runs, told = _number(known), list[FitSummary](), list[tuple[str, bool]]()
    name, value = f"trial {number}", math.nan

    def stay(*_: object) -> None:
        """Raise where this worker is to stop, or has lost the trial for want of a beat."""
        if is_stopped():
            raise KeyboardInterrupt
        if study.get_trials(deepcopy=False)[trial.number].state is not TrialState.RUNNING:
            raise UserError(
                f"another worker has taken the trial over: this one gave no sign of life for "
                f"{STALE_S:.0f} s, or the hosts' clocks differ"
            )

    with _beating(study, trial):
        try:
            # By number, so that a killed search goes on as it would have.
            study.sampler = optuna.samplers.TPESampler(seed=number, constant_liar=True)
            axes = plan.distributions().items()
            chosen = {key: trial._suggest(key, each) for key, each in axes}
            setting = plan.setting_of(chosen)
            trial.set_user_attr("setting", setting)
            for seed in known.user_attrs["seeds"]:
                name = f"trial {number} ({setting}, seed {seed})"
                tags = {_TRIAL_TAG: f"{number}.{seed}", "setting": setting}
                tags |= {tracking.PARENT_TAG: study.study_name}
                runs.append(_train(plan, plan.recipe_of(chosen), seed, tags, tracking_uri, stay))
                told.append((f"{name}: validation regret {runs[-1].validation_regret:.2%}", False))
                trial.set_user_attr("runs", [asdict(run) for run in runs])  # some of a search's
            value = float(np.mean([run.validation_regret for run in runs]))
        except KeyboardInterrupt:
            if _end(study, trial.number):  # else another worker has taken it over
                _queue_again(study, study.get_trials(deepcopy=False)[trial.number])
            raise
        except Exception as error:  # stops no other trial
            kind = "" if isinstance(error, DynamicclError) else f"{type(error).__name__}: "
            told.append((f"{name}: {kind}{error}", True))
            with suppress(UpdateFinishedTrialError):
                trial.set_user_attr("error", told[-1][0])
    _end(study, trial.number, value)
    return told


def _train(
    plan: Plan,
    recipe: Recipe,
    seed: int,
    tags: Mapping[str, str],
    tracking_uri: str,
    stay: Callable[..., None],
) -> FitSummary:
    """Train as a child run, or take or go on with the one that there is."""
    how: dict[str, Any] = {"tracking_uri": tracking_uri, "progress": stay}
    for child in tracking.children(tracking_uri, tags[tracking.PARENT_TAG]):
        run_id, told = child.info.run_id, child.data.tags
        if told["setting"] != tags["setting"] or not told[_TRIAL_TAG].endswith(f".{seed}"):
            continue
        # Killed before it could tell; or TPE chose a setting twice.
        done = tracking.read_summary(tracking_uri, run_id)
        if done is not None:
            return FitSummary(**done)
        # Killed before its first epoch, or two wrote at once.
        if told[_TRIAL_TAG] == tags[_TRIAL_TAG]:
            with suppress(MissingPath, CorruptFile):
                return resume(Path(plan.data), run_id, **how)
    return fit(Path(plan.data), recipe, experiment=plan.experiment, seed=seed, tags=tags, **how)


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


def summarise_study(study: optuna.Study) -> tuple[StudySummary, list[str]]:
    """Results by setting of trainings that are done, and errors of failed trials."""
    trials = latest_trials(study).values()
    found: dict[str, dict[int, FitSummary]] = {}
    for trial in trials:
        runs = trial.user_attrs.get("runs", ())
        for seed, run in zip(trial.user_attrs["seeds"], runs, strict=False):
            found.setdefault(trial.user_attrs["setting"], {})[seed] = FitSummary(**run)
    settings, defaults = list[SettingSummary](), list[float]()
    for setting, of_seed in found.items():
        regrets = [run.validation_regret for run in of_seed.values()]
        best = min(of_seed.values(), key=lambda run: run.validation_regret).run_id
        seconds = float(np.mean([run.seconds for run in of_seed.values()]))
        told = float(np.mean(regrets)), *student_interval(regrets), best, seconds
        settings.append(SettingSummary(setting, len(regrets), *told))
        defaults += [run.validation_default_regret for run in of_seed.values()]
    summary = StudySummary(
        run_id=study.study_name,
        data=plan_of(study).data,
        trials=sum(len(trial.user_attrs["seeds"]) for trial in trials),
        done=sum(len(trial.user_attrs.get("runs", ())) for trial in trials),
        default_regret=min(defaults, default=None),
        settings=sorted(settings, key=lambda each: each.mean),
    )
    failed = [trial for trial in trials if trial.state is TrialState.FAIL]
    lost = "its workers died again and again"
    return summary, [t.user_attrs.get("error", f"trial {_number(t)}: {lost}") for t in failed]


def end_study(study: optuna.Study, tracking_uri: str) -> tuple[StudySummary, list[str]]:
    """As `summarise_study`; once all trials are over, the parent run ends.

    It fails while a training is missing. The best setting's best run becomes the candidate.
    """
    summary, failures = summarise_study(study)
    if not all(trial.state.is_finished() for trial in latest_trials(study).values()):
        return summary, failures  # other workers go on
    run = tracking.reopen_run(tracking_uri, summary.run_id)
    run.log({"trials_done": summary.done})
    if summary.settings:
        best = summary.settings[0]
        tags = {"best_setting": best.setting, "best_run": best.best_run}
        run.log({"best_validation_regret": best.mean}, tags=tags)
        tracking.register(tracking_uri, best.best_run, tracking.CANDIDATE)
    run.finish(asdict(summary))
    run.end(finished=summary.done == summary.trials)
    return summary, failures


def student_interval(values: npt.ArrayLike) -> tuple[float, float] | tuple[None, None]:
    """Student's 95 % interval of a mean; None of fewer than two."""
    drawn = np.asarray(values, dtype=np.float64)
    if len(drawn) < 2:
        return None, None
    reach = float(stats.t.ppf(0.975, len(drawn) - 1) * stats.sem(drawn))
    return float(drawn.mean()) - reach, float(drawn.mean()) + reach
