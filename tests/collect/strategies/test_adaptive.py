import random
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.collect.grid import Trial
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.strategies.adaptive import (
    Adaptive,
    _Plan,
    first_policies,
    later_slots,
    policy,
)
from dynamiccl.collect.strategies.belief import by_setting, current_beliefs
from dynamiccl.collect.strategies.strategy import Outcome, group_by_task, subspace
from dynamiccl.collect.sweep import StrategySettings
from dynamiccl.nccl import ABSTAIN
from tests.collect.strategies.worlds import World, adaptive_sweep, hockney, normal

MADE = adaptive_sweep()
WORLD = World(MADE, hockney, normal(0.02))
HISTORY = WORLD.play(make_strategy(MADE.file, MADE.trials))
ROUNDS = WORLD.rounds


def next_picks(number: int, history: list[Outcome]) -> tuple[Trial, ...] | None:
    return make_strategy(MADE.file, MADE.trials).next_picks(number, history)


def test_it_ends_early_with_fewer_measurements_than_the_grid() -> None:
    assert 2 < len(ROUNDS) <= MADE.file.strategy.max_rounds
    assert len(HISTORY) < 0.67 * 3 * (len(MADE.trials) + 11)
    assert len(HISTORY) <= make_strategy(MADE.file, MADE.trials).expected_picks()


@settings(max_examples=8, deadline=None)
@given(st.integers(0, len(ROUNDS)), st.randoms(use_true_random=False))
def test_any_prefix_continues_exactly_whatever_the_order(
    number: int, shuffler: random.Random
) -> None:
    history = [outcome for outcome in HISTORY if outcome.round < number]
    shuffler.shuffle(history)
    wanted = ROUNDS[number] if number < len(ROUNDS) else None
    assert next_picks(number, history) == wanted


def test_outcomes_of_this_round_and_later_are_not_looked_at() -> None:
    assert next_picks(1, HISTORY) == ROUNDS[1]


def test_the_seed_and_the_name_change_the_draws() -> None:
    def first(name: str, seed: int) -> list[str]:
        chosen = StrategySettings(kind="adaptive", seed=seed)
        picks = Adaptive(name, MADE.trials, chosen).next_picks(0, ()) or ()
        return [pick.key for pick in picks]

    assert first("a", 0) == first("a", 0)
    assert first("a", 0) != first("a", 1) != first("b", 0)


def test_the_default_is_a_pair_for_each_task_that_gets_anything() -> None:
    for picks in ROUNDS:
        tasks = {pick.task for pick in picks}
        defaults = [pick for pick in picks if pick.config == ABSTAIN]
        assert Counter((p.task, p.repeat) for p in defaults) == dict.fromkeys(
            ((task, n) for task in tasks for n in (0, 1)), 1
        )
        assert {pick.probability for pick in defaults} == {None}
        names = Counter((pick.key, pick.repeat) for pick in picks)
        assert max(names.values()) == 1


def test_live_tasks_get_the_same_number_of_slots_and_settled_ones_none() -> None:
    live: set[int] = set()
    for number, picks in enumerate(ROUNDS):
        slots = Counter(p.size_bytes for p in picks if p.config != ABSTAIN)
        assert len(set(slots.values())) == 1
        if number:
            assert set(slots.values()) == {3}
            live |= {len(slots)}
    assert min(live) < 11


def test_the_first_round_sees_every_subspace_every_few_octaves() -> None:
    tasks = group_by_task(MADE.trials)
    rows = first_policies(tasks)
    seen: dict[object, list[int]] = defaultdict(list)
    for number, (task, slots) in enumerate(zip(tasks, rows, strict=True)):
        assert slots.sum(axis=1) == pytest.approx(1.0)
        for slot in slots:
            kinds = {subspace(t) for t, p in zip(task.candidates, slot, strict=True) if p > 0}
            assert len(kinds) == 1
            seen[kinds.pop()].append(number)
    assert len(seen) == 4
    assert max(np.diff(numbers).max() for numbers in seen.values()) <= 2


def test_a_single_size_sees_every_subspace_at_once() -> None:
    tasks = group_by_task(adaptive_sweep(sizes='{ list = ["1M"] }').trials)
    (slots,) = first_policies(tasks)
    assert len({subspace(tasks[0].candidates[int(slot.argmax())]) for slot in slots}) == 4
    assert later_slots(tasks) == 3
    assert later_slots(group_by_task(adaptive_sweep(num_channels="[0]").trials)) == 1


@pytest.mark.parametrize("number", [0, 2])
def test_the_recorded_probability_is_the_frequency_of_a_slot(number: int) -> None:
    """Many seeds draw from one distribution: round 0, and round 2 of one fixed history."""
    history = [outcome for outcome in HISTORY if outcome.round < number]
    counts: Counter[tuple[str, int]] = Counter()
    recorded: dict[tuple[str, int], float] = {}
    draws = 3000
    plans = _plans(number, history)
    for seed in range(draws):
        strategy = Adaptive("s", MADE.trials, StrategySettings(kind="adaptive", seed=seed))
        picks = [p for p in strategy._draw(plans[4], number) if p.probability is not None]
        assert len(picks) == len(plans[4].slots)
        for slot, pick in enumerate(picks):
            counts[pick.key, slot] += 1
            recorded[pick.key, slot] = pick.probability or 0.0
    for key, probability in recorded.items():
        error = 5 * (probability * (1 - probability) / draws) ** 0.5
        assert counts[key] / draws == pytest.approx(probability, abs=error), key
    # Nothing that has a chance is missing from the record but by chance.
    for slot, row in enumerate(plans[4].slots):
        found = sum(p for (_, at), p in recorded.items() if at == slot)
        assert found > row.sum() - 0.02


