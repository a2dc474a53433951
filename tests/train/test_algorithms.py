"""What a built algorithm begins with."""

from typing import cast

import numpy as np
import torch

from dynamiccl.datasets.history_columns import WINDOW_COLUMN
from dynamiccl.train.algorithms import make_algorithm, members_of
from dynamiccl.train.encoders import ObservationEncoder
from dynamiccl.train.heads import Member
from dynamiccl.train.recipes import make_recipe
from tests.steps import make_steps


def test_networks_scale_what_they_see_by_what_they_learn_from() -> None:
    steps = make_steps()
    algorithm = make_algorithm(make_recipe("ddqn-dueling", ["num_members=2"]), steps, steps)
    rows = np.arange(len(steps))
    seen = steps.observe(rows, steps.episode_of(rows))[0]
    valid = WINDOW_COLUMN["valid"]
    calls = torch.from_numpy(seen.window[seen.window[..., valid] > 0.0])
    members = list(members_of(algorithm))
    assert len(members) == 2
    for member in members:
        trunk = cast(ObservationEncoder, cast(Member, member).encoder).trunk
        scaled = (calls - trunk.window_mean) / trunk.window_scale
        assert (scaled[:, valid] == 1.0).all()  # `valid` tells calls from padding
        varies = calls.std(dim=0) > 1e-6
        varies[valid] = False
        assert varies.sum() > len(WINDOW_COLUMN) // 2
        torch.testing.assert_close(
            scaled[:, varies].mean(dim=0), torch.zeros(int(varies.sum())), atol=1e-4, rtol=0
        )
        torch.testing.assert_close(
            scaled[:, varies].std(dim=0, correction=0),
            torch.ones(int(varies.sum())),
            atol=1e-4,
            rtol=0,
        )
        context = (torch.from_numpy(seen.context) - trunk.context_mean) / trunk.context_scale
        assert context.mean(dim=0).abs().max() < 1e-4


def test_without_any_call_windows_are_left_as_they_are() -> None:
    steps = make_steps(lengths=(1, 1, 1))
    algorithm = make_algorithm(make_recipe("ddqn-dueling"), steps)
    (first, *_) = members_of(algorithm)
    trunk = cast(ObservationEncoder, cast(Member, first).encoder).trunk
    assert not trunk.window_mean.any()
    assert (trunk.window_scale == 1.0).all()
