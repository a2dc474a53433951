import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamiccl.collect.strategies.samples import (
    cell_of,
    condense,
    failed_trials,
    noise_sigma,
    round_drift,
    times_by_trial,
)
from dynamiccl.collect.strategies.strategy import Outcome, group_by_task
from tests.collect.strategies.worlds import sweep


def test_only_times_count_as_times() -> None:
    values = [None, 0.0, -1.0, math.nan, math.inf, 7.0]
    history = [Outcome("a", n, value, ok=True) for n, value in enumerate(values)]
    history.append(Outcome("a", 9, 5.0, ok=False))
    assert times_by_trial(history) == {"a": ((5, math.log(7.0)),)}
    assert failed_trials(history) == {"a"}


@given(st.permutations(range(6)))
def test_the_order_of_a_history_does_not_matter(order: list[int]) -> None:
    history = [Outcome("ab"[n % 2], n // 4, 10.0 + n, ok=True) for n in range(6)]
    assert times_by_trial([history[n] for n in order]) == times_by_trial(history)


def test_noise_is_that_of_one_time_and_ignores_the_tail() -> None:
    random = np.random.default_rng(1)
    differences = [(20.0, float(d)) for d in random.normal(0.0, 0.02 * math.sqrt(2), 400)]
    differences += [(20.0, 3.0)] * 20
    assert noise_sigma(differences, 20.0) == pytest.approx(0.02, rel=0.15)


def test_noise_is_taken_from_near_sizes_where_there_are_enough() -> None:
    random = np.random.default_rng(2)
    small = [(12.0, float(d)) for d in random.normal(0.0, 0.1, 100)]
    large = [(30.0, float(d)) for d in random.normal(0.0, 0.001, 100)]
    assert noise_sigma(small + large, 12.5) > 30 * noise_sigma(small + large, 29.0)
    # No repeat near 20: all of them say something.
    assert noise_sigma(small + large, 20.0) == noise_sigma(large + small, 21.0)
    assert noise_sigma((), 20.0) > 0.01


def test_a_cell_is_the_median_with_the_variance_of_a_median() -> None:
    assert cell_of([1.0], 0.1).variance == pytest.approx(0.01)
    pair = cell_of([1.0, 1.1], 0.1)
    assert pair.log_us == pytest.approx(1.05)
    assert pair.variance == pytest.approx(0.005)
    assert pair.repeats == 2
    random = np.random.default_rng(3)
    medians = np.median(random.normal(0.0, 0.1, (4000, 9)), axis=1)
    assert cell_of(list(np.linspace(0.9, 1.1, 9)), 0.1).variance == pytest.approx(
        float(np.var(medians)), rel=0.2
    )


def test_of_two_that_disagree_the_faster_counts_alone() -> None:
    cell = cell_of([1.0, 2.0], 0.01)
    assert (cell.log_us, cell.repeats) == (1.0, 1)
    assert cell.variance == pytest.approx(1e-4)


def test_two_states_make_a_cell_unsure_of_itself() -> None:
    assert cell_of([1.0, 1.0, 2.0, 2.0], 0.01).variance > 0.1
    # One outlier of four is none of its business.
    assert cell_of([1.0, 1.0, 1.01, 2.0], 0.01).variance < 1e-3


def drifting(
    drifts: list[float], tasks: int, sigma: float, seed: int = 4
) -> list[tuple[tuple[int, float], ...]]:
    random = np.random.default_rng(seed)
    return [
        tuple(
            (n, task + drift + float(random.normal(0.0, sigma)))
            for n, drift in enumerate(drifts)
            for _ in range(2)
        )
        for task in range(tasks)
    ]


def test_a_slow_round_is_found_and_its_level_is_arbitrary() -> None:
    found = round_drift(drifting([0.0, 0.2, 0.0, 0.05], 20, 0.01))
    assert found[1] - found[0] == pytest.approx(0.2, abs=0.02)
    assert found[3] - found[2] == pytest.approx(0.05, abs=0.02)


def test_noise_is_not_taken_for_drift() -> None:
    # The median over eight tasks scatters by this much; the lower of a pair by 0.83 of one.
    by_noise = 0.83 * 0.05 * math.sqrt(math.pi / 2 / 8)
    found = [
        value
        for seed in range(40)
        for value in round_drift(drifting([0.0] * 6, 8, 0.05, seed)).values()
    ]
    assert float(np.sqrt(np.mean(np.square(found)))) < 0.5 * by_noise
    assert round_drift([]) == {}
    assert round_drift(drifting([0.0, 0.5], 3, 0.01)) == {}
    assert round_drift([((0, 1.0), (0, 1.1))] * 5) == {}
    assert round_drift([((0, 1.0), (1, 2.0))]) == {}


def test_slow_calls_are_not_taken_for_drift() -> None:
    times = drifting([0.0] * 5, 8, 0.01)
    slow = [
        tuple((n, value + (n == 3 and at % 2)) for at, (n, value) in enumerate(task))
        for task in times
    ]
    found = round_drift([tuple(sorted(task)) for task in slow])
    assert max(found.values()) - min(found.values()) < 0.03


def test_a_subspace_that_never_works_is_out_for_all_tasks() -> None:
    tasks = group_by_task(sweep().trials)
    tree = [t for task in tasks for t in task.candidates if t.config.key.startswith("Tree/LL")]
    history = [Outcome(trial.key, 0, None, ok=False) for trial in tree[:3]]
    samples = condense(tasks, times_by_trial(history), failed_trials(history))
    assert samples.failed == {trial.key for trial in tree}
    history.append(Outcome(tree[9].key, 0, 10.0, ok=True))
    samples = condense(tasks, times_by_trial(history), failed_trials(history))
    assert samples.failed == {trial.key for trial in tree[:3]}
