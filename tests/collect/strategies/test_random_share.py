from collections import Counter

import pytest

from dynamiccl.collect.strategies.random_share import RandomShare
from dynamiccl.nccl import ABSTAIN
from tests.collect.strategies.worlds import World, hockney, sweep

MADE = sweep(algorithms='["Ring", "Tree", "PAT"]')
CONFIGS = 28


@pytest.mark.parametrize(("share", "drawn"), [(0.25, 7), (0.01, 1), (1.0, 28), (0.1, 3)])
def test_each_task_gets_its_share_without_replacement(share: float, drawn: int) -> None:
    strategy = RandomShare("s", MADE.trials, cycles=2, share=share)
    picks = strategy.next_picks(1, ()) or ()
    forced = [pick for pick in picks if pick.config != ABSTAIN]
    assert set(Counter(pick.size_bytes for pick in forced).values()) == {drawn}
    assert len({pick.key for pick in forced}) == len(forced)
    assert {pick.probability for pick in forced} == {1 / CONFIGS}
    defaults = [pick for pick in picks if pick.config == ABSTAIN]
    assert Counter(p.repeat for p in defaults) == {0: 11, 1: 11}
    assert {pick.probability for pick in defaults} == {None}


def test_the_recorded_probability_is_the_frequency() -> None:
    cycles = 1500
    small = sweep(sizes='{ list = ["1M"] }')
    strategy = RandomShare("s", small.trials, cycles=cycles, share=0.25)
    drawn = [
        pick
        for number in range(cycles)
        for pick in strategy.next_picks(number, ()) or ()
        if pick.config != ABSTAIN
    ]
    (odds,) = {pick.probability for pick in drawn}
    assert odds is not None
    counts = Counter(pick.key for pick in drawn)
    assert len(counts) == CONFIGS
    # Within five standard deviations of a frequency.
    most = 5 * (odds * (1 - odds) / len(drawn)) ** 0.5
    assert all(abs(n / len(drawn) - odds) < most for n in counts.values())


def test_infeasible_trials_come_once_and_expected_picks_are_exact() -> None:
    strategy = RandomShare("s", MADE.trials, cycles=3, share=0.3)
    world = World(MADE, hockney)
    assert len(world.play(strategy)) == strategy.expected_picks()
    infeasible = [sum(p.infeasible is not None for p in picks) for picks in world.rounds]
    assert infeasible == [sum(t.infeasible is not None for t in MADE.trials), 0, 0]
