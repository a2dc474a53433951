"""Actors that learn in simulated worlds: their parts, and a run from recipe to artifact."""

import copy
import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch import multiprocessing

from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.splits import Split
from dynamiccl.errors import UserError
from dynamiccl.serve.export import export_artifact
from dynamiccl.train.data import TrainingData, load_data
from dynamiccl.train.fit import fit, resume
from dynamiccl.train.loop import read_state
from dynamiccl.train.online import Place, a3c, make_loop, orders_of
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipe import make_recipe
from tests.rows import split_of
from tests.stores import new_store
from tests.train.online.conftest import PLACE, SMALL, SWEEP, small_network, small_player


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
    loop._is_started = True
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
    own, numbers = copy.deepcopy(network), itertools.count(1)

    def probability_of_best() -> float:
        with torch.no_grad():
            log, _, _ = network(player.seen, player.state)
        return float(log[0].exp().gather(1, best.unsqueeze(1))[differs].mean())

    assert probability_of_best() < 0.5
    updates = [
        a3c.update(player, network, own, optimizer, lambda: next(numbers)) for _ in range(40)
    ]
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
