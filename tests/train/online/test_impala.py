"""IMPALA: V-trace, actors that never wait for the learner, and probes."""

import copy
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import multiprocessing, nn

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.train.data import TrainingData
from dynamiccl.train.networks import StatefulTrunk
from dynamiccl.train.online import Pilot, make_loop, orders_of
from dynamiccl.train.online.a3c import ActorCritic, ActorLearners, Player, Trajectory
from dynamiccl.train.online.impala import Learner, local_actors, vtrace
from dynamiccl.train.policy import StatefulPolicyModule
from dynamiccl.train.recipe import Recipe, make_recipe
from tests.train.online.conftest import SMALL, small_network, small_player

LSTM = make_recipe("impala-lstm", [*SMALL, "state_units=8"])
EVERY = 5
PROBING = replace(LSTM, probe_every=(EVERY,), episode_rounds=30)


def trajectory(loaded: TrainingData, recipe: Recipe = LSTM) -> tuple[Learner, Trajectory]:
    """A learner, and one trajectory that was played under its weights."""
    torch.manual_seed(0)
    network = small_network(loaded, recipe)
    played = small_player(loaded, recipe).play(network)
    return Learner(network, local_actors(network, [], lambda: network), recipe), played


def test_targets_are_the_papers_sum_of_clipped_products() -> None:
    """Equation 1 of Espeholt et al. 2018, term by term."""
    random = np.random.default_rng(2)
    rounds, gamma, rho_most, c_most = 6, 0.8, 1.2, 0.9
    ratio, reward = np.exp(random.normal(0, 1, rounds)), random.normal(size=rounds)
    value = random.normal(size=rounds + 1)
    rho, c = np.minimum(ratio, rho_most), np.minimum(ratio, c_most)
    delta = rho * (reward + gamma * value[1:] - value[:-1])
    expected = [
        value[s] + sum(gamma ** (t - s) * c[s:t].prod() * delta[t] for t in range(s, rounds))
        for s in range(rounds)
    ]
    log_ratio, earned, values = (
        torch.from_numpy(each)[:, None] for each in (np.log(ratio), reward, value)
    )
    found, advantage = vtrace(log_ratio, earned, values, gamma, rho_most=rho_most, c_most=c_most)
    assert found[:, 0].numpy() == pytest.approx(np.array(expected))
    after = np.append(expected[1:], value[-1])
    expected_advantage = rho * (reward + gamma * after - value[:-1])
    assert advantage[:, 0].numpy() == pytest.approx(expected_advantage)


def test_a_trajectory_has_its_first_state_and_what_was_likely(loaded: TrainingData) -> None:
    recipe = replace(LSTM, episode_rounds=50)
    network, player = small_network(loaded, recipe), small_player(loaded, recipe)
    first, second = player.play(network), player.play(network)
    assert not first.state.h.any()  # an episode begins
    assert second.state.h.any()
    with torch.no_grad():
        log, _, _ = network(first.seen, first.state)
    taken = log[:-1].gather(2, first.action.unsqueeze(2)).squeeze(2)
    assert torch.allclose(taken, first.log_probability, atol=1e-5)
    # The state after the rounds, without the look at what follows them, is the next one's first.
    with torch.no_grad():
        rounds = type(first.seen)(*(part[:-1] for part in first.seen))
        *_, after = network(rounds, first.state)
    assert torch.allclose(after.h, second.state.h, atol=1e-5)
    short = small_player(loaded, replace(LSTM, episode_rounds=3))
    assert not any(short.play(network).state.h.any() for _ in range(2))  # an episode each


def test_the_learner_moves_towards_what_earned_more_than_expected(loaded: TrainingData) -> None:
    learner, played = trajectory(loaded)

    def likely() -> torch.Tensor:
        with torch.no_grad():
            log, _, _ = learner.network(played.seen, played.state)
        found: torch.Tensor = log[:-1].gather(2, played.action.unsqueeze(2)).squeeze(2)
        return found[played.calls > 0]

    before = likely()
    with torch.no_grad():
        _, value, _ = learner.network(played.seen, played.state)
    better = played.reward * 0.0 + 5.0 + float(value.max())
    for number in range(1, 4):
        learner.learn(replace(played, reward=better), number)
    assert float((likely() - before).mean()) > 0.0


def test_actors_play_on_while_the_learner_learns(loaded: TrainingData) -> None:
    network, (one, _) = small_network(loaded, LSTM), orders_of(loaded, LSTM, 0)
    actors = local_actors(network, [one], lambda: small_network(loaded, LSTM))
    actors.start()
    try:
        actors.next()
        calls, pause_s = 0, 0.2
        # A learner that comes rarely: what was played meanwhile is more than it was given.
        while calls <= 0 and pause_s < 20:
            time.sleep(pause_s)
            pause_s *= 1.5
            played, made = actors.next()
            calls = made - int(played.calls.sum())
        assert calls > 0, "no actor went on without the learner"
    finally:
        actors.close()
    assert not multiprocessing.active_children()


