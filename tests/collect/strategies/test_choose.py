import random

import pytest

from dynamiccl.collect.grid import Trial
from dynamiccl.collect.outcomes import Outcome
from dynamiccl.collect.strategies.choose import choose, noise_across_processes
from dynamiccl.collect.strategies.exhaustive import Exhaustive
from dynamiccl.collect.strategies.samples import times_by_trial
from dynamiccl.nccl import ABSTAIN
from tests.collect.strategies.worlds import World, heavy, hockney, normal, sweep

MADE = sweep()


def exhaustive() -> Exhaustive:
    return Exhaustive("s", MADE.trials, cycles=3)


def test_without_noise_the_table_is_the_best_that_was_measured() -> None:
    world = World(MADE, hockney)
    table = choose(MADE.trials, world.play(exhaustive()))
    assert world.regret(table) < 0.001
    assert any(config != ABSTAIN for config in table.values())


def test_exhaustive_data_with_outliers_are_read_rightly() -> None:
    world = World(MADE, hockney, heavy(0.015, 0.05))
    table = choose(MADE.trials, world.play(exhaustive()))
    assert world.regret(table) < 0.02
    assert max(world.slowdowns(table)) <= 1.01


def test_the_order_of_the_history_does_not_matter() -> None:
    history = World(MADE, hockney, normal(0.02)).play(exhaustive())
    table = choose(MADE.trials, history)
    random.Random(1).shuffle(history)
    assert choose(MADE.trials, history) == table


def test_nothing_measured_is_abstain_everywhere() -> None:
    table = choose(MADE.trials, ())
    assert len(table) == 11
    assert set(table.values()) == {ABSTAIN}


def test_all_configs_alike_is_abstain_nearly_everywhere() -> None:
    acts = 0
    for seed in range(5):
        world = World(MADE, lambda _: 100.0, normal(0.02), seed=seed)
        table = choose(MADE.trials, world.play(exhaustive()), confidence=0.99)
        acts += sum(config != ABSTAIN for config in table.values())
    # The best of 28 looks fast; what its neighbours say holds most of them back.
    assert acts <= 0.1 * 5 * 11


def test_without_a_time_of_the_default_nothing_is_better_than_it() -> None:
    def truth(trial: Trial) -> float | None:
        return None if trial.config == ABSTAIN else hockney(trial)

    table = choose(MADE.trials, World(MADE, truth).play(exhaustive()))
    assert set(table.values()) == {ABSTAIN}


def test_a_default_of_one_round_is_no_proof() -> None:
    history = World(MADE, hockney).play(Exhaustive("s", MADE.trials, cycles=1))
    assert set(choose(MADE.trials, history).values()) == {ABSTAIN}


def untouched(times_us: dict[int, list[float]]) -> list[Outcome]:
    """The default of the user's own environment at every size: times by round."""
    return [
        Outcome(trial.key, number, time_us, ok=True)
        for trial in MADE.trials
        if trial.config == ABSTAIN
        for number, times in times_us.items()
        for time_us in times
    ]


def test_config_that_loses_to_the_untouched_default_is_not_taken() -> None:
    """As where a vendor's tuner, which ours displaces in a sweep, does better than NCCL."""
    history = World(MADE, hockney).play(exhaustive())
    assert any(config != ABSTAIN for config in choose(MADE.trials, history).values())
    fast = untouched({0: [0.1, 0.1], 1: [0.1, 0.1]})
    assert set(choose(MADE.trials, history, fast).values()) == {ABSTAIN}


def test_config_that_beats_both_defaults_is_taken() -> None:
    history = World(MADE, hockney).play(exhaustive())
    slow = untouched({0: [1e9, 1e9], 1: [1e9, 1e9]})
    assert choose(MADE.trials, history, slow) == choose(MADE.trials, history)


def test_gain_that_processes_differ_by_is_none() -> None:
    history = World(MADE, hockney).play(exhaustive())
    # Each process is steady, and one of them is a million times as fast as the other.
    apart = untouched({0: [1e9, 1e9], 1: [1e3, 1e3]})
    assert set(choose(MADE.trials, history, apart).values()) == {ABSTAIN}


def test_noise_across_processes_is_that_of_rounds_and_not_of_repeats() -> None:
    times = times_by_trial(untouched({0: [100.0, 300.0], 1: [110.0, 330.0]}))
    assert noise_across_processes(times) == pytest.approx(0.1)
    assert noise_across_processes(times_by_trial(untouched({0: [100.0, 300.0]}))) == 0.0
    assert noise_across_processes({}) == 0.0


def test_what_failed_once_is_never_taken() -> None:
    world = World(MADE, hockney)
    history = world.play(exhaustive())
    table = choose(MADE.trials, history)
    taken = {f"{t.task}{t.config}" for t in MADE.trials if table[t.task] == t.config}
    assert taken
    wrong = [t for t in MADE.trials if t.config != ABSTAIN and table[t.task] == t.config]
    history += [Outcome(trial.key, 2, 1.0, ok=False) for trial in wrong]
    again = choose(MADE.trials, history)
    assert all(again[trial.task] != trial.config for trial in wrong)


def test_what_was_not_measured_is_never_taken() -> None:
    history = World(MADE, hockney).play(exhaustive())
    table = choose(MADE.trials, history)
    taken = next(t for t in MADE.trials if t.config == table[t.task] != ABSTAIN)
    rest = [outcome for outcome in history if outcome.trial_key != taken.key]
    assert choose(MADE.trials, rest)[taken.task] not in {taken.config, ABSTAIN}
