import random

from dynamiccl.collect.grid import Trial
from dynamiccl.collect.strategies.exhaustive import Exhaustive
from dynamiccl.collect.strategies.strategy import Outcome
from dynamiccl.nccl import ABSTAIN
from tests.collect.strategies.worlds import World, decide, heavy, hockney, normal, sweep

MADE = sweep()


def exhaustive() -> Exhaustive:
    return Exhaustive("s", MADE.trials, cycles=3)


def test_without_noise_the_table_is_the_best_that_was_measured() -> None:
    world = World(MADE, hockney)
    table = decide(MADE.trials, world.play(exhaustive()))
    assert world.regret(table) < 0.001
    assert any(config != ABSTAIN for config in table.values())


def test_exhaustive_data_with_outliers_are_read_rightly() -> None:
    world = World(MADE, hockney, heavy(0.015, 0.05))
    table = decide(MADE.trials, world.play(exhaustive()))
    assert world.regret(table) < 0.02
    assert max(world.slowdowns(table)) <= 1.01


def test_the_order_of_the_history_does_not_matter() -> None:
    history = World(MADE, hockney, normal(0.02)).play(exhaustive())
    table = decide(MADE.trials, history)
    random.Random(1).shuffle(history)
    assert decide(MADE.trials, history) == table


def test_nothing_measured_is_abstain_everywhere() -> None:
    table = decide(MADE.trials, ())
    assert len(table) == 11
    assert set(table.values()) == {ABSTAIN}


def test_all_configs_alike_is_abstain_nearly_everywhere() -> None:
    acts = 0
    for seed in range(5):
        world = World(MADE, lambda _: 100.0, normal(0.02), seed=seed)
        table = decide(MADE.trials, world.play(exhaustive()), confidence=0.99)
        acts += sum(config != ABSTAIN for config in table.values())
    # The best of 28 looks fast; what its neighbours say holds most of them back.
    assert acts <= 0.1 * 5 * 11


def test_without_a_time_of_the_default_nothing_is_better_than_it() -> None:
    def truth(trial: Trial) -> float | None:
        return None if trial.config == ABSTAIN else hockney(trial)

    table = decide(MADE.trials, World(MADE, truth).play(exhaustive()))
    assert set(table.values()) == {ABSTAIN}


def test_a_default_of_one_round_is_no_proof() -> None:
    history = World(MADE, hockney).play(Exhaustive("s", MADE.trials, cycles=1))
    assert set(decide(MADE.trials, history).values()) == {ABSTAIN}


def test_what_failed_once_is_never_taken() -> None:
    world = World(MADE, hockney)
    history = world.play(exhaustive())
    table = decide(MADE.trials, history)
    taken = {f"{t.task}{t.config}" for t in MADE.trials if table[t.task] == t.config}
    assert taken
    wrong = [t for t in MADE.trials if t.config != ABSTAIN and table[t.task] == t.config]
    history += [Outcome(trial.key, 2, 1.0, ok=False) for trial in wrong]
    again = decide(MADE.trials, history)
    assert all(again[trial.task] != trial.config for trial in wrong)


def test_what_was_not_measured_is_never_taken() -> None:
    history = World(MADE, hockney).play(exhaustive())
    table = decide(MADE.trials, history)
    taken = next(t for t in MADE.trials if t.config == table[t.task] != ABSTAIN)
    rest = [outcome for outcome in history if outcome.trial_key != taken.key]
    assert decide(MADE.trials, rest)[taken.task] not in {taken.config, ABSTAIN}