def stubborn(loaded: TrainingData) -> ActorCritic:
    """A network that never wants NCCL's own choice."""
    torch.manual_seed(0)
    network = small_network(loaded, PROBING)
    of_network = network.actor.logits

    def logits(hidden: torch.Tensor, context: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = of_network(hidden, context, mask)
        found[:, ABSTAIN_ACTION] -= 50.0
        return found

    network.actor.logits = logits  # type: ignore[method-assign, assignment]
    return network


def test_every_fifth_decision_about_a_called_key_is_a_probe(loaded: TrainingData) -> None:
    network, player = stubborn(loaded), small_player(loaded, PROBING)
    played = [player.play(network) for _ in range(10)]
    action = torch.cat([each.action for each in played])
    is_probe = torch.cat([each.is_probe for each in played])
    assert torch.equal(action == ABSTAIN_ACTION, is_probe)
    is_new = torch.cat([each.seen.earned[:-1] for each in played]) != 0.0
    jobs = player.env.num_envs
    by_job = zip(is_probe.chunk(jobs, dim=1), is_new.chunk(jobs, dim=1), strict=True)
    for its_probes, its_new in by_job:
        probes = its_probes.flatten()[its_new.flatten()]
        assert probes.tolist() == [(index + 1) % EVERY == 0 for index in range(len(probes))]
        assert len(probes) > 3 * EVERY


def test_the_exported_policy_probes_as_the_player_does(loaded: TrainingData) -> None:
    network, player = stubborn(loaded), small_player(loaded, PROBING)
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
    learner, played = trajectory(loaded, replace(PROBING, entropy_start=0.0, entropy_end=0.0))
    before = {name: each.clone() for name, each in learner.network.named_parameters()}

    def moved(part: str) -> bool:
        now = learner.network.named_parameters()
        return any(n.startswith(part) and not torch.equal(before[n], each) for n, each in now)

    learner.learn(replace(played, is_probe=torch.ones_like(played.is_probe)), 1)
    assert moved("critic.")
    assert not moved("actor.head.")
    learner.learn(played, 2)
    assert moved("actor.head.")


def test_validation_chooses_period(loaded: TrainingData, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(PROBING, probe_every=(0, 7, 20))
    pilot = Pilot(orders_of(loaded, recipe, 0), lambda: small_network(loaded, recipe))
    monkeypatch.setattr(pilot, "_log_speedup", {0: 0.1, 7: 0.3, 20: 0.2}.__getitem__)
    actor = small_network(loaded, recipe).actor
    speedup, probe_every = pilot.play(actor)
    assert speedup == pytest.approx(math.exp(0.3))
    assert probe_every == 7
    assert StatefulPolicyModule(actor, 0.0, 0.0).probe_every == 7


def test_speedup_is_of_likely_actions(
    loaded: TrainingData, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(LSTM, probe_every=(0,))
    actors = orders_of(loaded, recipe, 0)
    pilot = Pilot(actors, lambda: small_network(loaded, recipe))
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
        player = Player(actors[0].env(), network.state_units, recipe, 0, is_greedy=True)
        assert set(player.play(network).action.flatten().tolist()) == {config}
        found.append(pilot.play(copy.deepcopy(network.actor))[0])
        assert found[-1] == pilot.play(copy.deepcopy(network.actor))[0]  # the same episodes
    assert found[0] != pytest.approx(found[1], rel=0.01)


def test_fastest_late_one_is_taken(loaded: TrainingData, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe("a3c", [*SMALL, "actors=1", "steps=8", "steps_per_epoch=2"])
    loop = make_loop(loaded, recipe, 0, uses_cost=True)
    speedups, actors = iter([9.0, 9.0, 1.2, 1.1]), list[nn.Module]()

    def play(_: Pilot, actor: nn.Module) -> tuple[float, int]:
        actors.append(copy.deepcopy(actor))
        return next(speedups), 0

    def update(source: ActorLearners, step: int) -> dict[str, float]:
        with torch.no_grad():
            next(source.network.parameters()).fill_(step)
        return {"loss": 0.0}

    monkeypatch.setattr(Pilot, "play", play)
    monkeypatch.setattr(ActorLearners, "start", lambda *_: None)
    monkeypatch.setattr(ActorLearners, "update", update)
    while not loop.is_over:
        loop.run_epoch()
    best = loop.best()
    assert best.step == 6

    def is_best(actor: nn.Module) -> bool:
        weights = actor.state_dict().items()
        return all(torch.equal(best.weights[f"0.{name}"], value) for name, value in weights)

    assert [is_best(actor) for actor in actors[2:]] == [True, False]
