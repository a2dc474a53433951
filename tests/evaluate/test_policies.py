"""Baselines and the learned policy, on grids small enough to work out by hand."""

from typing import Any

import numpy as np
import polars as pl

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import usable
from dynamiccl.datasets.schema import TASK_COLUMNS
from dynamiccl.datasets.scoring import TaskGrid, task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.policies import BestFixed, LearnedPolicy, NcclDefault, NearestSize
from dynamiccl.train.policy import TorchPolicy
from tests.conftest import Trained

NAN = float("nan")


def grid(sizes: list[int], times: list[list[float]], **columns: Any) -> TaskGrid:
    """A grid of one family: a row a size, a column an action (0 = NCCL's default)."""
    shared = dict.fromkeys(TASK_COLUMNS) | {"system": "s", "collective": "AllReduce"} | columns
    tasks = pl.DataFrame([{**shared, "size_bytes": size} for size in sizes])
    values = np.array(times)
    return TaskGrid(tasks, values, np.where(np.isnan(values), 0, 3), tasks.head(0))


TRAINING = grid(
    [1 << 10, 1 << 20, 1 << 30],
    [[10.0, 9.0, 20.0], [100.0, 120.0, 80.0], [1000.0, NAN, 700.0]],
)


def test_default_abstains_everywhere() -> None:
    assert NcclDefault().choose(TRAINING).tolist() == [0, 0, 0]


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


def test_learned_policy_answers_in_the_data_sets_catalogue(trained: Trained) -> None:
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


def test_learned_policy_leaves_configs_alone_that_were_not_measured(trained: Trained) -> None:
    frame = read(trained.data)
    catalogue = Catalogue.from_frame(usable(frame))
    test = task_grid(frame, catalogue, [Split.TEST])
    player = LearnedPolicy(TorchPolicy.load(trained.policy), catalogue, "policy")
    favourite = int(np.bincount(player.choose(test), minlength=len(catalogue))[1:].argmax()) + 1
    times = test.times_us.copy()
    times[:, favourite] = NAN
    reduced = TaskGrid(test.tasks, times, test.repeats, test.unscored)
    assert favourite not in player.choose(reduced)
