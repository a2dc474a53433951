"""Strategies on worlds with known times: what they pick, what they believe, what they decide."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.collect import schedule, strategies
from dynamiccl.collect.grid import LaunchProfile, Setting, Trial
from dynamiccl.collect.simulated import simulate
from dynamiccl.collect.strategies import Outcome, Strategy
from dynamiccl.collect.sweep import Sweep, sweep_text
from dynamiccl.datasets.store import part_paths
from dynamiccl.drawn_worlds import Grid
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol
from tests.collect.benchmark.stand_in import sweep

GRID = {
    "num_channels": "[0, 1, 2, 4, 8, 16, 32]",
    "groups": "[{ num_nodes = 4, ranks_per_node = 8 }]",
    "sizes": '{ min = "64K", max = "64M" }',
    "cycles": "3",
}
#: Time a trial truly takes, in us; None = it fails.
Truth = Callable[[Trial], float | None]
#: The config of each task.
Table = dict[tuple[Setting, int], Config]


@dataclass
class World:
    """Trials whose true times are known, and the rounds that a strategy picked of them."""

    trials: Sequence[Trial]
    truth: Truth
    #: Round, pick -> factor on the true time.
    noise: Callable[[int, Trial], float] = lambda *_: 1.0
    rounds: list[tuple[Trial, ...]] = field(default_factory=list)

    def play(self, strategy: Strategy, most_rounds: int = 50) -> list[Outcome]:
        """Measure the picks of a strategy until it is done."""
        history: list[Outcome] = []
        while (picks := strategy.next_picks(len(self.rounds), history)) is not None:
            number = len(self.rounds)
            assert number < most_rounds
            self.rounds.append(picks)
            for pick in picks:
                missing = pick.infeasible is not None
                true_us = None if missing else self.truth(pick)
                time_us = None if true_us is None else true_us * self.noise(number, pick)
                history.append(Outcome(pick.key, number, time_us, true_us is not None, missing))
        return history

    def decide(self, history: Sequence[Outcome]) -> Table:
        """The config that the belief would take for each task, ABSTAIN where it is not sure."""
        table: Table = {trial.task: ABSTAIN for trial in self.trials}
        for tasks in strategies.tasks_of(self.trials).values():
            found = strategies.believe(tasks, history)
            for task in enumerate(found.belief.decide()):
                table[found.trials[task].task] = found.trials[task].config
        return table

    def ratios(self, table: Table, *, over_best: bool) -> np.ndarray:
        """True time of each task's config over that of its best one, or of NCCL's own choice."""
        times: dict[tuple[Setting, int], dict[Config, float]] = {task: {} for task in table}
        for trial in self.trials:
            if (time_us := self.truth(trial)) is not None:
                times[trial.task][trial.config] = time_us
        own = {t: min(c.values()) if over_best else c[ABSTAIN] for t, c in times.items() if c}
        return np.array([times[task][table[task]] / own_us for task, own_us in own.items()])


def grid(**keys: str) -> Sweep:
    return sweep(**(GRID | keys))


def adaptive(more: str = "", **keys: str) -> Sweep:
    return grid(strategy=f'{{ kind = "adaptive"{more} }}', **keys)


def strategy_of(made: Sweep, name: str = "", seed: int = 0) -> Strategy:
    chosen = made.file.strategy.model_copy(update={"seed": seed})
    file = made.file.model_copy(update={"name": name or made.file.name, "strategy": chosen})
    return strategies.make_strategy(file, made.trials)


def hockney(trial: Trial) -> float:
    """A unimodal world: latency and bandwidth by subspace, a best channel count by size.

    The default is Ring/Simple with the channel count AUTO, which is the same as 8.
    """
    config = trial.config
    algorithm = Algorithm.Ring if config.algorithm is None else config.algorithm
    protocol = Protocol.Simple if config.protocol is None else config.protocol
    latency = {Algorithm.Ring: 40.0, Algorithm.Tree: 20.0}[algorithm]
    bytes_per_us = {Algorithm.Ring: 200e3, Algorithm.Tree: 120e3}[algorithm]
    if protocol is Protocol.LL:
        latency, bytes_per_us = latency / 3.0, bytes_per_us / 8.0
    channels = config.num_channels or 8
    best = (math.log2(trial.size_bytes) - 16.0) / 2.0
    crowding = 1.0 + 0.08 * (math.log2(channels) - best) ** 2
    return latency + trial.size_bytes / bytes_per_us * crowding


def noise(sigma: float, seed: int = 0) -> Callable[[int, Trial], float]:
    """Of each measurement its own factor on the time."""

    def factor(number: int, pick: Trial) -> float:
        drawn = np.random.default_rng(strategies.seed_of(seed, number, pick.key, pick.repeat))
        return math.exp(drawn.normal(0.0, sigma))

    return factor


def world_of(made: Sweep, truth: Truth = hockney, sigma: float = 0.02, seed: int = 0) -> World:
    return World(made.trials, truth, noise(sigma, seed))


def play(made: Sweep, truth: Truth, sigma: float, seed: int = 0) -> tuple[World, Table]:
    """A world after the sweep's strategy, and the table that follows."""
    world = world_of(made, truth, sigma, seed)
    return world, world.decide(world.play(strategy_of(made), most_rounds=21))


