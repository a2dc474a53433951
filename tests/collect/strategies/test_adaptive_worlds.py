"""Worlds that are kind to the surrogate, and worlds that are not."""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.strategies.strategy import Outcome, seed_of
from dynamiccl.collect.sweep import Sweep
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from tests.collect.strategies.worlds import (
    Truth,
    World,
    adaptive_sweep,
    decide,
    heavy,
    hockney,
    normal,
    quiet,
)

Table = dict[tuple[Setting, int], Config]


def play(
    made: Sweep, truth: Truth, noise: Callable[..., float | None], seed: int = 0
) -> tuple[World, Table]:
    world = World(made, truth, noise, seed)
    history = world.play(make_strategy(made.file, made.trials), most_rounds=13)
    return world, decide(made.trials, history)


@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.soak) for k in (1, 2))])
def test_a_unimodal_world_is_solved_at_a_fifth_of_the_cost(seed: int) -> None:
    made = adaptive_sweep("[budget]\nmax_measurements = 190")
    world, table = play(made, hockney, normal(0.015), seed)
    assert 0.2 * 3 * (len(made.trials) + 11) > 190
    assert world.regret(table) < 0.02
    assert world.regret(dict.fromkeys(table, ABSTAIN)) > 0.15
    assert max(world.slowdowns(table)) < 1.01


def multimodal(trial: Trial) -> float:
    """Every config has a time of its own, shared with no neighbour."""
    own = np.random.default_rng(seed_of("world", trial.key)).uniform(0.0, 1.0)
    return 100.0 * math.exp(float(own)) + trial.size_bytes / 1e6


def test_a_world_without_any_order_costs_more_but_does_not_hurt() -> None:
    made = adaptive_sweep()
    world, table = play(made, multimodal, normal(0.01))
    smooth = World(made, hockney, normal(0.01))
    smooth.play(make_strategy(made.file, made.trials))
    assert sum(map(len, world.rounds)) > sum(map(len, smooth.rounds))
    assert max(world.slowdowns(table)) < 1.02
    assert world.regret(table) < 0.5 * world.regret(dict.fromkeys(table, ABSTAIN))


def test_heavy_tails_do_not_hurt() -> None:
    for seed in range(2):
        world, table = play(adaptive_sweep(), hockney, heavy(0.02, 0.1), seed)
        assert max(world.slowdowns(table)) < 1.02
        assert world.regret(table) < 0.03


def two_states(random: np.random.Generator) -> float:
    """A machine that is twice as slow in four of ten launches."""
    return (2.0 if random.random() < 0.4 else 1.0) * math.exp(random.normal(0.0, 0.01))


def test_a_machine_with_two_states_makes_it_careful() -> None:
    hurt = []
    for seed in range(2):
        world, table = play(adaptive_sweep(), hockney, two_states, seed)
        hurt += [slower > 1.05 for slower in world.slowdowns(table)]
    assert sum(hurt) <= 0.05 * len(hurt)


def alike(_: Trial) -> float:
    """Nothing to win."""
    return 100.0


def test_where_nothing_is_to_be_won_it_stops_and_mostly_abstains() -> None:
    made = adaptive_sweep()
    acts = 0
    for seed in range(2):
        world, table = play(made, alike, normal(0.02), seed)
        assert sum(map(len, world.rounds)) < 0.67 * 3 * (len(made.trials) + 11)
        acts += sum(config != ABSTAIN for config in table.values())
    # Not never: each task is looked at after each round, and the luckiest of 28 configs leads.
    assert acts <= 0.2 * 2 * 11


def test_noise_that_drowns_everything_is_abstain() -> None:
    world, table = play(adaptive_sweep(), hockney, normal(1.5))
    assert sum(config != ABSTAIN for config in table.values()) <= 2
    assert len(world.rounds) <= 12


def only_default(trial: Trial) -> float | None:
    return 100.0 if trial.config == ABSTAIN else None


def nothing_works(_: Trial) -> float | None:
    return None


