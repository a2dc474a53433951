"""The baselines: tables and a search on grids worked out by hand, regressions on a known law."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.datasets.features import COST_TYPES
from dynamiccl.evaluate.baselines.costs import CostTimesResidual
from dynamiccl.evaluate.baselines.online import REPEATS, CoordinateDescent
from dynamiccl.evaluate.baselines.regression import GradientBoosting
from dynamiccl.evaluate.baselines.tables import (
    BestFixed,
    FiveBins,
    Interpolated,
    NearestSize,
    PooledFixed,
)
from dynamiccl.evaluate.lineup import make_policies
from dynamiccl.evaluate.policies import NcclDefault, Oracle, Policy, probes_of
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from tests.evaluate.grids import NAN, TRAINING, grid, noisy

CATALOGUE = Catalogue(
    (
        ABSTAIN,
        Config(Algorithm.Ring, Protocol.LL, 2),
        Config(Algorithm.Ring, Protocol.Simple, 16),
        Config(Algorithm.Tree, Protocol.LL128, 8),
    )
)


CHANNELS = (1, 2, 4, 8, 16, 32)
RING = [Config(Algorithm.Ring, Protocol.Simple, channels) for channels in CHANNELS]
TREE = [Config(Algorithm.Tree, Protocol.LL, channels) for channels in CHANNELS]
SEARCHED = Catalogue((ABSTAIN, *RING, *TREE))
#: One valley in each subspace, without a step longer than one; the best is Tree with 8 channels.
GENTLE = [50.0, *(40.0, 36.0, 33.0, 36.0, 40.0, 44.0), *(32.0, 28.0, 25.0, 22.0, 24.0, 27.0)]
BOTTOM = 1 + len(RING) + CHANNELS.index(8)


def test_best_fixed_is_the_config_with_the_least_mean_log_ratio() -> None:
    # Action 1: log(.9) + log(1.2) + 0 > 0; action 2: log(2) + log(.8) + log(.7) > 0 as well.
    assert BestFixed(TRAINING).choose(TRAINING).tolist() == [0, 0, 0]
    better = grid([1 << 10, 1 << 20], [[10.0, 9.0, 12.0], [100.0, 120.0, 50.0]])
    assert BestFixed(better).choose(better).tolist() == [2, 2]


def test_best_fixed_falls_back_to_the_default_where_its_config_was_not_measured() -> None:
    training = grid([1 << 10], [[10.0, 5.0, 9.0]])
    test = grid([1 << 11], [[20.0, NAN, 18.0]])
    assert BestFixed(training).choose(test).tolist() == [0]


def test_nearest_size_takes_the_best_config_of_the_nearest_size_by_ratio() -> None:
    test = grid([1 << 12, 1 << 19, 1 << 28], [[1.0, 1.0, 1.0]] * 3)
    assert NearestSize(TRAINING).choose(test).tolist() == [1, 2, 2]


def test_nearest_size_takes_only_what_was_measured_at_the_task() -> None:
    test = grid([1 << 20], [[1.0, 1.0, NAN]])
    assert NearestSize(TRAINING).choose(test).tolist() == [0]


def test_families_do_not_share_their_tables() -> None:
    test = grid([1 << 20], [[1.0, 1.0, 1.0]], launch_profile="other")
    assert NearestSize(TRAINING).choose(test).tolist() == [0]
    assert BestFixed(TRAINING).choose(test).tolist() == [0]


def test_five_bins_hold_the_raw_best_row_of_each() -> None:
    training = grid(
        [2 << 10, 32 << 10, 2 << 20],
        # 2 KiB and 32 KiB share a bin: the fastest row of all is action 1 at 2 KiB.
        [[10.0, 8.0, 9.0], [40.0, 60.0, 20.0], [100.0, 120.0, 90.0]],
    )
    test = grid([512, 1 << 10, 3 << 10, 64 << 10, 8 << 20, 1 << 30], [[1.0, 1.0, 1.0]] * 6)
    assert FiveBins(training).choose(test).tolist() == [0, 0, 1, 1, 2, 0]
    other = grid([3 << 10], [[1.0, NAN, 1.0]])
    assert FiveBins(training).choose(other).tolist() == [0]


def law(sizes: list[int], system: str = "s") -> TaskGrid:
    """LL is best below 64 KiB, Tree up to 16 MiB, and the default from there on."""
    times = []
    for size in sizes:
        mib = size / (1 << 20)
        times.append([20 + 12 * mib, 5 + 400 * mib, 60 + 13 * mib, 12 + 12.4 * mib])
    return grid(sizes, times, system=system)


def boosting(training: TaskGrid) -> Policy:
    return GradientBoosting(training, CATALOGUE)


SIZES = [1 << n for n in range(10, 31)]
BETWEEN = [3 << n for n in range(9, 29)]


@pytest.mark.parametrize("make", [boosting, Interpolated])
def test_a_regression_finds_the_law_between_the_sizes(
    make: Callable[[TaskGrid], Policy],
) -> None:
    policy = make(law(SIZES))
    test = law(BETWEEN)
    actions = policy.choose(test)
    assert len(set(actions.tolist())) == 3
    assert test.regret(actions).mean() < 0.03
    assert test.regret(actions).mean() < 0.2 * test.regret(NcclDefault().choose(test)).mean()
    assert test.regret(Oracle().choose(test)).max() == 0.0


@pytest.mark.parametrize("make", [boosting, NearestSize, Interpolated])
def test_a_regression_takes_only_what_was_measured_at_the_task(
    make: Callable[[TaskGrid], Policy],
) -> None:
    test = law([1 << 12])
    assert make(law(SIZES)).choose(test).tolist() == [1]
    times = test.times_us.copy()
    times[:, 1] = NAN
    reduced = TaskGrid(test.tasks, times, test.repeats, test.unscored, test.samples)
    assert make(law(SIZES)).choose(reduced).tolist() == [3]
    times[:, 1:] = NAN
    nothing = TaskGrid(test.tasks, times, test.repeats, test.unscored, test.samples)
    assert make(law(SIZES)).choose(nothing).tolist() == [0]


def test_only_trees_have_an_opinion_on_a_system_that_they_never_saw() -> None:
    test = law([1 << 12], system="new")
    assert NearestSize(law(SIZES)).choose(test).tolist() == [0]
    assert boosting(law(SIZES)).choose(test).tolist() == [1]


def test_trees_are_fit_where_the_catalogue_holds_a_knob_that_training_never_set() -> None:
    times = law(SIZES).times_us.copy()
    times[:, 2] = NAN  # the only config with a chunk size
    chunks = replace(CATALOGUE.configs[2], chunk_bytes=1 << 20)
    catalogue = Catalogue((*CATALOGUE.configs[:2], chunks, CATALOGUE.configs[3]))
    training = grid(SIZES, times.tolist())
    policy = GradientBoosting(training, catalogue)
    assert policy.choose(law([1 << 12])).tolist() == [1]


def test_the_same_twice() -> None:
    first, second = (boosting(law(SIZES)).choose(law(BETWEEN)) for _ in "ab")
    assert np.array_equal(first, second)


def test_rivals_are_told_what_the_policies_were_training_and_validation() -> None:
    """At a validation size, between two training sizes, another config is the fastest."""
    far = [[10.0, 5.0, 9.0]] * 2
    training, validation = grid([1 << 10, 1 << 30], far), grid([1 << 20], [[10.0, 5.0, 1.0]])
    asked = grid([1 << 21], [[1.0, 1.0, 1.0]])
    players = {p.name: p for p in make_policies(training, validation, CATALOGUE, [])}
    told = ("nearest-size", "interpolated")
    assert {name: players[name].choose(asked).tolist() for name in told} == {n: [2] for n in told}


def test_interpolation_is_in_log_time_and_ends_with_the_sizes() -> None:
    training = grid([1 << 10, 1 << 20], [[10.0, 4.0, NAN], [10.0, 16.0, 5.0]])
    test = grid([1 << 15, 1 << 25], [[1.0, 1.0, 1.0]] * 2)
    predicted = Interpolated(training).predict(test)
    assert np.allclose(np.exp(predicted), [[1.0, 0.8, 0.5], [1.0, 1.6, 0.5]])


def test_a_pooled_config_is_one_for_all_shapes_of_a_system() -> None:
    small = grid([1 << 10], [[10.0, 5.0, 9.0]], num_nodes=1)
    large = grid([1 << 10], [[10.0, 9.0, 2.0]], num_nodes=4)
    both = replace(
        small,
        tasks=pl.concat([small.tasks, large.tasks]),
        times_us=np.vstack([small.times_us, large.times_us]),
    )
    assert BestFixed(both).choose(both).tolist() == [1, 2]
    assert PooledFixed(both).choose(both).tolist() == [2, 2]
    assert PooledFixed(both).choose(grid([1 << 10], [[1.0, 1.0, 1.0]], num_nodes=8)).tolist() == [2]


def test_nccls_cost_is_corrected_by_the_nearest_measured_shape() -> None:
    ring, tree = (Config(each, Protocol.Simple) for each in (Algorithm.Ring, Algorithm.Tree))
    catalogue = Catalogue((ABSTAIN, ring, tree))
    place = {"collective": "AllGather", "ranks_per_node": 8, "nccl_version": "2.27.5"}
    place |= {"launch_profile": "default"}
    rows = [
        ("s", "2.27.5", nodes, 8, "default", "AllGather", cell, "Simple", latency_us, 1e9)
        for nodes, cell, latency_us in (
            *((2, "Ring", 100.0), (2, "Tree", 110.0)),
            *((4, "Ring", 200.0), (4, "Tree", 300.0), (8, "Ring", 400.0)),
        )
    ]
    costs = pl.DataFrame(rows, schema=COST_TYPES, orient="row")
    training = grid([1 << 10], [[100.0, 102.0, 55.0]], **place, num_nodes=2)
    baseline = CostTimesResidual(training, catalogue, costs)
    # NCCL takes the ring there, at its cost; the tree takes half of its.
    asked = grid([1 << 12], [[1.0, 1.0, 1.0]], **place, num_nodes=4)
    assert np.exp(baseline.predict(asked)) == pytest.approx(np.array([[1.0, 1.02, 0.75]]))
    assert baseline.choose(asked).tolist() == [2]
    # Without the tree's cost nothing is known of it; nor of another system.
    unknown = grid([1 << 12], [[1.0, 1.0, 1.0]], **place, num_nodes=8)
    assert baseline.choose(unknown).tolist() == [0]
    other = grid([1 << 12], [[1.0, 1.0, 1.0]], **(place | {"system": "t"}), num_nodes=4)
    assert baseline.choose(other).tolist() == [0]


def test_descent_finds_the_bottom_of_every_valley() -> None:
    tasks = grid([1 << 10, 1 << 20], [GENTLE, [10.0, *GENTLE[1:]]])
    searcher = CoordinateDescent(SEARCHED)
    assert searcher.choose(tasks).tolist() == [BOTTOM, 0]
    # From the most channels to one past the bottom, and NCCL's own choice.
    assert probes_of(searcher, tasks).tolist() == [REPEATS * (1 + 5 + 4)] * 2
    assert probes_of(NcclDefault(), tasks).tolist() == [0, 0]


def test_descent_tries_a_subspace_of_one_config() -> None:
    lone = [50.0, *[NAN] * 6, 40.0, *[NAN] * 5]
    searcher = CoordinateDescent(SEARCHED)
    tasks = grid([1 << 10], [lone])
    assert searcher.choose(tasks).tolist() == [1 + len(RING)]
    assert probes_of(searcher, tasks).tolist() == [REPEATS * 2]


def test_descent_stays_on_what_was_measured_and_in_its_valley() -> None:
    two_valleys = [50.0, 20.0, 40.0, 30.0, *[NAN] * 9]
    searcher = CoordinateDescent(SEARCHED)
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
    first, again = (CoordinateDescent(SEARCHED).choose(tasks) for _ in range(2))
    assert first.tolist() == again.tolist()