def regret(world: World, table: Table) -> float:
    return float(world.ratios(table, over_best=True).mean() - 1.0)


@pytest.mark.parametrize(
    ("chosen", "drawn"),
    [
        ('kind = "exhaustive"', 14),
        ('kind = "random", share = 0.25', 4),
        ('kind = "random", share = 0.01', 1),
        ('kind = "random", share = 1.0', 14),
    ],
)
def test_each_cycle_has_the_default_twice_and_its_share_of_every_task(
    chosen: str, drawn: int
) -> None:
    made = grid(strategy=f"{{ {chosen} }}", algorithms='["Ring", "PAT"]')
    world = World(made.trials, hockney)
    strategy = strategy_of(made)
    assert len(world.play(strategy)) == strategy.expected_picks()
    infeasible = [trial for trial in made.trials if trial.infeasible is not None]
    assert list(world.rounds[0][: len(infeasible)]) == infeasible
    for number, picks in enumerate(world.rounds):
        ran = [pick for pick in picks if pick.infeasible is None]
        assert len(picks) - len(ran) == (0 if number else len(infeasible))
        forced = [pick for pick in ran if pick.config != ABSTAIN]
        assert Counter(p.repeat for p in ran if p.config == ABSTAIN) == {0: 11, 1: 11}
        assert set(Counter(pick.size_bytes for pick in forced).values()) == {drawn}
        assert len({pick.key for pick in forced}) == len(forced)
        odds = None if "exhaustive" in chosen else 1 / 14
        assert {pick.probability for pick in forced} == {odds}


def test_repeats_of_a_cycle_are_in_one_process_and_are_told_apart() -> None:
    made = grid(strategy="{ repeats = 4 }")
    [*picks] = strategy_of(made).next_picks(0, ()) or ()
    forced = Counter(pick.key for pick in picks if pick.config != ABSTAIN)
    assert {*forced.values()} == {4}
    launches = schedule.lay_out(0, picks, made.file, plays_schedules=True)
    for launch in launches:
        if launch.mode is schedule.LaunchMode.SWEEP:
            assert len({(trial.key, trial.repeat) for trial in launch.trials}) == len(launch.trials)
            assert schedule.deal(launch).left_over == ()
        if launch.mode is schedule.LaunchMode.REFERENCE:
            assert {trial.repeat for trial in launch.trials} == {0, 1, 2, 3}
    timed = [launch.trials for launch in launches if launch.mode is schedule.LaunchMode.SWEEP]
    assert sum(map(len, timed)) == len(picks)


MADE = adaptive()
WORLD = world_of(MADE)
HISTORY = WORLD.play(strategies.make_strategy(MADE.file, MADE.trials))
ROUNDS = WORLD.rounds


def next_picks(number: int, history: Sequence[Outcome]) -> tuple[Trial, ...] | None:
    return strategies.make_strategy(MADE.file, MADE.trials).next_picks(number, history)


def test_it_ends_early_with_fewer_measurements_than_the_grid() -> None:
    assert 2 < len(ROUNDS) <= MADE.file.strategy.max_rounds
    assert len(HISTORY) < 0.67 * 3 * (len(MADE.trials) + 11)
    assert len(HISTORY) <= strategies.make_strategy(MADE.file, MADE.trials).expected_picks()


