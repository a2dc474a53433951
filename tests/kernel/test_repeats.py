"""The belief on log times that follow a known law: what it doubts, fills in, and decides."""

import math
from collections.abc import Hashable, Sequence

import numpy as np
import pytest

from dynamiccl.repeats import (
    AUTO,
    Belief,
    Floats,
    Kernel,
    Surface,
    Task,
    Times,
    beliefs,
    cell_of,
    cells_of,
    choose_kernel,
    round_drift,
)

# --- The decision ---


def belief(
    means: list[float],
    *,
    sigma: float = 0.01,
    default: float = 1.0,
    observed: list[float] | None = None,
    proof: bool = True,
) -> Belief:
    """A belief in four configs and the default, all equally and independently unsure."""
    draws = np.random.default_rng(1).normal(size=(20_000, 5))
    mean = np.array([*means, default])
    return Belief(
        "abcd",
        mean,
        np.array([sigma] * 4 + [sigma if proof else math.inf]),
        mean + sigma * draws,
        mean if observed is None else np.array([*observed, default]),
    )


def test_the_decision_is_the_fastest_that_was_measured_and_surely_beats_the_default() -> None:
    fast = [1.1, 0.9, 0.8, 1.2]
    assert belief(fast).decision(0.9) == 2
    assert belief([1.1, 1.0, 1.2, 1.2]).decision(0.9) is None
    assert belief(fast, proof=False).decision(0.9) is None
    assert belief(fast, default=math.nan).decision(0.9) is None
    # What was measured leads; what is better, if it is, is asked for.
    unmeasured = belief(fast, observed=[1.1, 0.9, math.nan, 1.2]).policy(0.9)
    assert unmeasured == pytest.approx([0.0, 0.1, 0.9, 0.0])
    # Measured to be slow: it leads, so that it is measured again; until then the next is taken.
    slow = belief(fast, observed=[1.1, 0.9, 1.3, 1.2])
    assert slow.decision(0.9) == 1
    assert slow.policy(0.9) == pytest.approx([0.0, 0.0, 1.0, 0.0])
    # 1.8 standard deviations of a difference: an error of 3.6 %, a quarter of what is allowed.
    close = belief([1.0 - 1.8 * math.sqrt(2) * 0.01, 1.2, 1.2, 1.2])
    assert (close.decision(0.85), close.decision(0.86)) == (0, None)


def test_regret_is_over_all_that_may_be_best_and_the_policy_follows_it() -> None:
    assert belief([0.8, 0.9, 1.1, 1.2], sigma=1e-6).regret_draws(0.9).max() < 1e-4
    unmeasured = belief([0.8, 0.9, 1.1, 1.2], sigma=1e-6, observed=[math.nan, 0.9, 1.1, 1.2])
    assert unmeasured.regret_draws(0.9) == pytest.approx(0.1, abs=1e-4)
    # Two normal values of equal mean: the smaller one lies sigma / sqrt(pi) below.
    tied = belief([1.0, 9.0, 9.0, 9.0])
    assert tied.regret_draws(0.9).mean() == pytest.approx(0.01 / math.sqrt(math.pi), rel=0.05)
    # A tenth is the leader's; the decision itself causes no regret; the nearer a rival, the more.
    chosen = belief([0.9, 0.905, 0.91, 1.2]).policy(0.9)
    assert [chosen.sum(), chosen[0]] == pytest.approx([1.0, 0.1])
    assert chosen[1] > chosen[2] > chosen[3] == 0.0
    # Without a default, or a config with a time, all are alike.
    assert belief([1.0] * 4, default=math.nan).policy(0.9) == pytest.approx(0.25)
    assert belief([1.0] * 4, observed=[math.nan] * 4).policy(0.9) == pytest.approx(0.25)


# --- Several tasks ---


def task_of(size: int, seed: int = 0) -> Task:
    """Two subspaces of three configs each, ids are (size, name)."""
    places = [np.array([float(size), knob, AUTO]) for knob in (0.0, 1.0, 2.0)]
    subspaces: dict[Hashable, dict[Hashable, Floats]] = {
        name: {(size, f"{name}{i}"): place for i, place in enumerate(places)} for name in "ab"
    }
    return Task(float(size), subspaces, (size, "default"), seed)


SIZES = (16, 17, 18)
TASKS = [task_of(size) for size in SIZES]
#: All configs but those of `b`, which nobody measured, and 16's last of `a`; two rounds.
TIMES: Times = {
    (size, name): [(n, level + 0.1 * size + 0.001 * (n + size % 2)) for n in (0, 1)]
    for size in SIZES
    for name, level in (("a0", 1.2), ("a1", 1.0), ("a2", 1.1), ("default", 1.15))
    if (size, name) != (16, "a2")
}


