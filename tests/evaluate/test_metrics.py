"""Figures of choices: by hand, cross-fitted and from drawn logs; and of the baselines' choices."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import TaskGrid, task_grid, usable
from dynamiccl.datasets.features import ENVIRONMENT_COLUMNS
from dynamiccl.datasets.schema import TASK_COLUMNS
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read
from dynamiccl.evaluate import metrics
from dynamiccl.evaluate.baselines import (
    NCCL_DEFAULT,
    ORACLE,
    REPEATS,
    Actions,
    BestFixed,
    CoordinateDescent,
    FiveBins,
    Float64Array,
    GradientBoosting,
    Interpolated,
    LearnedPolicy,
    NearestSize,
    Policy,
    PooledFixed,
    make_policies,
)
from dynamiccl.evaluate.metrics import (
    INDEPENDENT,
    OPTIMISTIC,
    cross_fit,
    fitted_rows,
    result_rows,
    summarise,
)
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.train.policy import TorchPolicy
from tests.conftest import Trained
from tests.data_sets import SYSTEM, make_data, sweep_text

NAN = float("nan")


def grid(sizes: list[int], times: list[list[float]], **columns: Any) -> TaskGrid:
    """A grid of one family: a row a size, a column an action (0 = NCCL's default)."""
    shared = dict.fromkeys((*TASK_COLUMNS, *ENVIRONMENT_COLUMNS))
    shared |= {"system": "s", "collective": "AllReduce"} | columns
    tasks = pl.DataFrame([{**shared, "size_bytes": size} for size in sizes])
    values = np.array(times)
    measured = ~np.isnan(values)
    samples = {(int(t), int(a)): np.repeat(values[t, a], 3) for t, a in np.argwhere(measured)}
    return TaskGrid(tasks, values, np.where(measured, 3, 0), tasks.head(0), samples)


def noise(band: float | None = None, **others: float) -> pl.DataFrame:
    """The noise band of AllReduce on the grids' system, and of other collectives."""
    bands = {"AllReduce": band, **others}
    rows = [("s", name, each) for name, each in bands.items() if each is not None]
    types = {"system": pl.String, "collective": pl.String, "noise_band": pl.Float64}
    return pl.DataFrame(rows, schema=types, orient="row")


TRAINING = grid(
    [1 << 10, 1 << 20, 1 << 30], [[10.0, 9.0, 20.0], [100.0, 120.0, 80.0], [1000.0, NAN, 700.0]]
)


MADE = Catalogue(
    (ABSTAIN, Config(Algorithm.Ring, Protocol.LL), Config(Algorithm.Ring, Protocol.Simple))
)
GRID = grid([1 << 10, 1 << 20], [[10.0, 8.0, 16.0], [100.0, 400.0, 100.0]])
CHOICES = {
    "policy": np.array([1, 0]),
    "nccl-default": np.array([0, 0]),
    "best-fixed": np.array([2, 2]),
}


def summaries(
    band: float | None = 0.05, of: TaskGrid = GRID, **probes: list[int]
) -> dict[str, dict[str, Any]]:
    tried = {name: np.array(each) for name, each in probes.items()}
    choices = {name: each[: of.tasks.height] for name, each in CHOICES.items()}
    return summarise(result_rows(of, MADE, choices, noise(band), tried), of, choices)


def test_figures_by_hand() -> None:
    found = summaries()
    default, ours, fixed = (found[name] for name in ("nccl-default", "policy", "best-fixed"))
    assert default["mean"] == pytest.approx(0.125)  # 10/8 - 1 and 0
    assert default["max"] == pytest.approx(0.25)
    assert default["p95"] == pytest.approx(0.95 * 0.25)
    assert (default["ratio_to_default"], default["noise_band"]) == (1.0, 0.05)
    assert ours["mean"] == 0.0
    assert ours["ratio_to_default"] == pytest.approx(np.sqrt(0.8))
    assert ours["gain"] == pytest.approx(1 - np.sqrt(0.8))
    assert ours["abstained"] == 0.5
    assert fixed["slower_than_default"] == 0.5  # 16 against 10
    assert summaries(0.7)["best-fixed"]["slower_than_default"] == 0.0
    assert summaries(None)["best-fixed"]["slower_than_default"] is None
    assert summaries(None)["policy"]["noise_band"] is None


def test_every_collective_has_its_own_noise_band() -> None:
    times = [[10.0, 8.0, 11.0], [10.0, 8.0, 11.0]]
    both = grid([1, 1], times)
    both = replace(
        both, tasks=both.tasks.with_columns(collective=np.array(["AllReduce", "Reduce"]))
    )
    rows = result_rows(both, MADE, CHOICES, noise(0.2, Reduce=0.05))
    assert rows.filter(policy="policy")["noise_band"].to_list() == [0.2, 0.05]
    assert summarise(rows, both, CHOICES)["best-fixed"]["slower_than_default"] == 0.5
    # Of one task alone nothing is said of both.
    partly = summarise(result_rows(both, MADE, CHOICES, noise(0.2)), both, CHOICES)
    for each in partly.values():
        assert (each["noise_band"], each["slower_than_default"]) == (None, None)


def test_interval_holds_the_mean_and_needs_independent_repeats() -> None:
    noisy = {key: times * np.array([0.9, 1.0, 1.1]) for key, times in GRID.samples.items()}
    ours = summaries(0.05, replace(GRID, samples=noisy), policy=[3, 5])["policy"]
    low, high = ours["interval"]
    assert low <= ours["crossfit"] <= high
    low, high = ours["gain_interval"]
    assert low <= ours["gain"] <= high
    assert ours["tasks_with_interval"] == 2
    assert ours["probes"] == 4.0
    single = grid([1 << 10], [[10.0, 8.0, 16.0]])
    single.repeats[0, 2] = 2
    alone = summaries(0.05, single)["policy"]
    assert (alone["interval"], alone["gain_interval"], alone["crossfit"]) == (None, None, None)
    assert alone["tasks_with_interval"] == 0


def test_rows_mark_cells_without_independent_runs_and_compare_channels_that_were_read() -> None:
    mixed = grid([1 << 10, 1 << 20], GRID.times_us.tolist())
    mixed.repeats[1, 1] = 1
    mixed = replace(mixed, channels=np.array([[16.0, 4.0, 32.0], [16.0, 2.0, np.nan]]))
    rows = result_rows(mixed, MADE, CHOICES, noise(0.05))
    fixed = rows.filter(policy="best-fixed")
    assert fixed["channels"].to_list() == [32.0, None]
    assert fixed["default_channels"].to_list() == [16.0, 16.0]
    # Where it chose the same at the second, nobody knows.
    assert summaries(0.05, mixed)["best-fixed"]["channels"] == 2.0
    ours = rows.filter(policy="policy")
    assert ours["evidence"].to_list() == [INDEPENDENT, OPTIMISTIC]
    assert ours["chosen_config"].to_list() == ["Ring/LL", "ABSTAIN"]
    assert ours["oracle_us"].to_list() == [8.0, 100.0]
    assert ours["noise_band"].to_list() == [0.05, 0.05]
    assert ours["gain"].to_list() == [pytest.approx(0.2), 0.0]


def measured(true_us: list[float], *, tasks: int, runs: int, spread: float, seed: int) -> TaskGrid:
    """Tasks alike, every cell measured `runs` times with log-normal noise."""
    random = np.random.default_rng(seed)
    exact = grid([1 << 10] * tasks, [true_us] * tasks)
    samples = {
        cell: times[0] * random.lognormal(0.0, spread, runs)
        for cell, times in exact.samples.items()
    }
    times = exact.times_us.copy()
    for (task, action), values in samples.items():
        times[task, action] = np.median(values)
    return replace(exact, times_us=times, samples=samples)


def regret_of(tasks: TaskGrid, action: int) -> tuple[float, list[float], float]:
    """Cross-fitted regret, its interval, and gain of one config throughout."""
    count = tasks.tasks.height
    rows = fitted_rows(tasks, np.arange(count))
    found = cross_fit(tasks, rows, {"any": np.full(count, action)})["any"]
    return found["crossfit"], found["interval"], found["gain_crossfit"]


def test_a_real_difference_is_found_and_of_configs_that_are_alike_none() -> None:
    """Against the best of ten noisy medians any of them seems to lose; none does."""
    alike = measured([100.0] * 10, tasks=200, runs=5, spread=0.05, seed=0)
    assert alike.regret(np.full(200, 3)).mean() > 0.03
    regret, (low, high), _ = regret_of(alike, 3)
    assert abs(regret) < 0.005
    assert low < 0.0 < high
    tasks = measured([110.0, 100.0, 150.0], tasks=100, runs=6, spread=0.02, seed=1)
    regret, (low, high), gain = regret_of(tasks, 0)
    assert regret == pytest.approx(0.10, abs=0.01)
    assert low < 0.10 < high
    assert gain == 0.0
    regret, _, gain = regret_of(tasks, 1)
    assert regret == pytest.approx(0.0, abs=0.005)
    assert gain == pytest.approx(1 - 1 / 1.1, abs=0.01)


def test_equal_twins_are_one() -> None:
    """Broadcast and Reduce of a simulated system count once; other sizes and times do not."""
    rows = [[10.0, NAN, 8.0], [10.0, NAN, 8.0], [10.0, 9.0, 8.0], [10.0, NAN, 8.0]]
    twins = grid([1, 1, 1, 2], rows)
    assert fitted_rows(twins, np.arange(4)).tolist() == [0, 2, 3]
    twins.repeats[0] = 2  # too few runs
    assert fitted_rows(twins, np.arange(4)).tolist() == [1, 2, 3]


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
FASTEST = np.eye(ACTIONS)[np.nanargmin(WORLD.times_us, axis=1)]
DEFAULT = np.eye(ACTIONS)[np.zeros(TASKS, dtype=np.int64)]
BEHAVIOUR = mixture(DEFAULT, WORLD.mask, 0.7)
POLICIES = {"oracle": FASTEST, "half-random oracle": mixture(FASTEST, WORLD.mask, 0.5)}


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


def swept(folder: Path, strategy: str, cycles: int = 40, sigma: float = 0.05) -> pl.DataFrame:
    more = {"cycles": f"{cycles}\nstrategy = {strategy}", "seed": f"3\nnoise_sigma = {sigma}"}
    text = sweep_text(name='"drawn"', collectives='["AllReduce"]', **more)
    return read(make_data(folder, text))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    folder = tmp_path_factory.mktemp("random") / "store"
    return swept(folder, '{ kind = "random", share = 0.3 }')


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> TaskGrid:
    """All configs without noise."""
    folder = tmp_path_factory.mktemp("truth") / "store"
    frame = swept(folder, '{ kind = "exhaustive" }', 1, 0.0)
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
    followed = values_of(swept(tmp_path / "store", adaptive), Always(2))[SYSTEM]
    assert (followed["DR"]["low"], followed["DM"]["note"]) == (None, metrics.NO_INTERVAL)
    assert followed["DR"]["note"] in {metrics.NO_INTERVAL, metrics.NO_OVERLAP}
    assert values_of(read(data_dir), Always(1)) == {}


KNOBS = ((Algorithm.Ring, "LL", 2), (Algorithm.Ring, "Simple", 16), (Algorithm.Tree, "LL128", 8))
CATALOGUE = Catalogue((ABSTAIN, *(Config(a, Protocol.parse(p), n) for a, p, n in KNOBS)))
CHANNELS = (1, 2, 4, 8, 16, 32)
RING = [Config(Algorithm.Ring, Protocol.Simple, channels) for channels in CHANNELS]
TREE = [Config(Algorithm.Tree, Protocol.LL, channels) for channels in CHANNELS]
SEARCHED = Catalogue((ABSTAIN, *RING, *TREE))
#: One valley in each subspace, without a step longer than one; the best is Tree with 8 channels.
GENTLE = [50.0, *(40.0, 36.0, 33.0, 36.0, 40.0, 44.0), *(32.0, 28.0, 25.0, 22.0, 24.0, 27.0)]
BOTTOM = 1 + len(RING) + CHANNELS.index(8)


ONES = [1.0, 1.0, 1.0]
BETTER = grid([1 << 10, 1 << 20], [[10.0, 9.0, 12.0], [100.0, 120.0, 50.0]])
#: 2 KiB and 32 KiB share a bin: the fastest row of all is action 1 at 2 KiB.
BINS = grid(
    [2 << 10, 32 << 10, 2 << 20], [[10.0, 8.0, 9.0], [40.0, 60.0, 20.0], [100.0, 120.0, 90.0]]
)
ASKED = grid([512, 1 << 10, 3 << 10, 64 << 10, 8 << 20, 1 << 30], [ONES] * 6)
APART = grid([1 << 12, 1 << 19, 1 << 28], [ONES] * 3)
OTHER = grid([1 << 20], [ONES], launch_profile="other")


@pytest.mark.parametrize(
    ("table", "told", "asked", "chosen"),
    [
        # Action 1: log(.9) + log(1.2) + 0 > 0; action 2: log(2) + log(.8) + log(.7) > 0 as well.
        pytest.param(BestFixed, TRAINING, TRAINING, [0, 0, 0], id="least mean log ratio"),
        pytest.param(BestFixed, BETTER, BETTER, [2, 2], id="least mean log ratio, a config"),
        # The default where its config was not measured.
        pytest.param(BestFixed, BETTER, grid([1 << 11], [[20.0, 18.0, NAN]]), [0], id="no config"),
        pytest.param(NearestSize, TRAINING, APART, [1, 2, 2], id="the nearest size by ratio"),
        pytest.param(
            NearestSize, TRAINING, grid([1 << 20], [[1.0, 1.0, NAN]]), [0], id="what was measured"
        ),
        pytest.param(NearestSize, TRAINING, OTHER, [0], id="no table of another family"),
        pytest.param(BestFixed, TRAINING, OTHER, [0], id="no config of another family"),
        pytest.param(FiveBins, BINS, ASKED, [0, 0, 1, 1, 2, 0], id="the raw best row of a bin"),
        pytest.param(FiveBins, BINS, grid([3 << 10], [[1.0, NAN, 1.0]]), [0], id="not measured"),
        pytest.param(lambda _: NCCL_DEFAULT, BINS, TRAINING, [0, 0, 0], id="abstains"),
        pytest.param(lambda _: ORACLE, BINS, TRAINING, [1, 2, 2], id="the fastest"),
    ],
)
def test_tables_hold_what_was_the_fastest(
    table: Callable[[TaskGrid], Policy], told: TaskGrid, asked: TaskGrid, chosen: list[int]
) -> None:
    assert table(told).choose(asked).tolist() == chosen


def law(sizes: list[int], system: str = "s") -> TaskGrid:
    """LL is best below 64 KiB, Tree up to 16 MiB, and the default from there on."""
    times = []
    for size in sizes:
        mib = size / (1 << 20)
        times.append([20 + 12 * mib, 5 + 400 * mib, 60 + 13 * mib, 12 + 12.4 * mib])
    return grid(sizes, times, system=system)


def boosting(training: TaskGrid) -> Policy:
    return GradientBoosting(training, CATALOGUE)


SIZES = [1 << n for n in range(10, 31)]
BETWEEN = [3 << n for n in range(9, 29)]


@pytest.mark.parametrize("make", [boosting, Interpolated])
def test_a_regression_finds_the_law_between_sizes(make: Callable[[TaskGrid], Policy]) -> None:
    training = law(SIZES)
    policy, test = make(training), law(BETWEEN)
    actions = policy.choose(test)
    assert len(set(actions.tolist())) == 3
    assert test.regret(actions).mean() < 0.03
    assert test.regret(actions).mean() < 0.2 * test.regret(NCCL_DEFAULT.choose(test)).mean()
    assert np.array_equal(make(training).choose(test), actions)  # the same twice
    # A config that training never had, and then none.
    for unmeasured, best in ((slice(1, 2), 3), (slice(1, None), 0)):
        times = law([1 << 12]).times_us.copy()
        times[:, unmeasured] = NAN
        assert policy.choose(grid([1 << 12], times.tolist())).tolist() == [best]
    times = training.times_us.copy()
    times[:, 2] = NAN  # a knob that training never set
    assert make(grid(SIZES, times.tolist())).choose(law([1 << 12])).tolist() == [1]


def test_rivals_know_training_and_validation_and_one_pools_all_shapes() -> None:
    """At a validation size, between two training sizes, another config is the fastest."""
    far = [[10.0, 5.0, 9.0]] * 2
    training, validation = grid([1 << 10, 1 << 30], far), grid([1 << 20], [[10.0, 5.0, 1.0]])
    asked = grid([1 << 21], [[1.0, 1.0, 1.0]])
    players = {p.name: p for p in make_policies(training, validation, CATALOGUE, [])}
    told = ("nearest-size", "interpolated")
    assert {name: players[name].choose(asked).tolist() for name in told} == {n: [2] for n in told}
    times = [[10.0, 5.0, 9.0], [10.0, 9.0, 2.0]]
    both = grid([1 << 10] * 2, times, num_nodes=1)
    both = replace(both, tasks=both.tasks.with_columns(num_nodes=pl.Series([1, 4])))
    assert BestFixed(both).choose(both).tolist() == [1, 2]
    assert PooledFixed(both).choose(both).tolist() == [2, 2]
    assert PooledFixed(both).choose(grid([1 << 10], [[1.0, 1.0, 1.0]], num_nodes=8)).tolist() == [2]


@pytest.mark.parametrize(
    ("times", "chosen", "probes"),
    [
        # From the most channels to one past the bottom, and NCCL's own choice.
        pytest.param(GENTLE, BOTTOM, REPEATS * (1 + 5 + 4), id="the bottom of every valley"),
        pytest.param([10.0, *GENTLE[1:]], 0, REPEATS * (1 + 5 + 4), id="NCCL's own is faster"),
        pytest.param(
            [50.0, *[NAN] * 6, 40.0, *[NAN] * 5], 7, REPEATS * 2, id="a subspace of one config"
        ),
        pytest.param([50.0, 20.0, 40.0, 30.0, *[NAN] * 9], 3, None, id="it stays in its valley"),
        pytest.param([50.0, 20.0, NAN, 40.0, *[NAN] * 9], 1, None, id="and on what was measured"),
    ],
)
def test_descent(times: list[float], chosen: int, probes: int | None) -> None:
    searcher = CoordinateDescent(SEARCHED)
    assert searcher.choose(grid([1 << 10], [times])).tolist() == [chosen]
    assert searcher.probes is not None
    assert probes in {None, *searcher.probes.tolist()}


def test_a_learned_policy_answers_in_the_catalogue_of_the_data(trained: Trained) -> None:
    frame = read(trained.data)
    own = Catalogue.from_frame(usable(frame))
    # The same configs in another order: the answers must name the same configs.
    shuffled = Catalogue((own.configs[0], *reversed(own.configs[1:])))
    policy = TorchPolicy.load(trained.policy)
    chosen = []
    for catalogue in (own, shuffled):
        test = task_grid(frame, catalogue, [Split.TEST])
        learned = LearnedPolicy(policy, catalogue, "policy")
        actions = learned.choose(test)
        chosen.append([catalogue.configs[a] for a in actions])
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) > 1
    favourite = int(np.bincount(actions)[1:].argmax()) + 1
    times = test.times_us.copy()
    times[:, favourite] = NAN
    assert favourite not in learned.choose(replace(test, times_us=times))
