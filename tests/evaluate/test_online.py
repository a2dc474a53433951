"""Searchers on grids whose answer is known; what they try is counted."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.baselines import online
from dynamiccl.evaluate.baselines.online import (
    BANDIT_PROBES,
    CoordinateDescent,
    EpsilonGreedy,
    Prober,
    Ucb1,
)
from dynamiccl.evaluate.baselines.picking import Picked
from dynamiccl.evaluate.policies import NcclDefault, probes_of
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from tests.evaluate.grids import NAN, grid

CHANNELS = (1, 2, 4, 8, 16, 32)
RING = [Config(Algorithm.Ring, Protocol.Simple, channels) for channels in CHANNELS]
TREE = [Config(Algorithm.Tree, Protocol.LL, channels) for channels in CHANNELS]
CATALOGUE = Catalogue((ABSTAIN, *RING, *TREE))
#: One valley in each subspace; the best of all is Tree with 8 channels.
VALLEYS = [50.0, *(60.0, 40.0, 30.0, 45.0, 70.0, 90.0), *(80.0, 60.0, 35.0, 20.0, 25.0, 60.0)]
#: The same bottom, along slopes on which no step is longer than one.
GENTLE = [50.0, *(40.0, 36.0, 33.0, 36.0, 40.0, 44.0), *(32.0, 28.0, 25.0, 22.0, 24.0, 27.0)]
BEST = 1 + len(RING) + CHANNELS.index(8)


def noisy(exact: TaskGrid, spread: float) -> TaskGrid:
    random = np.random.default_rng(0)
    samples = {
        cell: times[0] * random.lognormal(0.0, spread, 50) for cell, times in exact.samples.items()
    }
    return replace(exact, samples=samples)


def test_descent_finds_the_bottom_of_every_valley() -> None:
    tasks = grid([1 << 10, 1 << 20], [GENTLE, [10.0, *GENTLE[1:]]])
    searcher = CoordinateDescent(CATALOGUE, setting=1)
    assert searcher.choose(tasks).tolist() == [BEST, 0]
    # From the most channels to one past the bottom, and NCCL's own choice.
    assert probes_of(searcher, tasks).tolist() == [1 + 5 + 4] * 2


def test_descent_tries_a_subspace_of_one_config() -> None:
    lone = [50.0, *[NAN] * 6, 40.0, *[NAN] * 5]
    searcher = CoordinateDescent(CATALOGUE, setting=1)
    tasks = grid([1 << 10], [lone])
    assert searcher.choose(tasks).tolist() == [1 + len(RING)]
    assert probes_of(searcher, tasks).tolist() == [2]


def test_descent_counts_every_repeat() -> None:
    tasks = grid([1 << 10], [GENTLE])
    searcher = CoordinateDescent(CATALOGUE, setting=3)
    assert searcher.choose(tasks).tolist() == [BEST]
    assert probes_of(searcher, tasks).tolist() == [30]


def test_descent_stays_on_what_was_measured_and_in_its_valley() -> None:
    two_valleys = [50.0, 20.0, 40.0, 30.0, *[NAN] * 9]
    searcher = CoordinateDescent(CATALOGUE, setting=1)
    assert searcher.choose(grid([1 << 10], [two_valleys])).tolist() == [3]
    hole = [50.0, 20.0, NAN, 40.0, *[NAN] * 9]
    assert searcher.choose(grid([1 << 10], [hole])).tolist() == [1]


def test_descent_moves_both_knobs() -> None:
    chunks = (None, 1 << 17, 1 << 18)
    configs = [
        Config(Algorithm.Ring, Protocol.Simple, channels, chunk)
        for channels in (4, 8, 16)
        for chunk in chunks
    ]
    times = [50.0, *(45, 40, 44), *(35, 30, 34), *(40, 25, 38)]
    searcher = CoordinateDescent(Catalogue((ABSTAIN, *configs)), setting=1)
    assert searcher.choose(grid([1 << 20], [times])).tolist() == [1 + times[1:].index(25)]


@pytest.mark.parametrize(
    "searcher", [Ucb1(), EpsilonGreedy(CATALOGUE)], ids=["ucb1", "epsilon-greedy"]
)
def test_bandits_find_the_best_through_noise_within_their_budget(
    searcher: Ucb1 | EpsilonGreedy,
) -> None:
    tasks = noisy(grid([1 << 10] * 20, [VALLEYS] * 20), spread=0.1)
    chosen = searcher.choose(tasks)
    assert (chosen == BEST).mean() >= 0.9
    assert probes_of(searcher, tasks).tolist() == [BANDIT_PROBES] * 20


@pytest.mark.parametrize(
    "searcher", [Ucb1(0.1), EpsilonGreedy(CATALOGUE, 0.2)], ids=["ucb1", "epsilon-greedy"]
)
def test_a_bandit_spends_its_calls_where_it_is_good(
    searcher: Ucb1 | EpsilonGreedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[int] = Counter()

    class Counted(Prober):
        def time_us(self, action: int) -> float:
            counts[action] += 1
            return super().time_us(action)

    monkeypatch.setattr(online, "Prober", Counted)
    searcher.choose(noisy(grid([1 << 10], [VALLEYS]), spread=0.05))
    assert counts.most_common(1)[0][0] == BEST
    assert counts[BEST] > counts.total() / 2
    assert len(counts) == len(CATALOGUE)  # each was tried


def test_searches_are_the_same_every_time() -> None:
    tasks = noisy(grid([1 << 10] * 3, [VALLEYS] * 3), spread=0.5)
    first, again = (EpsilonGreedy(CATALOGUE).choose(tasks) for _ in range(2))
    assert first.tolist() == again.tolist()


def test_picked_searchers_tell_their_probes_and_others_have_none() -> None:
    tasks = grid([1 << 10], [GENTLE])
    picked = Picked(lambda repeats: CoordinateDescent(CATALOGUE, repeats), (1, 3), tasks)
    picked.choose(tasks)
    assert probes_of(picked, tasks).tolist() == [10]  # the first of equals
    assert probes_of(NcclDefault(), tasks).tolist() == [0]
