"""PopArt: values stay what they were while their scale moves, and a run with it learns."""

import pytest
import torch
from torch import nn

from dynamiccl.errors import UserError
from dynamiccl.train.data import TrainingData
from dynamiccl.train.online.impala import Learner, LocalActors
from dynamiccl.train.online.make import _network, _orders
from dynamiccl.train.online.popart import ValueScale
from dynamiccl.train.recipes import make_recipe
from tests.train.online.test_a3c import SMALL


def test_values_stay_what_they_were_while_the_scale_goes_to_the_targets() -> None:
    torch.manual_seed(0)
    scale, last, known = ValueScale(), nn.Linear(4, 1), torch.randn(20, 4)
    before = scale(last(known))
    assert torch.equal(before, last(known))
    target = -3000.0 + 200.0 * torch.randn(50, 8)
    weight = (torch.rand(50, 8) < 0.5).float()
    outliers = torch.where(weight > 0, target, torch.full_like(target, 1e9))
    for _ in range(2000):
        scale.follow(outliers, weight, last)
    mine = target[weight > 0]
    assert float(scale.mean) == pytest.approx(float(mine.mean()), rel=1e-4)
    assert float(scale.std) == pytest.approx(float(mine.std()), rel=0.02)
    assert torch.allclose(scale(last(known)), before, atol=0.05)


def test_a_learner_with_it_follows_rewards_in_ms(loaded: TrainingData) -> None:
    recipe = make_recipe("impala-lstm", [*SMALL, "state_units=8", "reward_scale=popart"])
    network = _network(loaded, recipe, uses_cost=True)
    played = _orders(loaded, recipe, 0)[0].player(recipe.state_units).play(network)
    learner = Learner(network, LocalActors(network, [], lambda: network), recipe)
    learner.learn(played, 1)
    assert network.scale.mean < 0.0
    # Those of other scales have none.
    plain = make_recipe("impala-lstm", [*SMALL, "state_units=8"])
    network = _network(loaded, plain, uses_cost=True)
    Learner(network, LocalActors(network, [], lambda: network), plain).learn(played, 1)
    assert (float(network.scale.mean), float(network.scale.std)) == (0.0, 1.0)


def test_it_is_for_one_learner() -> None:
    with pytest.raises(UserError, match="'a3c-lstm' is A3C: take 'impala-lstm'"):
        make_recipe("a3c-lstm", ["reward_scale=popart"])
