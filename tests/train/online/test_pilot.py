"""Validation of online recipes by playing the most likely actions."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from dynamiccl.train.data import load_data
from dynamiccl.train.online.make import Pilot, _network, _orders, make_loop
from dynamiccl.train.online.player import Player
from dynamiccl.train.recipes import make_recipe
from tests.train.online.test_a3c import SMALL

RECIPE = make_recipe("a3c-lstm", [*SMALL, "state_units=8", "probe_every=0"])


def test_the_speedup_is_of_the_most_likely_actions(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_data(data, 0, with_costs=True)
    actors = _orders(loaded, RECIPE, 0)
    pilot = Pilot(actors, lambda: _network(loaded, RECIPE, uses_cost=True))
    assert len(pilot._actors) == 1  # two actors in one place
    network, found = pilot._network, []
    for config in (0, 3):

        def logits(
            _hidden: torch.Tensor, _context: torch.Tensor, mask: torch.Tensor, wanted: int = config
        ) -> torch.Tensor:
            likely = torch.zeros_like(mask)
            likely[:, wanted] = 0.1  # hardly more likely than the others
            return torch.where(mask > 0, likely, -1e6)

        monkeypatch.setattr(network.actor, "logits", logits)
        env = actors[0].env()
        player = Player(env, network.state_units, RECIPE, 0, is_greedy=True)
        played = player.play(network)
        assert set(played.action.flatten().tolist()) == {config}
        found.append(pilot.play(copy.deepcopy(network.actor))[0])
        assert found[-1] == pilot.play(copy.deepcopy(network.actor))[0]  # the same episodes
    assert found[0] != pytest.approx(found[1], rel=0.01)


def test_the_fastest_checkpoint_of_the_second_half_is_taken(data: Path) -> None:
    recipe = make_recipe("a3c", [*SMALL, "actors=1", "steps=8", "steps_per_epoch=2"])
    loop, _ = make_loop(load_data(data, 0, with_costs=True), recipe, 0, uses_cost=True)
    speedups = iter([9.0, 9.0, 1.2, 1.1])
    actors: list[nn.Module] = []

    def pilot(actor: nn.Module) -> tuple[float, int]:
        actors.append(copy.deepcopy(actor))
        return next(speedups), 0

    loop._pilot = pilot
    while not loop.is_over:
        loop.run_epoch()
    best = loop.best()
    assert best.step == 6
    expected = actors[2].state_dict()
    assert all(torch.equal(best.weights[f"0.{name}"], value) for name, value in expected.items())
    assert not all(
        torch.equal(best.weights[f"0.{name}"], value)
        for name, value in actors[3].state_dict().items()
    )
