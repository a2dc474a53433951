"""Off-policy estimates where the truth is known: of drawn logs, and of a sweep that drew."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import TaskGrid, task_grid, usable
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read
from dynamiccl.evaluate import metrics
from dynamiccl.evaluate.baselines import Actions, Float64Array, LearnedPolicy
from tests.data_sets import SYSTEM, make_data, sweep_text
from tests.evaluate.grids import grid

TASKS, ACTIONS, ROWS, SAMPLES = 24, 8, 3000, 40
WHOLE = [*Split]


def make_world() -> TaskGrid:
    """Times whose means are what the grid says: the truth of rewards is a mean, not a median."""
    random = np.random.default_rng(0)
    times = 100.0 * np.exp(random.uniform(-0.4, 0.6, (TASKS, ACTIONS)))
    times[random.random((TASKS, ACTIONS)) < 0.15] = np.nan
    times[:, 0] = 100.0
    exact = grid([1 << (10 + t) for t in range(TASKS)], times.tolist())
    samples = {}
    for cell, [time, *_] in exact.samples.items():
        drawn = random.lognormal(0.0, 0.05, SAMPLES)
        samples[cell] = time * drawn / drawn.mean()
    return replace(exact, samples=samples)


def mixture(policy: Float64Array, mask: npt.NDArray[np.bool_], share: float) -> Any:
    """(T, A) a policy that for a share of calls is random, among what `mask` allows."""
    return (1.0 - share) * policy + share * mask / mask.sum(axis=1, keepdims=True)


WORLD = make_world()
ORACLE = np.eye(ACTIONS)[np.nanargmin(WORLD.times_us, axis=1)]
DEFAULT = np.eye(ACTIONS)[np.zeros(TASKS, dtype=np.int64)]
BEHAVIOUR = mixture(DEFAULT, WORLD.mask, 0.7)
POLICIES = {"oracle": ORACLE, "half-random oracle": mixture(ORACLE, WORLD.mask, 0.5)}


def drawn_log(seed: int = 0, behaviour: Float64Array = BEHAVIOUR, rows: int = ROWS) -> metrics.Log:
    """Calls of tasks drawn alike, by a known policy (T, A), timed as in the samples."""
    random = np.random.default_rng(seed)
    task = random.integers(0, TASKS, rows)
    odds = behaviour.cumsum(axis=1)[task]
    action = (odds <= random.random(rows)[:, None] * odds[:, -1:]).sum(axis=1)
    which = random.integers(0, SAMPLES, rows)
    cells = zip(task.tolist(), action.tolist(), strict=True)
    times = np.array([WORLD.samples[cell] for cell in cells])[range(rows), which]
    return metrics.Log(task, action, -times / WORLD.default_us[task], behaviour[task, action])


def true_value(policy: Float64Array) -> float:
    """Mean reward over the tasks."""
    rewards = np.where(WORLD.mask, -WORLD.times_us / WORLD.default_us[:, None], 0.0)
    return float((policy * rewards).sum(axis=1).mean())


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_intervals_hold_the_truth_nine_times_in_ten(policy: Float64Array) -> None:
    truth = -true_value(policy)
    told = [metrics.estimates(drawn_log(s), policy, BEHAVIOUR, 0.9) for s in range(200)]
    for name in ("SNIPS", "DR"):
        ends = np.array(
            [(each[name]["low"], each[name]["high"]) for each in told], dtype=np.float64
        )
        held = (ends[:, 0] <= truth) & (truth <= ends[:, 1])
        assert 0.85 <= held.mean() <= 0.95
    robust = np.array([each["DR"]["mean"] for each in told], dtype=np.float64)
    assert abs(robust.mean() - truth) < 4 * robust.std() / np.sqrt(200)  # without bias


def test_rows_that_followed_what_they_saw_have_no_interval() -> None:
    found = metrics.estimates(drawn_log(0)._replace(adaptive=True), ORACLE, BEHAVIOUR, 0.9)
    for name in ("SNIPS", "DR"):
        assert found[name]["mean"] is not None
        assert (found[name]["low"], found[name]["note"]) == (None, metrics.NO_INTERVAL)


def measured(folder: Path, strategy: str, cycles: int = 40, sigma: float = 0.05) -> pl.DataFrame:
    more = {"cycles": f"{cycles}\nstrategy = {strategy}", "seed": f"3\nnoise_sigma = {sigma}"}
    text = sweep_text(name='"drawn"', collectives='["AllReduce"]', **more)
    return read(make_data(folder, text))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    folder = tmp_path_factory.mktemp("random") / "store"
    return measured(folder, '{ kind = "random", share = 0.3 }')


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> TaskGrid:
    """All configs without noise."""
    folder = tmp_path_factory.mktemp("truth") / "store"
    frame = measured(folder, '{ kind = "exhaustive" }', 1, 0.0)
    return task_grid(frame, Catalogue.from_frame(usable(frame)), WHOLE)


class Always:
    """A policy that wants one config everywhere, but for the first `abstains` tasks."""

    name = "always"

    def __init__(self, action: int, abstains: int = 0) -> None:
        self._action, self._abstains = action, abstains

    def choose_among(self, tasks: pl.DataFrame, mask: npt.NDArray[np.bool_]) -> Actions:
        assert mask[:, self._action].all()
        return np.where(np.arange(tasks.height) < self._abstains, ABSTAIN_ACTION, self._action)


def values_of(frame: pl.DataFrame, policy: Always) -> dict[str, Any]:
    catalogue = Catalogue.from_frame(usable(frame))
    grid = task_grid(frame, catalogue, WHOLE)
    found = metrics.logged_values(frame, catalogue, grid, [cast(LearnedPolicy, policy)])
    return {system: by_policy["always"] for system, by_policy in found.items()}


@pytest.mark.parametrize(("action", "abstains"), [(1, 0), (4, 5)])
def test_truth_is_held(action: int, abstains: int, drawn: pl.DataFrame, exact: TaskGrid) -> None:
    found = values_of(drawn, Always(action, abstains))[SYSTEM]
    ratio = (exact.times_us[:, action] / exact.default_us)[abstains:]
    assert (found["tasks"], found["acts"]) == (exact.tasks.height, exact.tasks.height - abstains)
    for name in ("SNIPS", "DR"):
        each = found[name]
        # Means of noisy times and the noise of the default lie a little off the exact ones.
        assert each["mean"] == pytest.approx(ratio.mean(), rel=0.05)
        assert each["low"] - 0.03 < ratio.mean() < each["high"] + 0.03
        assert each["note"] == ""


def test_what_is_little_known_is_said(drawn: pl.DataFrame, data_dir: Path, tmp_path: Path) -> None:
    nowhere = values_of(drawn, Always(ABSTAIN_ACTION))[SYSTEM]
    assert nowhere == {"tasks": nowhere["tasks"], "acts": 0, "draws": 0}
    few = values_of(drawn.filter(pl.col("round") < 3), Always(1))[SYSTEM]
    assert few["DR"] == few["SNIPS"]
    assert few["DR"] == {"mean": None, "low": None, "high": None, "note": metrics.NO_OVERLAP}
    assert few["DM"]["mean"] > 0.0
    adaptive = '{ kind = "adaptive", max_rounds = 3, epsilon = 0.5 }'
    followed = values_of(measured(tmp_path / "store", adaptive), Always(2))[SYSTEM]
    assert (followed["DR"]["low"], followed["DM"]["note"]) == (None, metrics.NO_INTERVAL)
    assert followed["DR"]["note"] in {metrics.NO_INTERVAL, metrics.NO_OVERLAP}
    assert values_of(read(data_dir), Always(1)) == {}
