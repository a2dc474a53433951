"""Probes, one of so many decisions that is left to NCCL; and validation by playing."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.train.data import TrainingData, load_data
from dynamiccl.train.networks import StatefulTrunk
from dynamiccl.train.online.actor_critic import ActorCritic
from dynamiccl.train.online.actors import Player
from dynamiccl.train.online.impala import Learner, LocalActors
from dynamiccl.train.online.make import Pilot, _network, _orders, make_loop
from dynamiccl.train.policy import StatefulPolicyModule
from dynamiccl.train.recipe import make_recipe
from tests.train.online.test_a3c import SMALL

EVERY = 5
RECIPE = make_recipe(
    "impala-lstm", [*SMALL, "state_units=8", f"probe_every={EVERY}", "episode_rounds=30"]
)


PLAYED = make_recipe("a3c-lstm", [*SMALL, "state_units=8", "probe_every=0"])


def stubborn(loaded: TrainingData) -> ActorCritic:
    """A network that never wants NCCL's own choice."""
    torch.manual_seed(0)
    network = _network(loaded, RECIPE, uses_cost=True)
    of_network = network.actor.logits

    def logits(hidden: torch.Tensor, context: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = of_network(hidden, context, mask)
        found[:, ABSTAIN_ACTION] -= 50.0
        return found

    network.actor.logits = logits  # type: ignore[method-assign, assignment]
    return network


def player_of(loaded: TrainingData) -> Player:
    return _orders(loaded, RECIPE, 0)[0].player(RECIPE.state_units)


def test_every_so_many_decisions_about_keys_with_calls_one_is_left_to_nccl(
    loaded: TrainingData,
) -> None:
    network, player = stubborn(loaded), player_of(loaded)
    played = [player.play(network) for _ in range(10)]
    action, is_probe = (
        torch.cat([getattr(each, name) for each in played]) for name in ("action", "is_probe")
    )
    assert torch.equal(action == ABSTAIN_ACTION, is_probe)
    jobs = player.env.num_envs
    keys = action.size(1) // jobs
    is_new = torch.cat([each.seen.earned[:-1] for each in played]) != 0.0
    for job in range(jobs):
        mine = slice(job * keys, (job + 1) * keys)
        probes = is_probe[:, mine].flatten()[is_new[:, mine].flatten()]
        expected = [(index + 1) % EVERY == 0 for index in range(len(probes))]
        assert probes.tolist() == expected
        assert len(probes) > 3 * EVERY


def test_the_exported_policy_probes_as_the_player_does(loaded: TrainingData) -> None:
    network, player = stubborn(loaded), player_of(loaded)
    trunk = network.actor.trunk
    assert isinstance(trunk, StatefulTrunk)
    trunk.probe_every.fill_(EVERY)
    module = StatefulPolicyModule(network.actor, 0.0, 0.0)
    assert module.state_units == 9
    played = player.play(network)
    jobs, (rounds, rows) = player.env.num_envs, played.action.shape
    keys = rows // jobs
    h, c = torch.zeros(2, jobs, 9)
    for each in range(rounds):
        seen = [part[each].view(jobs, keys, *part.shape[2:]) for part in played.seen]
        window, context, mask, decided, earned = seen
        for key in range(keys):
            parts = window[:, key], context[:, key], mask[:, key], decided[:, key, -1]
            with torch.no_grad():
                action, _, h_after, c_after = module.step(*parts, h, c)
            is_probe = played.is_probe[each].view(jobs, keys)[:, key]
            assert torch.equal(action[is_probe], torch.zeros_like(action[is_probe]))
            is_new = (earned[:, key] != 0.0).unsqueeze(1)
            h, c = torch.where(is_new, h_after, h), torch.where(is_new, c_after, c)
    assert torch.equal(c[:, 8].long(), player._since_N)
    due = torch.full((jobs, 9), float(EVERY))
    with torch.no_grad():
        assert not module.step(*parts, h, due)[0].any()
        has_none = torch.cat([torch.zeros(jobs, 1), torch.ones(jobs, mask.size(2) - 1)], dim=1)
        action = module.step(*parts[:2], has_none, parts[3], h, due)[0]
    assert action.all(), "there is no choice of NCCL's to ask"


def test_a_probe_teaches_the_critic_and_not_the_actor(loaded: TrainingData) -> None:
    recipe = replace(RECIPE, entropy_start=0.0, entropy_end=0.0)
    torch.manual_seed(0)
    network = _network(loaded, recipe, uses_cost=True)
    played = player_of(loaded).play(network)
    learner = Learner(network, LocalActors(network, [], lambda: network), recipe)
    before = {name: each.clone() for name, each in network.named_parameters()}
    learner.learn(replace(played, is_probe=torch.ones_like(played.is_probe)), 1)
    moved = {
        name for name, each in network.named_parameters() if not torch.equal(before[name], each)
    }
    assert any(name.startswith("critic.") for name in moved)
    assert not any(name.startswith("actor.head.") for name in moved)
    learner.learn(played, 2)
    assert any(
        name.startswith("actor.head.") and not torch.equal(before[name], each)
        for name, each in network.named_parameters()
    )


def test_validation_chooses_how_often(
    loaded: TrainingData, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(RECIPE, probe_every=(0, 7, 20))
    pilot = Pilot(_orders(loaded, recipe, 0), lambda: _network(loaded, recipe, uses_cost=True))
    logs = {0: 0.1, 7: 0.3, 20: 0.2}
    monkeypatch.setattr(pilot, "_log_speedup", logs.__getitem__)
    actor = _network(loaded, recipe, uses_cost=True).actor
    speedup, probe_every = pilot.play(actor)
    assert speedup == pytest.approx(1.3498588)  # exp(0.3)
    assert probe_every == 7
    assert StatefulPolicyModule(actor, 0.0, 0.0).probe_every == 7


def test_the_speedup_is_of_the_most_likely_actions(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_data(data, 0, with_costs=True)
    actors = _orders(loaded, PLAYED, 0)
    pilot = Pilot(actors, lambda: _network(loaded, PLAYED, uses_cost=True))
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
        player = Player(env, network.state_units, PLAYED, 0, is_greedy=True)
        played = player.play(network)
        assert set(played.action.flatten().tolist()) == {config}
        found.append(pilot.play(copy.deepcopy(network.actor))[0])
        assert found[-1] == pilot.play(copy.deepcopy(network.actor))[0]  # the same episodes
    assert found[0] != pytest.approx(found[1], rel=0.01)


def test_the_fastest_checkpoint_of_the_second_half_is_taken(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("a3c", [*SMALL, "actors=1", "steps=8", "steps_per_epoch=2"])
    loop = make_loop(load_data(data, 0, with_costs=True), recipe, 0, uses_cost=True)
    speedups = iter([9.0, 9.0, 1.2, 1.1])
    actors: list[nn.Module] = []

    def play(_: Pilot, actor: nn.Module) -> tuple[float, int]:
        actors.append(copy.deepcopy(actor))
        return next(speedups), 0

    monkeypatch.setattr(Pilot, "play", play)
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
