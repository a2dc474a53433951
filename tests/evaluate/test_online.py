"""The search on grids whose answer is known; what it tries is counted."""

import numpy as np

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.evaluate.baselines.online import REPEATS, CoordinateDescent
from dynamiccl.evaluate.policies import NcclDefault, probes_of
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from tests.evaluate.grids import NAN, grid, noisy

CHANNELS = (1, 2, 4, 8, 16, 32)
RING = [Config(Algorithm.Ring, Protocol.Simple, channels) for channels in CHANNELS]
TREE = [Config(Algorithm.Tree, Protocol.LL, channels) for channels in CHANNELS]
CATALOGUE = Catalogue((ABSTAIN, *RING, *TREE))
#: One valley in each subspace, without a step longer than one; the best is Tree with 8 channels.
GENTLE = [50.0, *(40.0, 36.0, 33.0, 36.0, 40.0, 44.0), *(32.0, 28.0, 25.0, 22.0, 24.0, 27.0)]
BEST = 1 + len(RING) + CHANNELS.index(8)


def test_descent_finds_the_bottom_of_every_valley() -> None:
    tasks = grid([1 << 10, 1 << 20], [GENTLE, [10.0, *GENTLE[1:]]])
    searcher = CoordinateDescent(CATALOGUE)
    assert searcher.choose(tasks).tolist() == [BEST, 0]
    # From the most channels to one past the bottom, and NCCL's own choice.
    assert probes_of(searcher, tasks).tolist() == [REPEATS * (1 + 5 + 4)] * 2
    assert probes_of(NcclDefault(), tasks).tolist() == [0, 0]


def test_descent_tries_a_subspace_of_one_config() -> None:
    lone = [50.0, *[NAN] * 6, 40.0, *[NAN] * 5]
    searcher = CoordinateDescent(CATALOGUE)
    tasks = grid([1 << 10], [lone])
    assert searcher.choose(tasks).tolist() == [1 + len(RING)]
    assert probes_of(searcher, tasks).tolist() == [REPEATS * 2]


def test_descent_stays_on_what_was_measured_and_in_its_valley() -> None:
    two_valleys = [50.0, 20.0, 40.0, 30.0, *[NAN] * 9]
    searcher = CoordinateDescent(CATALOGUE)
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
    searcher = CoordinateDescent(Catalogue((ABSTAIN, *configs)))
    assert searcher.choose(grid([1 << 20], [times])).tolist() == [1 + times[1:].index(25)]


def test_searches_are_the_same_every_time() -> None:
    tasks = noisy(grid([1 << 10] * 3, [GENTLE] * 3), 0.5, np.random.default_rng(0))
    first, again = (CoordinateDescent(CATALOGUE).choose(tasks) for _ in range(2))
    assert first.tolist() == again.tolist()
