"""Learned policy and baselines: tables and a search worked out by hand, regressions on a law."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import TaskGrid, task_grid, usable
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.baselines import (
    REPEATS,
    BestFixed,
    CoordinateDescent,
    FiveBins,
    GradientBoosting,
    Interpolated,
    LearnedPolicy,
    NcclDefault,
    NearestSize,
    Oracle,
    Policy,
    PooledFixed,
    make_policies,
)
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.train.policy import TorchPolicy
from tests.conftest import Trained
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


ONES = [1.0, 1.0, 1.0]
BETTER = grid([1 << 10, 1 << 20], [[10.0, 9.0, 12.0], [100.0, 120.0, 50.0]])
#: 2 KiB and 32 KiB share a bin: the fastest row of all is action 1 at 2 KiB.
BINS = grid(
    [2 << 10, 32 << 10, 2 << 20], [[10.0, 8.0, 9.0], [40.0, 60.0, 20.0], [100.0, 120.0, 90.0]]
)
ASKED = grid([512, 1 << 10, 3 << 10, 64 << 10, 8 << 20, 1 << 30], [ONES] * 6)
OTHER = grid([1 << 20], [ONES], launch_profile="other")


@pytest.mark.parametrize(
    ("table", "told", "asked", "chosen"),
    [
        # Action 1: log(.9) + log(1.2) + 0 > 0; action 2: log(2) + log(.8) + log(.7) > 0 as well.
        pytest.param(BestFixed, TRAINING, TRAINING, [0, 0, 0], id="least mean log ratio"),
        pytest.param(BestFixed, BETTER, BETTER, [2, 2], id="least mean log ratio, a config"),
        pytest.param(
            BestFixed,
            grid([1 << 10], [[10.0, 5.0, 9.0]]),
            grid([1 << 11], [[20.0, NAN, 18.0]]),
            [0],
            id="the default where its config was not measured",
        ),
        pytest.param(
            NearestSize,
            TRAINING,
            grid([1 << 12, 1 << 19, 1 << 28], [ONES] * 3),
            [1, 2, 2],
            id="the nearest size by ratio",
        ),
        pytest.param(
            NearestSize, TRAINING, grid([1 << 20], [[1.0, 1.0, NAN]]), [0], id="what was measured"
        ),
        pytest.param(NearestSize, TRAINING, OTHER, [0], id="no table of another family"),
        pytest.param(BestFixed, TRAINING, OTHER, [0], id="no config of another family"),
        pytest.param(FiveBins, BINS, ASKED, [0, 0, 1, 1, 2, 0], id="the raw best row of a bin"),
        pytest.param(FiveBins, BINS, grid([3 << 10], [[1.0, NAN, 1.0]]), [0], id="not measured"),
        pytest.param(lambda _: NcclDefault(), BINS, TRAINING, [0, 0, 0], id="abstains"),
        pytest.param(lambda _: Oracle(), BINS, TRAINING, [1, 2, 2], id="the fastest"),
    ],
)
def test_tables_hold_what_was_the_fastest(
    table: Callable[[TaskGrid], Policy], told: TaskGrid, asked: TaskGrid, chosen: list[int]
) -> None:
    assert table(told).choose(asked).tolist() == chosen


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
    assert np.array_equal(make(law(SIZES)).choose(test), actions)  # the same twice


@pytest.mark.parametrize("make", [boosting, NearestSize, Interpolated])
def test_a_regression_takes_only_what_was_measured_at_the_task(
    make: Callable[[TaskGrid], Policy],
) -> None:
    test = law([1 << 12])
    assert make(law(SIZES)).choose(test).tolist() == [1]
    times = test.times_us.copy()
    times[:, 1] = NAN
    reduced = replace(test, times_us=times)
    assert make(law(SIZES)).choose(reduced).tolist() == [3]
    times[:, 1:] = NAN
    nothing = replace(test, times_us=times)
    assert make(law(SIZES)).choose(nothing).tolist() == [0]


def test_trees_are_fit_where_the_catalogue_holds_a_knob_that_training_never_set() -> None:
    times = law(SIZES).times_us.copy()
    times[:, 2] = NAN  # the only config with a chunk size
    chunks = replace(CATALOGUE.configs[2], chunk_bytes=1 << 20)
    catalogue = Catalogue((*CATALOGUE.configs[:2], chunks, CATALOGUE.configs[3]))
    training = grid(SIZES, times.tolist())
    policy = GradientBoosting(training, catalogue)
    assert policy.choose(law([1 << 12])).tolist() == [1]


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


@pytest.mark.parametrize(
    ("times", "chosen", "probes"),
    [
        # From the most channels to one past the bottom, and NCCL's own choice.
        pytest.param(GENTLE, BOTTOM, REPEATS * (1 + 5 + 4), id="the bottom of every valley"),
        pytest.param([10.0, *GENTLE[1:]], 0, REPEATS * (1 + 5 + 4), id="NCCL's own is faster"),
        pytest.param(
            [50.0, *[NAN] * 6, 40.0, *[NAN] * 5], 7, REPEATS * 2, id="a subspace of one config"
        ),
        pytest.param([50.0, 20.0, 40.0, 30.0, *[NAN] * 9], 3, None, id="it stays in its valley"),
        pytest.param([50.0, 20.0, NAN, 40.0, *[NAN] * 9], 1, None, id="and on what was measured"),
    ],
)
def test_descent(times: list[float], chosen: int, probes: int | None) -> None:
    tasks = grid([1 << 10], [times])
    searcher = CoordinateDescent(SEARCHED)
    assert searcher.choose(tasks).tolist() == [chosen]
    assert searcher.probes is not None
    assert probes in {None, *searcher.probes.tolist()}


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


def test_a_learned_policy_answers_in_the_catalogue_of_the_data_what_was_measured(
    trained: Trained,
) -> None:
    frame = read(trained.data)
    own = Catalogue.from_frame(usable(frame))
    # The same configs in another order: the answers must name the same configs.
    shuffled = Catalogue((own.configs[0], *reversed(own.configs[1:])))
    policy = TorchPolicy.load(trained.policy)
    chosen = []
    for catalogue in (own, shuffled):
        test = task_grid(frame, catalogue, [Split.TEST])
        actions = LearnedPolicy(policy, catalogue, "policy").choose(test)
        chosen.append([catalogue.configs[a] for a in actions])
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) > 1
    favourite = int(np.bincount(actions)[1:].argmax()) + 1
    times = test.times_us.copy()
    times[:, favourite] = NAN
    reduced = replace(test, times_us=times)
    assert favourite not in LearnedPolicy(policy, shuffled, "policy").choose(reduced)
