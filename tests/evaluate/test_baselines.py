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
    NCCL_DEFAULT,
    ORACLE,
    REPEATS,
    BestFixed,
    CoordinateDescent,
    FiveBins,
    GradientBoosting,
    Interpolated,
    LearnedPolicy,
    NearestSize,
    Policy,
    PooledFixed,
    make_policies,
)
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.train.policy import TorchPolicy
from tests.conftest import Trained
from tests.evaluate.grids import NAN, TRAINING, grid

KNOBS = ((Algorithm.Ring, "LL", 2), (Algorithm.Ring, "Simple", 16), (Algorithm.Tree, "LL128", 8))
CATALOGUE = Catalogue((ABSTAIN, *(Config(a, Protocol.parse(p), n) for a, p, n in KNOBS)))
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
APART = grid([1 << 12, 1 << 19, 1 << 28], [ONES] * 3)
OTHER = grid([1 << 20], [ONES], launch_profile="other")


@pytest.mark.parametrize(
    ("table", "told", "asked", "chosen"),
    [
        # Action 1: log(.9) + log(1.2) + 0 > 0; action 2: log(2) + log(.8) + log(.7) > 0 as well.
        pytest.param(BestFixed, TRAINING, TRAINING, [0, 0, 0], id="least mean log ratio"),
        pytest.param(BestFixed, BETTER, BETTER, [2, 2], id="least mean log ratio, a config"),
        # The default where its config was not measured.
        pytest.param(BestFixed, BETTER, grid([1 << 11], [[20.0, 18.0, NAN]]), [0], id="no config"),
        pytest.param(NearestSize, TRAINING, APART, [1, 2, 2], id="the nearest size by ratio"),
        pytest.param(
            NearestSize, TRAINING, grid([1 << 20], [[1.0, 1.0, NAN]]), [0], id="what was measured"
        ),
        pytest.param(NearestSize, TRAINING, OTHER, [0], id="no table of another family"),
        pytest.param(BestFixed, TRAINING, OTHER, [0], id="no config of another family"),
        pytest.param(FiveBins, BINS, ASKED, [0, 0, 1, 1, 2, 0], id="the raw best row of a bin"),
        pytest.param(FiveBins, BINS, grid([3 << 10], [[1.0, NAN, 1.0]]), [0], id="not measured"),
        pytest.param(lambda _: NCCL_DEFAULT, BINS, TRAINING, [0, 0, 0], id="abstains"),
        pytest.param(lambda _: ORACLE, BINS, TRAINING, [1, 2, 2], id="the fastest"),
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
def test_a_regression_finds_the_law_between_sizes(make: Callable[[TaskGrid], Policy]) -> None:
    training = law(SIZES)
    policy, test = make(training), law(BETWEEN)
    actions = policy.choose(test)
    assert len(set(actions.tolist())) == 3
    assert test.regret(actions).mean() < 0.03
    assert test.regret(actions).mean() < 0.2 * test.regret(NCCL_DEFAULT.choose(test)).mean()
    assert np.array_equal(make(training).choose(test), actions)  # the same twice
    # A config that training never had, and then none.
    for unmeasured, best in ((slice(1, 2), 3), (slice(1, None), 0)):
        times = law([1 << 12]).times_us.copy()
        times[:, unmeasured] = NAN
        assert policy.choose(grid([1 << 12], times.tolist())).tolist() == [best]
    times = training.times_us.copy()
    times[:, 2] = NAN  # a knob that training never set
    assert make(grid(SIZES, times.tolist())).choose(law([1 << 12])).tolist() == [1]


def test_rivals_know_training_and_validation_and_one_pools_all_shapes() -> None:
    """At a validation size, between two training sizes, another config is the fastest."""
    far = [[10.0, 5.0, 9.0]] * 2
    training, validation = grid([1 << 10, 1 << 30], far), grid([1 << 20], [[10.0, 5.0, 1.0]])
    asked = grid([1 << 21], [[1.0, 1.0, 1.0]])
    players = {p.name: p for p in make_policies(training, validation, CATALOGUE, [])}
    told = ("nearest-size", "interpolated")
    assert {name: players[name].choose(asked).tolist() for name in told} == {n: [2] for n in told}
    times = [[10.0, 5.0, 9.0], [10.0, 9.0, 2.0]]
    both = grid([1 << 10] * 2, times, num_nodes=1)
    both = replace(both, tasks=both.tasks.with_columns(num_nodes=pl.Series([1, 4])))
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
    searcher = CoordinateDescent(SEARCHED)
    assert searcher.choose(grid([1 << 10], [times])).tolist() == [chosen]
    assert searcher.probes is not None
    assert probes in {None, *searcher.probes.tolist()}


def test_a_learned_policy_answers_in_the_catalogue_of_the_data(trained: Trained) -> None:
    frame = read(trained.data)
    own = Catalogue.from_frame(usable(frame))
    # The same configs in another order: the answers must name the same configs.
    shuffled = Catalogue((own.configs[0], *reversed(own.configs[1:])))
    policy = TorchPolicy.load(trained.policy)
    chosen = []
    for catalogue in (own, shuffled):
        test = task_grid(frame, catalogue, [Split.TEST])
        learned = LearnedPolicy(policy, catalogue, "policy")
        actions = learned.choose(test)
        chosen.append([catalogue.configs[a] for a in actions])
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) > 1
    favourite = int(np.bincount(actions)[1:].argmax()) + 1
    times = test.times_us.copy()
    times[:, favourite] = NAN
    assert favourite not in learned.choose(replace(test, times_us=times))
