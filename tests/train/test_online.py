"""A3C and IMPALA: actors, V-trace, probes, runs up to the artifact, and what the gate keeps out."""

import copy
import itertools
import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch import multiprocessing, nn

from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read
from dynamiccl.errors import UserError
from dynamiccl.evaluate.evidence import Verdict
from dynamiccl.evaluate.gate import Gated, pass_gate
from dynamiccl.serve.export import export_artifact
from dynamiccl.simulator import systems
from dynamiccl.train.data import TrainingData, load_data
from dynamiccl.train.environment import Place
from dynamiccl.train.fit import fit, resume
from dynamiccl.train.loop import read_state
from dynamiccl.train.networks import StatefulTrunk
from dynamiccl.train.online import Pilot, a3c, make_loop, network_of, orders_of
from dynamiccl.train.online.a3c import ActorCritic, ActorLearners, Player, Trajectory
from dynamiccl.train.online.impala import Learner, local_actors, vtrace
from dynamiccl.train.policy import StatefulPolicyModule, TorchPolicy
from dynamiccl.train.recipe import Recipe, make_recipe
from tests.rows import split_of
from tests.stores import new_store

SWEEP = """
name = "quiet"
system = "b300-nvlink"
collectives = ["AllReduce"]
groups = [{ num_nodes = 1, ranks_per_node = 8 }]
sizes = { min = "64K", max = "64M" }
cycles = 2
[simulator]
system = "b300-nvlink"
seed = 0
"""
PLACE = "b300-nvlink:decode:busy-host"
SMALL = (
    f"places={PLACE}",
    *("actors=2", "jobs=2", "num_steps=3", "episode_rounds=4", "hidden_sizes=16"),
    *("steps=8", "steps_per_epoch=4"),
)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("online") / "data"
    simulate(SWEEP, folder)
    return folder


@pytest.fixture(scope="session")
def loaded(data: Path) -> TrainingData:
    return load_data(data, 0, with_costs=True)


def small_network(loaded: TrainingData, recipe: Recipe) -> ActorCritic:
    return network_of(loaded, recipe, uses_cost=True)


def small_player(loaded: TrainingData, recipe: Recipe) -> Player:
    return orders_of(loaded, recipe, 0)[0].player(recipe.state_units)


def test_a_place_is_a_system_with_work_of_training_sizes_and_surroundings() -> None:
    place = Place.parse("h100-ib:decode+lora:congested:4x8")
    assert (place.system.name, place.workload.name) == ("h100-ib", "decode+lora")
    assert {call.group.num_ranks for call in place.workload.calls} == {32}
    largest = Place.parse(PLACE).workload.calls[0].group
    assert (largest.num_nodes, largest.ranks_per_node) == (1, 8)
    # Sizes that are held out are not trained on.
    assert any(split_of(call.size_bytes) != Split.TRAIN for call in place.workload.calls)
    trained = place.for_training.calls
    assert all(split_of(call.size_bytes) == Split.TRAIN for call in trained)
    assert len(trained) == len(place.workload.calls)


def test_minus_ln_of_time_is_earned_and_without_a_call_what_the_values_say() -> None:
    earned = a3c._scaled(torch.tensor([-1.0, -math.e, 0.0]))
    assert earned.tolist() == pytest.approx([0.0, -1.0, 0.0])
    reward, calls = torch.tensor([[-2.0, 0.0]]), torch.tensor([[3.0, 0.0]])
    value = torch.tensor([[-5.0, -5.0], [-8.0, -8.0]])
    found = a3c.filled(reward, value, calls, 0.5)
    assert found.tolist() == [[-2.0, -1.0]]
    assert a3c.returns(found, value[1], 0.5)[0, 1] == value[0, 1]


def test_the_loss_moves_towards_what_earned_more_and_entropy_to_the_middle() -> None:
    logits = torch.zeros(1, 2, 3, requires_grad=True)
    value = torch.zeros(1, 2, requires_grad=True)
    action, earned = torch.tensor([[1, 2]]), torch.tensor([[1.0, -1.0]])
    log, weight = torch.log_softmax(logits, dim=2), torch.tensor([[1.0, 0.0]])
    a3c.loss(log, value, action, earned, earned, weight, 0.0).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert value.grad is not None
    assert logits.grad[0, 0].argmin() == 1  # more of what earned more than the value
    assert not logits.grad[0, 1].any()  # a key that was not called teaches nothing
    assert value.grad.tolist() == [[-1.0, 0.0]]

    logits = torch.tensor([[[2.0, 0.0, -1e6]]], requires_grad=True)  # the last one is masked
    log, zero = torch.log_softmax(logits, dim=2), torch.zeros(1, 1)
    total = a3c.loss(log, zero, torch.tensor([[0]]), zero, zero, torch.ones(1, 1), 1.0)
    total.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad[0, 0, 0] > 0 > logits.grad[0, 0, 1]
    assert logits.grad[0, 0, 2] == 0.0
    p = 1 / (1 + math.exp(-2.0))
    assert -float(total.detach()) == pytest.approx(-(p * math.log(p) + (1 - p) * math.log(1 - p)))


