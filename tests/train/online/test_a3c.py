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
from dynamiccl.errors import UnknownName, UserError
from dynamiccl.serve.export import export_artifact
from dynamiccl.train.data import TrainingData, load_data
from dynamiccl.train.fit import fit, resume
from dynamiccl.train.loop import read_state
from dynamiccl.train.online.a3c import ActorLearners, update
from dynamiccl.train.online.actor_critic import SharedRmsProp, filled, loss, returns
from dynamiccl.train.online.actors import Place
from dynamiccl.train.online.make import _network as network_of
from dynamiccl.train.online.make import _orders as orders_of
from dynamiccl.train.online.make import make_loop
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipe import make_recipe
from tests.splits import split_of
from tests.stores import new_store
from tests.train.online.conftest import SWEEP

PLACE = "b300-nvlink:decode:busy-host"
SMALL = (
    f"places={PLACE}",
    *("actors=2", "jobs=2", "num_steps=3", "episode_rounds=4", "hidden_sizes=16"),
    *("steps=8", "steps_per_epoch=4"),
)


def test_a_place_is_a_system_with_work_and_surroundings() -> None:
    place = Place.parse("h100-ib:decode+lora:congested:4x8")
    assert (place.system.name, place.workload.name) == ("h100-ib", "decode+lora")
    assert {call.group.num_ranks for call in place.workload.calls} == {32}
    largest = Place.parse(PLACE).workload.calls[0].group
    assert (largest.num_nodes, largest.ranks_per_node) == (1, 8)


def test_what_is_earned_is_scaled_and_a_key_that_was_not_called_earns_nothing(data: Path) -> None:
    loaded = load_data(data, 0, with_costs=True)
    earned = torch.tensor([-1.0, -math.e, 0.0])
    scales = {
        "log": [0.0, -1.0, 0.0],
        "reference": [-1.0, -math.e, 0.0],
        "clipped": [-1.0, -2.0, 0.0],
    }
    for scale, expected in scales.items():
        recipe = make_recipe("a3c", [*SMALL, f"reward_scale={scale}"])
        player = orders_of(loaded, recipe, 0)[0].player(0)
        assert player._scaled(earned).tolist() == pytest.approx(expected)
    player = orders_of(loaded, make_recipe("a3c", [*SMALL, "reward_scale=raw"]), 0)[0].player(0)
    reference_us = torch.from_numpy(np.tile(player.env.tables.reference_us, 2)).float()
    in_ms = player._scaled(torch.full_like(reference_us, -2.0))
    assert torch.allclose(in_ms, -2.0 * reference_us / 1000.0)


@pytest.mark.parametrize("text", ["", "b300-nvlink:decode", f"{PLACE}:8", f"{PLACE}:1x8:1"])
def test_another_form_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(UserError, match="SYSTEM:WORKLOAD"):
        Place.parse(text)


def test_a_name_that_is_none_is_refused_with_the_choices() -> None:
    with pytest.raises(UnknownName, match="busy-host"):
        Place.parse("b300-nvlink:decode:busy")


def test_sizes_that_are_held_out_are_not_trained_on() -> None:
    place = Place.parse("b300-nvlink:decode+lora:busy-host")
    assert any(split_of(call.size_bytes) != Split.TRAIN for call in place.workload.calls)
    trained = place.for_training.calls
    assert all(split_of(call.size_bytes) == Split.TRAIN for call in trained)
    assert len(trained) == len(place.workload.calls)


def test_returns_are_sums_up_to_the_value_after_the_last() -> None:
    reward = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 1.0]])
    found = returns(reward, torch.tensor([10.0, 0.0]), 0.5)
    assert found[:, 0].tolist() == [1 + 0.5 * (2 + 0.5 * (3 + 5)), 2 + 0.5 * (3 + 5), 8.0]
    assert found[:, 1].tolist() == [0.25, 0.5, 1.0]


def test_a_key_that_was_not_called_earns_what_its_values_say() -> None:
    reward, calls = torch.tensor([[-2.0, 0.0]]), torch.tensor([[3.0, 0.0]])
    value = torch.tensor([[-5.0, -5.0], [-8.0, -8.0]])
    found = filled(reward, value, calls, 0.5)
    assert found.tolist() == [[-2.0, -1.0]]
    assert returns(found, value[1], 0.5)[0, 1] == value[0, 1]


def test_the_loss_moves_towards_what_earned_more_and_towards_the_return() -> None:
    logits = torch.zeros(1, 2, 3, requires_grad=True)
    value = torch.zeros(1, 2, requires_grad=True)
    action, earned = torch.tensor([[1, 2]]), torch.tensor([[1.0, -1.0]])
    log, weight = torch.log_softmax(logits, dim=2), torch.tensor([[1.0, 0.0]])
    loss(log, value, action, earned, earned, weight, 0.0).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert value.grad is not None
    assert logits.grad[0, 0].argmin() == 1  # more of what earned more than the value
    assert not logits.grad[0, 1].any()  # a key that was not called teaches nothing
    assert value.grad.tolist() == [[-1.0, 0.0]]


def test_entropy_draws_to_the_middle_and_masked_actions_have_none() -> None:
    logits = torch.tensor([[[2.0, 0.0, -1e6]]], requires_grad=True)
    log = torch.log_softmax(logits, dim=2)
    zero = torch.zeros(1, 1)
    total = loss(log, zero, torch.tensor([[0]]), zero, zero, torch.ones(1, 1), 1.0)
    total.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad[0, 0, 0] > 0 > logits.grad[0, 0, 1]
    assert logits.grad[0, 0, 2] == 0.0
    p = 1 / (1 + math.exp(-2.0))
    assert -float(total.detach()) == pytest.approx(-(p * math.log(p) + (1 - p) * math.log(1 - p)))


