from collections import Counter

from dynamiccl.collect.strategies.exhaustive import Exhaustive
from dynamiccl.nccl import ABSTAIN
from tests.collect.strategies.worlds import World, hockney, sweep

MADE = sweep(algorithms='["Ring", "PAT"]')


def test_every_cycle_measures_every_trial_once_and_the_default_twice() -> None:
    strategy = Exhaustive("s", MADE.trials, cycles=3)
    feasible = {trial.key for trial in MADE.trials if trial.infeasible is None}
    for number in range(3):
        picks = strategy.next_picks(number, ()) or ()
        counts = Counter(p.key for p in picks if p.infeasible is None)
        assert set(counts) == feasible
        for pick in picks:
            if pick.infeasible is None:
                assert counts[pick.key] == 1 + (pick.config == ABSTAIN)
        repeats = {(p.key, p.repeat) for p in picks}
        assert len(repeats) == len(picks)
        assert all(pick.probability is None for pick in picks)
    assert strategy.next_picks(3, ()) is None


def test_what_cannot_run_is_picked_once_and_first() -> None:
    strategy = Exhaustive("s", MADE.trials, cycles=2)
    infeasible = [trial for trial in MADE.trials if trial.infeasible is not None]
    first = strategy.next_picks(0, ()) or ()
    assert list(first[: len(infeasible)]) == infeasible
    assert all(p.infeasible is None for p in first[len(infeasible) :])
    assert all(p.infeasible is None for p in strategy.next_picks(1, ()) or ())


def test_order_differs_by_round_name_and_seed_and_is_repeatable() -> None:
    def order(name: str, seed: int, number: int) -> list[str]:
        strategy = Exhaustive(name, MADE.trials, cycles=2, seed=seed)
        picks = strategy.next_picks(number, ()) or ()
        return [f"{p.key}#{p.repeat}" for p in picks if p.infeasible is None]

    assert order("s", 0, 1) == order("s", 0, 1)
    orders = {
        tuple(order(*which)) for which in [("s", 0, 0), ("s", 0, 1), ("t", 0, 1), ("s", 1, 1)]
    }
    assert len(orders) == 4


def test_expected_picks_are_exact() -> None:
    strategy = Exhaustive("s", MADE.trials, cycles=3)
    assert len(World(MADE, hockney).play(strategy)) == strategy.expected_picks()