def test_the_statistic_is_the_papers_and_processes_share_it() -> None:
    parameter = torch.zeros(3)
    optimizer = a3c.SharedRmsProp([parameter])
    optimizer.step([torch.tensor([1.0, 2.0, 0.0])], 0.5)
    square = 0.01 * np.array([1.0, 4.0, 0.0])
    assert optimizer.squares[0].numpy() == pytest.approx(square)
    expected = -0.5 * np.array([1.0, 2.0, 0.0]) / np.sqrt(square + 1e-5)
    assert parameter.numpy() == pytest.approx(expected)
    assert optimizer.squares[0].is_shared()


#: Of each recipe: settings, and what its policy keeps for each job (the LSTM's, and a count).
KILLED = {"a3c": (("seen_decisions=0",), 0), "impala-lstm": (("state_units=8", "probe_every=5"), 9)}


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_run_goes_on_to_an_artifact(name: str, data: Path, tmp_path: Path) -> None:
    def kill(*_: object) -> None:
        raise InterruptedError

    uri, (settings, units) = new_store(tmp_path), KILLED[name]
    recipe = make_recipe(name, [*SMALL, "actors=1", *settings])
    with pytest.raises(InterruptedError):
        fit(data, recipe, experiment="x", tracking_uri=uri, seed=0, progress=kill)
    assert not multiprocessing.active_children()
    path = next(tmp_path.rglob("state.pt"))
    state = read_state(path)
    assert state["step"] == 4
    assert any(square.any() for square in state["source"]["squares"])

    told: list[tuple[int, dict[str, float]]] = []
    done = resume(
        data,
        path.parents[1].name,
        tracking_uri=uri,
        progress=lambda step, _steps, metrics: told.append((step, metrics)),
    )
    [(step, metrics)] = told
    assert step == done.steps == 8
    assert state["latest"]["simulated_calls"] < metrics["simulated_calls"]
    assert min(metrics[each] for each in ("speedup", "validation_speedup", "train_wall_s")) > 0
    assert metrics["probe_every"] == 5 * bool(units)
    if name == "a3c":
        # Of updates of three rounds or less, of 192 calls of two jobs.
        assert metrics["simulated_calls"] <= 8 * 3 * 192 * 2
    folder = Path(done.run_directory)
    policy = TorchPolicy.load(folder / "policy")
    assert policy.state_units == units
    before = state["source"]["network"]
    before = next(each for key, each in before.items() if key.endswith("layers.0.weight"))
    after = [each for each in policy._module.state_dict().values() if each.shape == before.shape]
    assert any(not torch.equal(each, before) for each in after)
    # `export_artifact` compares tables, policy and brain.
    assert export_artifact(folder / "policy", tmp_path / "artifact").tables