def _plans(number: int, history: list[Outcome]) -> tuple[_Plan, ...]:
    strategy = Adaptive("s", MADE.trials, StrategySettings(kind="adaptive"))
    return strategy._later_plans(number, history) if number else strategy._first_plans()


@pytest.mark.parametrize("epsilon", [0.1, 0.5])
def test_every_pick_has_at_least_its_share_of_uniform_exploration(epsilon: float) -> None:
    made = adaptive_sweep(f"epsilon = {epsilon}\nmax_rounds = 4")
    world = World(made, hockney, normal(0.02))
    world.play(make_strategy(made.file, made.trials))
    for picks in world.rounds:
        for pick in picks:
            if pick.config != ABSTAIN:
                assert pick.probability is not None
                assert (
                    epsilon / 28 - 1e-12 <= pick.probability <= 1 - epsilon + epsilon / 28 + 1e-12
                )
    forced = [p for picks in world.rounds[1:] for p in picks if p.config != ABSTAIN]
    explored = sum((p.probability or 0.0) <= epsilon / 28 + 1e-12 for p in forced)
    # Where the policy would never go, exploration goes, and no more often than its share.
    assert 0 < explored / len(forced) < epsilon + 0.05


def test_pure_exploration_is_uniform() -> None:
    made = adaptive_sweep("epsilon = 1.0\nmax_rounds = 2")
    world = World(made, hockney)
    world.play(make_strategy(made.file, made.trials))
    forced = [p for picks in world.rounds for p in picks if p.config != ABSTAIN]
    assert [p.probability for p in forced] == pytest.approx([1 / 28] * len(forced))


def test_the_policy_is_a_distribution_that_prefers_what_may_be_best() -> None:
    history = [outcome for outcome in HISTORY if outcome.round < 2]
    for belief in current_beliefs(group_by_task(MADE.trials), history, seed=0):
        chosen = policy(belief, 0.9)
        assert chosen.sum() == pytest.approx(1.0)
        assert chosen.min() >= 0.0
        leader = belief.leader()
        assert leader is not None
        assert chosen[leader] >= 0.1
        assert belief.mean @ chosen < belief.mean.mean()


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 400))
def test_the_budget_is_kept(budget: int) -> None:
    made = adaptive_sweep(f"[budget]\nmax_measurements = {budget}", algorithms='["Ring", "PAT"]')
    world = World(made, hockney, normal(0.02))
    history = world.play(make_strategy(made.file, made.trials))
    infeasible = sum(trial.infeasible is not None for trial in made.trials)
    # What NCCL cannot run at all costs nothing.
    assert len(history) - infeasible <= budget
    # Nothing was left that would have paid for another task.
    if len(world.rounds) < made.file.strategy.max_rounds and budget > 0:
        assert budget - (len(history) - infeasible) < 5 or len(history) > 100


def test_a_short_budget_goes_to_some_of_all_sizes_and_then_to_the_most_doubt() -> None:
    made = adaptive_sweep("[budget]\nmax_measurements = 20")
    picks = make_strategy(made.file, made.trials).next_picks(0, ()) or ()
    sizes = [group.size_bytes for group in group_by_task(made.trials)]
    chosen = [sizes.index(pick.size_bytes) for pick in picks]
    assert max(chosen) - min(chosen) > 4


def test_more_confidence_and_less_tolerance_cost_more() -> None:
    def cost(settings_text: str) -> int:
        made = adaptive_sweep(settings_text)
        return len(World(made, hockney, normal(0.02)).play(make_strategy(made.file, made.trials)))

    loose = cost("confidence = 0.6\ntolerance = 0.1")
    assert (
        loose
        < cost("confidence = 0.9\ntolerance = 0.03")
        < cost("confidence = 0.99\ntolerance = 0.001")
    )


def test_settings_do_not_touch_each_other() -> None:
    both = adaptive_sweep(
        groups="[{ num_nodes = 4, ranks_per_node = 8 }, { num_nodes = 2, ranks_per_node = 4 }]"
    )
    tasks = by_setting(group_by_task(both.trials))
    assert len(tasks) == 2
    world = World(both, hockney, normal(0.02))
    one = World(MADE, hockney, normal(0.02))
    first = make_strategy(both.file, both.trials).next_picks(0, ()) or ()
    alone = next_picks(0, []) or ()
    history = world.measure(0, first)
    second = make_strategy(both.file, both.trials).next_picks(1, history) or ()
    again = next_picks(1, one.measure(0, alone)) or ()
    assert [p for p in first if p.setting.num_nodes == 4] == list(alone)
    assert [p for p in second if p.setting.num_nodes == 4] == list(again)