def test_what_nccl_logs_in_the_first_round_is_believed_from_the_second_on(tmp_path: Path) -> None:
    made = adaptive(", max_rounds = 1", cycles="1")
    costs = strategies.logged_costs(made.file, tmp_path)
    [setting] = strategies.tasks_of(made.trials)
    sizes = sorted({trial.size_bytes for trial in made.trials})
    assert np.isnan(costs(setting, sizes)).all()
    simulate(sweep_text(made.file), tmp_path)
    log_us = costs(setting, sizes)
    # Of AllReduce on several nodes NCCL has Tree and Ring, by three protocols.
    ring_and_tree = log_us[:, :6]
    assert np.isfinite(ring_and_tree).all()
    assert (np.diff(ring_and_tree, axis=0) > 0).all()
    told = Grid(tuple(np.log2(sizes)), (ABSTAIN,)).with_costs(log_us)
    assert told.own[0] == (Algorithm.Tree, Protocol.LL)
    assert told.own[-1] == (Algorithm.NVLSTree, Protocol.Simple)
    # Of another group or profile nothing is known; of other collectives, as NCCL logs them all.
    for other in (replace(setting, num_nodes=2), replace(setting, profile=LaunchProfile("other"))):
        assert np.isnan(costs(other, sizes)).all()
    broadcast = costs(replace(setting, collective=Collective.Broadcast), sizes)
    assert np.isnan(broadcast[:, :3]).all()
    assert (broadcast[-1, 3:6] < log_us[-1, 3:6]).all()
    knows = strategies.make_strategy(made.file, made.trials, costs)
    assert knows.next_picks(0, ()) == next_picks(0, ())
    history = [outcome for outcome in HISTORY if outcome.round < 1]
    assert knows.next_picks(1, history) != next_picks(1, history)
    # A sweep is not ended by a part that somebody damaged.
    part_paths(tmp_path, "costs")[0].with_name("part-junk.parquet").write_bytes(b"junk")
    assert np.isnan(costs(setting, sizes)).all()


@settings(max_examples=8, deadline=None)
@given(st.integers(0, len(ROUNDS)), st.randoms(use_true_random=False))
def test_any_prefix_continues_exactly_whatever_the_order(
    number: int, shuffler: random.Random
) -> None:
    history = [outcome for outcome in HISTORY if outcome.round < number]
    shuffler.shuffle(history)
    wanted = ROUNDS[number] if number < len(ROUNDS) else None
    assert next_picks(number, history) == wanted


@pytest.mark.parametrize("number", [0, 2])
def test_the_recorded_probability_is_the_frequency_of_a_slot(number: int) -> None:
    """Many seeds draw from one distribution: round 0, and round 2 of one fixed history."""
    history = [outcome for outcome in HISTORY if outcome.round < number]
    counts: Counter[tuple[str, int]] = Counter()
    recorded: dict[tuple[str, int], float] = {}
    draws = 1000
    first = strategies.Adaptive(MADE.file, MADE.trials)
    # The first slot's task again: each slot has its own odds.
    slot = next(first._slots(number, history))
    slots = [slot, slot._replace(odds=slot.odds[::-1])]
    for seed in range(draws):
        strategy = strategy_of(MADE, seed=seed)
        assert isinstance(strategy, strategies.Adaptive)
        picks = [p for p in strategy._draw(slots, number) if p.probability is not None]
        for place, pick in enumerate(picks):
            counts[pick.key, place] += 1
            recorded[pick.key, place] = pick.probability or 0.0
    for key, probability in recorded.items():
        error = 5 * (probability * (1 - probability) / draws) ** 0.5
        assert counts[key] / draws == pytest.approx(probability, abs=error), key
    # Nothing that has a chance is missing from the record but by chance.
    assert sum(recorded.values()) > 2 * 0.98


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0])
def test_every_pick_has_at_least_its_share_of_uniform_exploration(epsilon: float) -> None:
    made = adaptive(f", epsilon = {epsilon}, max_rounds = 4")
    world = world_of(made)
    world.play(strategy_of(made))
    odds = [p.probability or 0.0 for picks in world.rounds for p in picks if p.config != ABSTAIN]
    least = epsilon / 28 - 1e-12
    assert least <= min(odds) <= max(odds) <= 1 - epsilon + least + 2e-12


def test_the_budget_is_kept() -> None:
    for budget in (20, 60):
        most = f"{{ max_measurements = {budget} }}"
        made = adaptive(budget=most, algorithms='["Ring", "PAT"]')
        world = world_of(made)
        infeasible = sum(trial.infeasible is not None for trial in made.trials)
        # What NCCL cannot run at all costs nothing.
        assert budget - 6 < len(world.play(strategy_of(made))) - infeasible <= budget


