import math
from dataclasses import replace

import numpy as np
import pytest

from dynamiccl.collect.strategies.belief import Belief, current_beliefs
from dynamiccl.collect.strategies.exhaustive import Exhaustive
from dynamiccl.collect.strategies.strategy import Outcome, group_by_task
from tests.collect.strategies.worlds import World, hockney, normal, sweep

TASK = group_by_task(sweep(algorithms='["Ring"]', num_channels="[0, 8]").trials)[0]


def belief(
    means: list[float],
    *,
    sigma: float = 0.01,
    default: float = 1.0,
    observed: list[float] | None = None,
    rounds: int = 2,
) -> Belief:
    """A belief in four configs, all equally and independently unsure."""
    random = np.random.default_rng(1)
    mean = np.array(means)
    return Belief(
        TASK,
        TASK.candidates,
        mean,
        np.full(4, sigma),
        mean if observed is None else np.array(observed),
        default,
        sigma,
        rounds,
        mean + sigma * random.normal(size=(20_000, 4)),
        default + sigma * random.normal(size=20_000),
    )


def test_the_decision_is_the_fastest_that_beats_the_default() -> None:
    assert belief([1.1, 0.9, 0.8, 1.2]).decision(0.9) == 2
    assert belief([1.1, 1.0, 1.2, 1.2]).decision(0.9) is None
    assert belief([1.1, 0.9, 0.8, 1.2], rounds=1).decision(0.9) is None
    assert belief([1.1, 0.9, 0.8, 1.2], default=math.nan).decision(0.9) is None


def test_what_was_not_measured_does_not_lead() -> None:
    known = belief([1.1, 0.9, 0.8, 1.2], observed=[1.1, 0.9, math.nan, 1.2])
    assert known.leader() == 1
    assert belief([1.0] * 4, observed=[math.nan] * 4).leader() is None


def test_what_was_measured_to_be_slow_is_not_taken_on_the_word_of_its_neighbours() -> None:
    found = belief([1.1, 0.9, 0.8, 1.2], observed=[1.1, 0.9, 1.3, 1.2])
    # It leads, so that it is measured again; until then the next one is taken.
    assert (found.leader(), found.decision(0.9)) == (2, 1)


def test_confidence_is_that_of_a_normal_difference() -> None:
    # 1.8 standard deviations of a difference: an error of 3.6 %, a quarter of what is allowed.
    gain = 1.8 * math.sqrt(2) * 0.01
    found = belief([1.0 - gain, 1.2, 1.2, 1.2])
    assert found.decision(0.85) == 0
    assert found.decision(0.86) is None


def test_regret_is_over_all_that_may_be_best_the_default_included() -> None:
    sure = belief([0.8, 0.9, 1.1, 1.2], sigma=1e-6)
    assert sure.regret_draws(0.9) == pytest.approx(0.0, abs=1e-4)
    unmeasured = belief([0.8, 0.9, 1.1, 1.2], sigma=1e-6, observed=[math.nan, 0.9, 1.1, 1.2])
    assert unmeasured.regret_draws(0.9) == pytest.approx(0.1, abs=1e-4)
    # Two normal values of equal mean: the smaller one lies sigma / sqrt(pi) below.
    tied = belief([1.0, 9.0, 9.0, 9.0])
    assert tied.regret_draws(0.9).mean() == pytest.approx(0.01 / math.sqrt(math.pi), rel=0.05)


def test_shares_add_up_to_the_regret_that_configs_cause() -> None:
    found = belief([0.9, 0.905, 0.91, 1.2])
    shares = found.shares(0.9)
    assert shares.sum() == pytest.approx(found.regret_draws(0.9).mean())
    # The decision itself causes none; the nearer a rival, the more.
    assert shares[0] == 0.0
    assert shares[1] > shares[2] > shares[3] == 0.0


def test_most_of_what_is_believed_is_true() -> None:
    made = sweep()
    world = World(made, hockney, normal(0.02))
    history = world.play(Exhaustive("s", made.trials, cycles=2))
    # A quarter of the configs: the rest is the surrogate's.
    keys = {trial.key for n, trial in enumerate(made.trials) if n % 4 == 0}
    seen = [o for o in history if o.trial_key in keys or "ABSTAIN" in o.trial_key]
    standard = [
        (math.log(hockney(trial)) - float(found.mean[i])) / float(found.sigma[i])
        for found in current_beliefs(group_by_task(made.trials), seen, seed=0)
        for i, trial in enumerate(found.trials)
    ]
    assert 0.3 < float(np.sqrt(np.mean(np.square(standard)))) < 2.0


def test_draws_have_the_mean_and_spread_that_are_believed_and_depend_on_the_seed() -> None:
    made = sweep()
    world = World(made, hockney, normal(0.02))
    history = world.play(Exhaustive("s", made.trials, cycles=2))
    tasks = group_by_task(made.trials)
    (found, *_) = current_beliefs(tasks, history, seed=0)
    assert found.draws.mean(axis=0) == pytest.approx(found.mean, abs=0.01)
    assert found.draws.std(axis=0) == pytest.approx(found.sigma, rel=0.2)
    (again, *_) = current_beliefs(tasks, history, seed=0)
    (other, *_) = current_beliefs(tasks, history, seed=1)
    assert np.array_equal(found.draws, again.draws)
    assert not np.array_equal(found.draws, other.draws)
    assert np.array_equal(found.mean, other.mean)


def test_a_failed_default_and_failed_configs_are_no_part_of_a_belief() -> None:
    tasks = (TASK,)
    default = TASK.default
    assert default is not None
    history = [Outcome(t.key, n, 9.0, ok=True) for t in TASK.candidates for n in (0, 1)]
    history += [Outcome(default.key, n, 10.0, ok=True) for n in (0, 1)]
    lost = Outcome(TASK.candidates[1].key, 1, None, ok=False)
    (found,) = current_beliefs(tasks, [*history, lost], seed=0)
    assert found.trials == (TASK.candidates[0], *TASK.candidates[2:])
    assert found.is_contested
    gone = replace(lost, trial_key=default.key)
    (found,) = current_beliefs(tasks, [*history, gone], seed=0)
    assert not found.is_contested
    assert found.decision(0.6) is None