def test_a_belief_is_about_what_never_failed_in_subspaces_that_can_work() -> None:
    failed = {(16, "a0"), (16, "b0"), (17, "b1")}
    first, second, _ = beliefs(TASKS, TIMES, failed)
    assert first.configs == [(16, "a1"), (16, "a2"), (16, "b1"), (16, "b2")]
    assert [len(first.mean), len(first.sigma), first.draws.shape[1], len(first.observed)] == [5] * 4
    assert np.isnan(first.observed).tolist() == [False, True, True, True, False]
    assert first.mean[1] == pytest.approx(1.1 + 1.6, abs=0.05)  # its neighbours say so
    assert second.configs[second.decision(0.9) or 0] == (17, "a1")
    # Nothing of `b` ever worked, and three of it failed; of `a` something works.
    failed |= {(18, "b1"), (17, "a0"), (18, "a0")}
    first, *_ = beliefs(TASKS, TIMES, failed)
    assert first.configs == [(16, "a1"), (16, "a2")]


def test_a_default_that_failed_or_that_one_round_measured_proves_nothing() -> None:
    taken = [found.decision(0.9) for found in beliefs(TASKS, TIMES, set())]
    assert None not in taken
    (lost, *rest) = beliefs(TASKS, TIMES, {(16, "default")})
    assert math.isnan(lost.observed[-1])
    assert math.isnan(lost.draws[:, -1].min())
    assert [lost.decision(0.9), *(found.decision(0.9) for found in rest)] == [None, *taken[1:]]
    assert {found.decision(0.9) for found in beliefs(TASKS, {}, set())} == {None}
    once: Times = {**TIMES, **{(size, "default"): [(0, 1.15 + 0.1 * size)] * 2 for size in SIZES}}
    (found, *_) = beliefs(TASKS, once, set())
    assert found.decision(0.9) is None
    assert np.isfinite(found.draws).all()
    (other, *_) = beliefs([task_of(16, seed=1), *TASKS[1:]], once, set())
    assert np.array_equal(found.mean, other.mean)
    assert not np.array_equal(found.draws, other.draws)


# --- Cells and drift ---


def test_a_cell_is_a_median_with_the_noise_of_its_size_or_its_own() -> None:
    assert cell_of([1.0], 0.1) == pytest.approx((1.0, 0.01, 1))
    assert cell_of([1.0, 1.2], 0.1) == pytest.approx((1.1, 0.005, 2))
    # No pair: 4 standard deviations of a difference are 0.566.
    assert cell_of([1.0, 1.56], 0.1) == pytest.approx((1.28, 0.005, 2))
    assert cell_of([1.57, 1.0], 0.1) == pytest.approx((1.0, 0.01, 1))
    assert cell_of([1.0, 1.1, 1.3], 0.1) == pytest.approx((1.1, math.pi / 2 * 0.01 / 3, 3))
    own = 1.4826 * 0.2
    assert cell_of([1.0, 1.2, 1.4], 0.1) == pytest.approx((1.2, math.pi / 2 * own**2 / 3, 3))


def test_noise_is_that_of_near_sizes_where_they_say_enough() -> None:
    def variances(*sizes: tuple[float, int, float]) -> list[float]:
        """Of a cell of each log2 size, where so many are measured in pairs so far apart."""
        tasks = [
            Task(size, {"s": {(size, i): np.zeros(3) for i in range(pairs)}}, None, 0)
            for size, pairs, _ in sizes
        ]
        times: Times = {
            (size, i): [(0, 1.0), (1, 1.0 + apart)]
            for size, pairs, apart in sizes
            for i in range(pairs)
        }
        cells = cells_of(tasks, times)
        return [cells[size, 0][1] for size, *_ in sizes]

    def variance(apart: float) -> float:
        return (1.4826 * apart / math.sqrt(2)) ** 2 / 2

    quiet, loud = variance(0.02), variance(0.2)
    assert variances((10.0, 12, 0.02), (20.0, 13, 0.2)) == pytest.approx([quiet, loud])
    assert variances((10.0, 11, 0.02), (20.0, 13, 0.2)) == pytest.approx([loud, loud])
    near = variances((10.0, 6, 0.02), (11.5, 6, 0.02), (20.0, 13, 0.2))
    assert near == pytest.approx([quiet, quiet, loud])
    far = variances((10.0, 6, 0.02), (11.6, 6, 0.02), (20.0, 13, 0.2))
    assert far == pytest.approx([loud, loud, loud])
    single = Task(10.0, {"s": {"x": np.zeros(3)}}, None, 0)
    assert cells_of([single], {"x": [(0, 1.0)]})["x"] == pytest.approx((1.0, 0.03**2, 1))
    same = cells_of([single], {"x": [(0, 1.0), (1, 1.0)]})["x"]
    assert same == pytest.approx((1.0, 0.001**2 / 2, 2))


def drifting(
    drifts: list[float], tasks: int, sigma: float, seed: int = 4
) -> list[list[tuple[int, float]]]:
    generator = np.random.default_rng(seed)
    rounds = [(n, drift) for n, drift in enumerate(drifts) for _ in range(2)]
    return [
        [(n, task + drift + float(generator.normal(0.0, sigma))) for n, drift in rounds]
        for task in range(tasks)
    ]