@pytest.mark.parametrize(("most", "alone"), [(8, 0), (20, 8)])
def test_a_short_budget_is_for_what_is_compared_before_defaults_that_are_alone(
    most: int, alone: int
) -> None:
    budget = f"{{ max_measurements = {most} }}"
    made = adaptive(budget=budget, collectives='["AllReduce", "AlltoAll"]')
    history = World(made.trials, hockney).play(strategy_of(made))
    told = Counter(outcome.trial_key.partition(":")[0] for outcome in history)
    assert told["AllReduce"] >= min(most, 12) - 5
    assert told["AlltoAll"] >= alone


def test_a_size_in_doubt_keeps_its_setting_going(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = strategies.Adaptive(MADE.file, MADE.trials)
    found = strategies.believe(next(iter(strategies.tasks_of(MADE.trials).values())), HISTORY)
    regret_of_draws = np.zeros((100, 11))
    monkeypatch.setattr(strategies.Believed, "regret", lambda *_: regret_of_draws)
    assert strategy._is_sure(found, np.random.default_rng(0))
    regret_of_draws[:, 4] = 0.09  # on average over sizes less than the tolerance of 0.01
    assert not strategy._is_sure(found, np.random.default_rng(0))


def test_a_unimodal_world_is_solved_at_a_fifth_of_the_cost() -> None:
    made = adaptive(budget="{ max_measurements = 190 }")
    world, table = play(made, hockney, 0.015)
    assert 0.2 * 3 * (len(made.trials) + 11) > 190
    assert regret(world, table) < 0.02
    assert regret(world, dict.fromkeys(table, ABSTAIN)) > 0.15
    assert world.ratios(table, over_best=False).max() < 1.01


def test_where_nothing_is_to_be_won_it_stops_and_mostly_abstains() -> None:
    acts, made = 0, adaptive(sizes='{ min = "1M", max = "16M" }')
    for seed in range(4):
        world, table = play(made, lambda _: 100.0, 0.02, seed)
        assert sum(map(len, world.rounds)) < 0.75 * 3 * (len(made.trials) + 5)
        acts += sum(config != ABSTAIN for config in table.values())
    # Not never: each task is looked at after each round, and the luckiest of 28 configs leads.
    assert acts <= 0.4 * 4 * 5
    _, table = play(made, hockney, 1.5)
    assert sum(config != ABSTAIN for config in table.values()) <= 1


def test_configs_that_all_fail_are_left_alone_and_a_default_that_fails_ends_its_task() -> None:
    default_only, table = play(adaptive(), lambda t: 100.0 if t.config == ABSTAIN else None, 0.02)
    assert set(table.values()) == {ABSTAIN}
    # Three configs of each of four subspaces, and what was picked before they were known.
    assert len(default_only.rounds) <= 4
    nothing, table = play(adaptive(), lambda _: None, 0.0)
    assert set(table.values()) == {ABSTAIN}
    # Each round asks sizes that no round did.
    assert len(nothing.rounds) <= 2


def test_what_fails_is_not_picked_again_and_the_rest_is_tuned() -> None:
    def half_fails(trial: Trial) -> float | None:
        is_tree, many = trial.config.algorithm is Algorithm.Tree, trial.config.num_channels or 0
        return None if is_tree or many > 8 else hockney(trial)

    world, table = play(adaptive(), half_fails, 0.01)
    rounds = [{p.key for p in picks if half_fails(p) is None} for picks in world.rounds]
    assert sum(":Tree/" in key for keys in rounds for key in keys) < 30
    assert not any(earlier & later for earlier, later in pairwise(rounds))
    assert regret(world, table) < 0.03


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithms": '["Ring"]', "protocols": '["Simple"]', "num_channels": "[0]"},
        {"sizes": '{ list = ["1M"] }'},
        {"sizes": '{ list = ["1M", "3M"] }', "algorithms": '["Tree"]', "protocols": '["LL"]'},
        {"collectives": '["AlltoAll"]'},
        {"sizes": '{ list = ["16"] }', "collectives": '["AllGather"]'},
    ],
    ids=["one config", "one size", "one subspace", "default only", "nothing can run"],
)
def test_tiny_grids(changes: dict[str, str]) -> None:
    def truth(trial: Trial) -> float:
        return hockney(trial) * (1.3 if trial.config == ABSTAIN else 1.0)

    world, table = play(adaptive(**changes), truth, 0.01)
    assert regret(world, table) < (0.04 if "AllGather" not in str(changes) else math.inf)
    if "AlltoAll" in str(changes):
        assert Counter(map(len, world.rounds)) == {2 * 11: 1}