def test_the_statistic_is_the_papers_and_processes_share_it() -> None:
    parameter = torch.zeros(3)
    optimizer = SharedRmsProp([parameter])
    optimizer.step([torch.tensor([1.0, 2.0, 0.0])], 0.5)
    square = 0.01 * np.array([1.0, 4.0, 0.0])
    assert optimizer.squares[0].numpy() == pytest.approx(square)
    expected = -0.5 * np.array([1.0, 2.0, 0.0]) / np.sqrt(square + optimizer.epsilon)
    assert parameter.numpy() == pytest.approx(expected)
    assert optimizer.squares[0].is_shared()  # type: ignore[no-untyped-call]
    own = SharedRmsProp([parameter], shared=False)
    assert not own.squares[0].is_shared()  # type: ignore[no-untyped-call]


class Killed(Exception):
    pass


def test_a_run_that_was_killed_goes_on_and_becomes_an_artifact(data: Path, tmp_path: Path) -> None:
    def kill(*_: object) -> None:
        raise Killed

    uri = new_store(tmp_path)
    recipe = make_recipe("a3c", [*SMALL, "actors=1"])
    with pytest.raises(Killed):
        fit(data, recipe, experiment="x", tracking_uri=uri, seed=0, progress=kill)
    assert not multiprocessing.active_children()
    path = next(tmp_path.rglob("state.pt"))
    state = read_state(path)
    assert state["curves"]["step"] == [4]
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
    # Of updates of three rounds or less, of 192 calls of two jobs.
    assert state["curves"]["simulated_calls"][0] < metrics["simulated_calls"] <= 8 * 3 * 192 * 2
    assert metrics["speedup"] > 0
    assert metrics["validation_speedup"] > 0
    folder = Path(done.run_directory)
    assert (folder / "plots" / "training.png").is_file()
    policy = TorchPolicy.load(folder / "policy")
    before = state["source"]["network"]["actor._trunk.layers.0.weight"]
    assert any(
        value.shape == before.shape and not torch.equal(value, before)
        for value in policy.weights().values()
    )
    # `export_artifact` compares tables, policy and brain.
    assert export_artifact(folder / "policy", tmp_path / "artifact").tables


def test_an_actor_that_dies_ends_the_run_with_its_place(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(
        load_data(data, 0, with_costs=True), make_recipe("a3c", SMALL), 0, uses_cost=True
    )
    monkeypatch.setattr("dynamiccl.train.online.actors._PATIENCE_S", 0.2)
    assert isinstance(loop.source, ActorLearners)
    loop.source.start(0)
    loop._is_started = True
    loop.source.next()
    first, _ = loop.source._processes._processes
    first.kill()  # the other plays on
    first.join()
    with pytest.raises(UserError, match=rf"the actor in '{PLACE}' ended with -9"):
        loop.run_epoch()
    assert not multiprocessing.active_children()


def test_each_actor_may_keep_a_statistic_of_its_own(data: Path) -> None:
    recipe = make_recipe("a3c", [*SMALL, "actors=1", "shared_statistic=false", "seen_decisions=0"])
    loop = make_loop(load_data(data, 0, with_costs=True), recipe, 0, uses_cost=True)
    while not loop.is_over:
        loop.run_epoch()
    assert loop.step == 8
    assert isinstance(loop.source, ActorLearners)
    assert not any(square.any() for square in loop.source.squares)


def test_a_place_that_has_no_config_of_the_data_is_refused(tmp_path: Path) -> None:
    of_nvls = 'algorithms = ["NVLS"]\nnum_channels = [8, 16]\ncollectives'
    simulate(SWEEP.replace("collectives", of_nvls), tmp_path)
    loaded = load_data(tmp_path, 0, with_costs=True)
    with pytest.raises(UserError, match="decode:3"):
        make_loop(loaded, make_recipe("a3c", ["places=decode:3"]), 0, uses_cost=True)
    recipe = make_recipe("a3c", [f"places={PLACE}"])
    make_loop(loaded, recipe, 0, uses_cost=True)
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
    network = network_of(loaded, recipe, uses_cost=False)
    player = orders_of(loaded, recipe, 0)[0].player(0)
    env = player.env
    quiet_us = env.world.quiet_us
    best = torch.from_numpy(np.nanargmin(quiet_us, axis=1)).repeat(env.num_envs)
    gains = np.nanmin(quiet_us, axis=1) < 0.9 * quiet_us[:, 0]
    assert gains.sum() == 2
    differs = torch.from_numpy(gains).repeat(env.num_envs)
    optimizer = SharedRmsProp(list(network.parameters()))
    own, numbers = copy.deepcopy(network), itertools.count(1)

    def probability_of_best() -> float:
        with torch.no_grad():
            log, _, _ = network(player.seen, player.state)
        return float(log[0].exp().gather(1, best.unsqueeze(1))[differs].mean())

    assert probability_of_best() < 0.5
    updates = [update(player, network, own, optimizer, lambda: next(numbers)) for _ in range(40)]
    assert probability_of_best() > 0.8
    assert updates[-1].number == 40
    assert np.mean([each.speedup for each in updates[-5:]]) > 1.1


def test_systems_of_the_data_that_no_actor_plays_on_are_told(
    loaded: TrainingData, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = make_recipe("a3c", SMALL)
    orders_of(loaded, recipe, 0)
    assert not caplog.records
    other = loaded.frame.with_columns(system=pl.lit("my-cluster"))
    orders_of(replace(loaded, frame=pl.concat([loaded.frame, other])), recipe, 0)
    [record] = caplog.records
    assert "no actor plays on my-cluster, which" in record.message
    assert "but on b300-nvlink:" in record.message