def test_a_slow_round_is_found_and_neither_noise_nor_slow_calls_are_taken_for_it() -> None:
    found = round_drift(drifting([0.0, 0.2, 0.0, 0.05], 20, 0.01))
    assert found[1] - found[0] == pytest.approx(0.2, abs=0.02)
    assert found[3] - found[2] == pytest.approx(0.05, abs=0.02)
    # Tasks that are settled have no later rounds.
    every = drifting([0.0, 0.2, 0.0, 0.3, 0.0], 20, 0.005)
    settled = [[pair for pair in task if pair[0] < 2 or at < 12] for at, task in enumerate(every)]
    found = round_drift(settled)
    assert [found[n] - found[0] for n in (1, 3)] == pytest.approx([0.2, 0.3], abs=0.01)
    # The median over eight tasks scatters by this much; the lower of a pair by 0.83 of one.
    by_noise = 0.83 * 0.05 * math.sqrt(math.pi / 2 / 8)
    quiet = [round_drift(drifting([0.0] * 6, 8, 0.05, seed)) for seed in range(40)]
    values = [value for one in quiet for value in one.values()]
    assert float(np.sqrt(np.mean(np.square(values)))) < 0.5 * by_noise
    slow = [
        sorted((n, value + (n == 3 and at % 2)) for at, (n, value) in enumerate(task))
        for task in drifting([0.0] * 5, 8, 0.01)
    ]
    assert max(round_drift(slow).values()) - min(round_drift(slow).values()) < 0.03
    assert round_drift(drifting([0.0, 0.5], 4, 0.01)).keys() == {0, 1}
    for few in ([], drifting([0.0, 0.5], 3, 0.01), [[(0, 1.0), (0, 1.1)]] * 5):
        assert round_drift(few) == {}


# --- The Gaussian process ---

#: 64 KiB to 64 MiB, AUTO and six channel counts.
PLACES = np.array(
    [(float(size), knob, AUTO) for size in range(16, 27) for knob in (AUTO, 0, 1, 2, 3, 4, 5)]
)


def hockney(places: Floats) -> Floats:
    """Log time: latency, bandwidth, and a best channel count by size; AUTO is 8 channels."""
    log2_size, knob = places[:, 0], np.where(places[:, 1] == AUTO, 3.0, places[:, 1])
    crowding = 1.0 + 0.08 * (knob - (log2_size - 16.0) / 2.0) ** 2
    log_us: Floats = np.log(40.0 + 2.0**log2_size / 200e3 * crowding)
    return log_us


def rows(places: Floats, sigma: float) -> Floats:
    noise = np.random.default_rng(1).normal(0.0, sigma, len(places))
    cells = np.tile([0.0, sigma**2, 1.0], (len(places), 1))
    cells[:, 0] = hockney(places) + noise
    return np.hstack([places, cells])


def posterior(surface: Surface, places: Floats) -> Sequence[Floats]:
    return surface.posterior(places, np.random.default_rng(2))


def test_a_slow_outlier_is_doubted_and_a_fast_one_and_repeats_are_not() -> None:
    slow, fast, repeated = (rows(PLACES, sigma=0.01) for _ in range(3))
    slow[30, 3] += 1.0
    repeated[30, 3] += 1.0
    repeated[30, 5] = 3
    fast[30, 3] -= 1.0
    assert math.sqrt(Surface(Kernel(), slow).variance[30]) > 0.2
    mean, _, _ = posterior(Surface(Kernel(), slow), PLACES)
    assert np.abs(mean - hockney(PLACES)).max() < 0.05
    for believed in (fast, repeated):
        assert Surface(Kernel(), believed).variance[30] == believed[30, 4]


def test_the_chosen_kernel_fills_gaps() -> None:
    seen = rows(PLACES[::3], sigma=0.01)
    mean, sigma, draws = posterior(Surface(choose_kernel([seen]), seen), PLACES)
    error = mean - hockney(PLACES)
    assert np.sqrt((error**2).mean()) < 0.05
    assert 0.2 < np.sqrt((error**2 / sigma**2).mean()) < 2.5
    assert draws.mean(axis=0) == pytest.approx(mean, abs=0.02)
    assert draws.std(axis=0) == pytest.approx(sigma, rel=0.3)


def test_auto_is_like_auto_at_other_sizes_and_like_no_number() -> None:
    kernel = Kernel(own=0.0)
    auto, number = np.array([[16.0, AUTO, AUTO]]), np.array([[16.0, 0.0, AUTO]])
    level = 3.0**2 + 0.5**2 * 16.0 + kernel.curve**2
    assert Kernel().matrix(auto, number).item() == pytest.approx(level)
    assert kernel.matrix(auto, auto).item() == pytest.approx(level + kernel.knobs**2)
    assert kernel.matrix(auto, np.add(auto, [1.0, 0.0, 0.0])).item() > level - 1.0
    assert Kernel().matrix(auto, auto).item() == pytest.approx(level + kernel.knobs**2 + 0.01**2)