def test_configs_that_all_fail_are_left_alone_after_a_few() -> None:
    world, table = play(adaptive_sweep(), only_default, normal(0.02))
    assert set(table.values()) == {ABSTAIN}
    # Four subspaces, three failures each, and what was picked before they were known.
    assert len(world.rounds) <= 3


def test_a_default_that_fails_ends_a_task() -> None:
    world, table = play(adaptive_sweep(), nothing_works, quiet)
    assert set(table.values()) == {ABSTAIN}
    assert len(world.rounds) == 1


def half_fails(trial: Trial) -> float | None:
    """Tree never works, and many channels crash."""
    config = trial.config
    if config.algorithm is Algorithm.Tree or (config.num_channels or 0) > 8:
        return None
    return hockney(trial)


def test_what_fails_is_not_picked_again_and_the_rest_is_tuned() -> None:
    made = adaptive_sweep()
    world, table = play(made, half_fails, normal(0.01))
    failures = [p.key for picks in world.rounds for p in picks if half_fails(p) is None]
    tree = [key for key in failures if ":Tree/" in key]
    assert len(tree) < 30
    rounds = [{p.key for p in picks} & set(failures) for picks in world.rounds]
    for earlier, later in pairwise(rounds):
        assert not earlier & later
    assert world.regret(table) < 0.03


def test_lost_outcomes_are_asked_for_again_and_end() -> None:
    made = adaptive_sweep("max_rounds = 6")
    world, table = play(made, hockney, lambda _: None)
    assert set(table.values()) == {ABSTAIN}
    assert len(world.rounds) == 6

    def often_lost(random: np.random.Generator) -> float | None:
        return None if random.random() < 0.4 else math.exp(random.normal(0.0, 0.01))

    world, table = play(adaptive_sweep(), hockney, often_lost)
    assert world.regret(table) < 0.03


def test_a_history_of_which_nothing_came_back_goes_on() -> None:
    made = adaptive_sweep()
    strategy = make_strategy(made.file, made.trials)
    assert strategy.next_picks(1, ()) is not None
    stranger = Outcome("another:sweep", 0, 5.0, ok=True)
    assert strategy.next_picks(1, [stranger]) == strategy.next_picks(1, ())


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithms": '["Ring"]', "protocols": '["Simple"]', "num_channels": "[0]"},
        {"sizes": '{ list = ["1M"] }'},
        {"sizes": '{ list = ["1M"] }', "algorithms": '["Tree"]', "protocols": '["LL"]'},
        {"sizes": '{ list = ["1M", "3M"] }'},
        {"collectives": '["AlltoAll"]'},
    ],
    ids=["one config", "one size", "one subspace", "two sizes", "default only"],
)
def test_tiny_grids(changes: dict[str, str]) -> None:
    def truth(trial: Trial) -> float:
        return hockney(trial) * (1.3 if trial.config == ABSTAIN else 1.0)

    made = adaptive_sweep(**changes)
    world, table = play(made, truth, normal(0.01))
    assert world.regret(table) < 0.04


def test_a_sweep_of_which_nothing_can_run_is_one_round_of_reasons() -> None:
    made = adaptive_sweep(sizes='{ list = ["16"] }', collectives='["AllGather"]')
    world, table = play(made, hockney, quiet)
    assert [len(picks) for picks in world.rounds] == [len(made.trials)]
    assert set(table.values()) == {ABSTAIN}


def test_chunk_sizes_are_a_knob_like_channels() -> None:
    def truth(trial: Trial) -> float:
        chunk = math.log2(trial.config.chunk_bytes or 1 << 19)
        simple = trial.config.protocol is Protocol.Simple
        return hockney(trial) * (1.0 + 0.05 * abs(chunk - 17.0) * simple)

    made = adaptive_sweep(
        "[budget]\nmax_measurements = 400",
        chunk_sizes='[0, "64K", "128K", "256K", "512K"]',
        num_channels="[0, 2, 8, 32]",
    )
    world, table = play(made, truth, normal(0.01))
    assert world.regret(table) < 0.03
    assert any(config.chunk_bytes == 1 << 17 for config in table.values())
