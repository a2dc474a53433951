"""IMPALA: V-trace, actors that never wait for the learner, and a run from recipe to artifact."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import multiprocessing

from dynamiccl.errors import UserError
from dynamiccl.serve.export import export_artifact
from dynamiccl.train.data import TrainingData
from dynamiccl.train.fit import fit, resume
from dynamiccl.train.online.actor_critic import returns
from dynamiccl.train.online.actors import Trajectory
from dynamiccl.train.online.impala import Learner, LocalActors, vtrace
from dynamiccl.train.online.make import _network, _orders
from dynamiccl.train.policy import TorchPolicy, load_script
from dynamiccl.train.recipe import Recipe, make_recipe
from tests.stores import new_store
from tests.train.online.test_a3c import SMALL, Killed

LSTM = make_recipe("impala-lstm", [*SMALL, "state_units=8"])


def trajectory(loaded: TrainingData, recipe: Recipe = LSTM) -> tuple[Learner, Trajectory]:
    """A learner, and one trajectory that was played under its weights."""
    torch.manual_seed(0)
    network = _network(loaded, recipe, uses_cost=True)
    played = _orders(loaded, recipe, 0)[0].player(recipe.state_units).play(network)
    actors = LocalActors(network, [], lambda: network)
    return Learner(network, actors, recipe), played


def test_on_policy_targets_are_n_step_returns() -> None:
    torch.manual_seed(1)
    reward, value = torch.randn(5, 3), torch.randn(6, 3)
    target, advantage = vtrace(torch.zeros(5, 3), reward, value, 0.9, rho_most=1.0, c_most=1.0)
    expected = returns(reward, value[-1], 0.9)
    assert torch.allclose(target, expected, atol=1e-6)
    assert torch.allclose(advantage, expected - value[:-1], atol=1e-6)


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
    found, advantage = vtrace(
        torch.from_numpy(np.log(ratio))[:, None],
        torch.from_numpy(reward)[:, None],
        torch.from_numpy(value)[:, None],
        gamma,
        rho_most=rho_most,
        c_most=c_most,
    )
    assert found[:, 0].numpy() == pytest.approx(np.array(expected))
    after = np.append(expected[1:], value[-1])
    expected_advantage = rho * (reward + gamma * after - value[:-1])
    assert advantage[:, 0].numpy() == pytest.approx(expected_advantage)


def test_a_trajectory_carries_the_state_at_its_start_and_what_was_likely(
    loaded: TrainingData,
) -> None:
    recipe = make_recipe("impala-lstm", [*SMALL, "state_units=8", "episode_rounds=50"])
    network = _network(loaded, recipe, uses_cost=True)
    player = _orders(loaded, recipe, 0)[0].player(recipe.state_units)
    first, second = player.play(network), player.play(network)
    assert not first.state.h.any()  # an episode begins
    assert second.state.h.any()
    with torch.no_grad():
        log, _, after = network(first.seen, first.state)
    taken = log[:-1].gather(2, first.action.unsqueeze(2)).squeeze(2)
    assert torch.allclose(taken, first.log_probability, atol=1e-5)
    # The state after the rounds, without the look at what follows them, is the next one's first.
    with torch.no_grad():
        rounds = type(first.seen)(*(part[:-1] for part in first.seen))
        *_, after = network(rounds, first.state)
    assert torch.allclose(after.h, second.state.h, atol=1e-5)
    assert second.speedup == second.default_us / second.true_us


def test_a_state_begins_at_zero_with_every_episode(loaded: TrainingData) -> None:
    recipe = make_recipe("impala-lstm", [*SMALL, "state_units=8", "num_steps=4"])
    network = _network(loaded, recipe, uses_cost=True)
    player = _orders(loaded, recipe, 0)[0].player(recipe.state_units)
    for _ in range(2):  # of four rounds each
        assert not player.play(network).state.h.any()


def test_the_learner_moves_towards_what_earned_more_than_expected(loaded: TrainingData) -> None:
    learner, played = trajectory(loaded)
    with torch.no_grad():
        log, value, _ = learner.network(played.seen, played.state)
    before = log[:-1].gather(2, played.action.unsqueeze(2)).squeeze(2)
    better = played.reward * 0.0 + 5.0 + float(value.max())
    played = replace(played, reward=better)
    for number in range(1, 4):
        learner.learn(played, number)
    with torch.no_grad():
        log, _, _ = learner.network(played.seen, played.state)
    after = log[:-1].gather(2, played.action.unsqueeze(2)).squeeze(2)
    called = played.calls > 0
    assert float((after - before)[called].mean()) > 0.0


def test_actors_play_on_while_the_learner_learns(loaded: TrainingData) -> None:
    network = _network(loaded, LSTM, uses_cost=True)

    def make() -> object:
        return _network(loaded, LSTM, uses_cost=True)

    one, _ = _orders(loaded, LSTM, 0)
    actors = LocalActors(network, [one], make)  # type: ignore[arg-type]
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


def test_a_run_that_was_killed_goes_on_and_its_artifact_has_a_state(
    data: Path, tmp_path: Path
) -> None:
    def kill(*_: object) -> None:
        raise Killed

    uri = new_store(tmp_path)
    settings = [*SMALL, "state_units=8", "actors=1", "probe_every=5"]
    recipe = make_recipe("impala-lstm", settings)
    with pytest.raises(Killed):
        fit(data, recipe, experiment="x", tracking_uri=uri, seed=0, progress=kill)
    assert not multiprocessing.active_children()
    path = next(tmp_path.rglob("state.pt"))
    metrics: list[dict[str, float]] = []
    done = resume(
        data,
        path.parents[1].name,
        tracking_uri=uri,
        progress=lambda _step, _steps, found: metrics.append(found),
    )
    assert done.steps == 8
    assert metrics[-1]["simulated_calls"] > 0
    assert metrics[-1]["train_wall_s"] > 0
    assert 0 < metrics[-1]["learner_utilisation"] <= 1
    folder = Path(done.run_directory) / "policy"
    assert TorchPolicy.load(folder).state_units == 9  # the LSTM's, and the count to a probe
    assert int(load_script(folder / "policy.pt").probe_every) == 5
    assert {each["probe_every"] for each in metrics} == {5}
    # `export_artifact` compares tables, policy and brain.
    assert export_artifact(folder, tmp_path / "artifact").tables


def test_a_cluster_is_for_algorithms_that_play(data: Path) -> None:
    for recipe in (make_recipe("a3c", SMALL), make_recipe("ddqn-dueling")):
        with pytest.raises(UserError, match="take 'impala-lstm', or leave --ray out"):
            fit(data, recipe, experiment="x", tracking_uri="sqlite:///x", seed=0, ray="auto")
