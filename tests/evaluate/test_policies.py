"""The learned policy, and the two ends of the scale."""

import numpy as np

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import TaskGrid, task_grid, usable
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.policies import LearnedPolicy, NcclDefault, Oracle
from dynamiccl.train.policy import TorchPolicy
from tests.conftest import Trained
from tests.evaluate.grids import NAN, TRAINING


def test_default_abstains_everywhere() -> None:
    assert NcclDefault().choose(TRAINING).tolist() == [0, 0, 0]


def test_the_oracle_has_no_regret() -> None:
    actions = Oracle().choose(TRAINING)
    assert actions.tolist() == [1, 2, 2]
    assert TRAINING.regret(actions).tolist() == [0.0, 0.0, 0.0]


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
    reduced = TaskGrid(test.tasks, times, test.repeats, test.unscored, test.samples)
    assert favourite not in player.choose(reduced)