def test_a_dead_actor_is_named(loaded: TrainingData, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop(loaded, make_recipe("a3c", SMALL), 0, uses_cost=True)
    monkeypatch.setattr("dynamiccl.train.online.a3c._PATIENCE_S", 0.2)
    assert isinstance(loop.source, a3c.ActorLearners)
    loop.source.start(0)
    loop.source.update(1)
    first, _ = loop.source.actors._processes
    first.kill()  # the other plays on
    first.join()
    with pytest.raises(UserError, match=rf"the actor in '{PLACE}' ended with -9"):
        loop.run_epoch()
    assert not multiprocessing.active_children()


def test_a_place_that_has_no_config_of_the_data_is_refused(tmp_path: Path) -> None:
    of_nvls = 'algorithms = ["NVLS"]\nnum_channels = [8, 16]\ncollectives'
    simulate(SWEEP.replace("collectives", of_nvls), tmp_path)
    loaded = load_data(tmp_path, 0, with_costs=True)
    with pytest.raises(UserError, match="decode:3"):
        make_loop(loaded, make_recipe("a3c", ["places=decode:3"]), 0, uses_cost=True)
    make_loop(loaded, make_recipe("a3c", [f"places={PLACE}"]), 0, uses_cost=True)
    recipe = make_recipe("a3c", ["places=gb10-roce:lora:quiet"])
    with pytest.raises(UserError, match="nothing that gb10-roce:lora:quiet has"):
        make_loop(loaded, recipe, 0, uses_cost=True)


def test_an_actor_learns_which_config_is_faster(tmp_path: Path) -> None:
    text = SWEEP.replace("b300-nvlink", "gb10-roce")
    text = text.replace("num_nodes = 1, ranks_per_node = 8", "num_nodes = 4, ranks_per_node = 1")
    simulate(text, tmp_path)
    settings = ("places=gb10-roce:lora:quiet", "num_steps=8", "gamma=0.5", "learning_rate=0.01")
    recipe = make_recipe("a3c", [*SMALL, *settings, "episode_rounds=50", "steps=40"])
    loaded = load_data(tmp_path, 0, with_costs=True)
    network, player = small_network(loaded, recipe), small_player(loaded, recipe)
    env = player.env
    quiet_us = env.world.quiet_us
    best = torch.from_numpy(np.nanargmin(quiet_us, axis=1)).repeat(env.num_envs)
    gains = np.nanmin(quiet_us, axis=1) < 0.9 * quiet_us[:, 0]
    assert gains.sum() == 2
    differs = torch.from_numpy(gains).repeat(env.num_envs)
    optimizer = a3c.SharedRmsProp(list(network.parameters()))
    own, count = copy.deepcopy(network), itertools.count(1).__next__

    def probability_of_best() -> float:
        with torch.no_grad():
            log, _, _ = network(player.seen, player.state)
        return float(log[0].exp().gather(1, best.unsqueeze(1))[differs].mean())

    assert probability_of_best() < 0.5
    updates = [a3c.update(player, network, own, optimizer, count) for _ in range(40)]
    assert probability_of_best() > 0.8
    assert np.mean([speedup for _, speedup, _ in updates[-5:]]) > 1.1


def test_unplayed_systems_are_told(loaded: TrainingData, caplog: pytest.LogCaptureFixture) -> None:
    recipe = make_recipe("a3c", SMALL)
    orders_of(loaded, recipe, 0)
    assert not caplog.records
    other = loaded.frame.with_columns(system=pl.lit("my-cluster"))
    orders_of(replace(loaded, frame=pl.concat([loaded.frame, other])), recipe, 0)
    [record] = caplog.records
    assert "no actor plays on my-cluster, which" in record.message
    assert "but on b300-nvlink:" in record.message


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
    monkeypatch.setattr(ActorLearners, "update", update)
    while not loop.is_over:
        loop.run_epoch()
    best = loop.best()
    assert best["step"] == 6

    def is_best(actor: nn.Module) -> bool:
        weights = actor.state_dict().items()
        return all(torch.equal(best["weights"][f"0.{name}"], value) for name, value in weights)

    assert [is_best(actor) for actor in actors[2:]] == [True, False]


OFFLINE = ("steps=400", "steps_per_epoch=200", "hidden_sizes=32", "num_members=1")


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A system file whose hops of Tree/Simple are a hundred times too fast."""
    shipped = Path(systems.__file__).with_name("systems") / "b300-nvlink.toml"
    text = shipped.read_text(encoding="utf-8")
    assert text.count("value = 28.108") == 1
    path = tmp_path_factory.mktemp("wrong") / "wrong.toml"
    path.write_text(text.replace("value = 28.108", "value = 0.2"), encoding="utf-8")
    return path


def _fresh(policy: TorchPolicy, system: str, folder: Path) -> Gated:
    text = SWEEP.replace('[simulator]\nsystem = "b300-nvlink"\nseed = 0', "[simulator]")
    text = text.replace('"quiet"', '"fresh"').replace("cycles = 2", "cycles = 8")
    simulate(f'{text}system = "{system}"\nseed = 7\n', folder)
    return pass_gate(policy, read(folder))


def test_what_only_its_simulator_rewards_does_not_pass(wrong: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    simulate(SWEEP.replace('system = "b300-nvlink"\nseed', f'system = "{wrong}"\nseed'), data)
    uri = new_store(tmp_path)
    offline = make_recipe("ddqn-dueling", OFFLINE)
    done = fit(data, offline, experiment="x", tracking_uri=uri, seed=0)
    policy = TorchPolicy.load(Path(done.run_directory) / "policy")

    in_simulator = _fresh(policy, str(wrong), tmp_path / "as-trained").to_json()["counts"]
    in_reality = _fresh(policy, "b300-nvlink", tmp_path / "real")
    assert in_simulator[Verdict.PASSED] > 5
    wanted = [cell for cell in in_reality.cells if cell.verdict is not Verdict.ABSTAINS]
    assert {cell.config for cell in wanted} == {"Tree/Simple"}
    assert {cell.verdict for cell in wanted} == {Verdict.REFUSED}
