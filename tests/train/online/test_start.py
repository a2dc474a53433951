"""Actors that begin with a network that learned from data."""

from pathlib import Path

import pytest
import torch

from dynamiccl.datasets.features import Observations
from dynamiccl.errors import MissingPath, UserError
from dynamiccl.train.data import load_data
from dynamiccl.train.fit import fit
from dynamiccl.train.online.actor_critic import State
from dynamiccl.train.online.make import _network, _orders
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipes import make_recipe
from tests.stores import new_store
from tests.train.online.test_a3c import SMALL

OFFLINE = ("steps=40", "steps_per_epoch=20", "hidden_sizes=16", "num_members=1", "caution=margin")


@pytest.fixture(scope="module")
def offline(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offline")
    recipe = make_recipe("ddqn-actions", OFFLINE)
    done = fit(data, recipe, experiment="x", tracking_uri=new_store(folder), seed=0)
    return Path(done.run_directory)


@pytest.mark.parametrize("uses_cost", [False, True])
def test_the_first_actions_are_those_that_the_offline_network_prefers(
    data: Path, offline: Path, uses_cost: bool
) -> None:
    recipe = make_recipe("a3c", [*SMALL, f"start={offline}"])
    loaded = load_data(data, 0, with_costs=True)
    network = _network(loaded, recipe, uses_cost=uses_cost)
    player = _orders(loaded, recipe, 0)[0].player(0)
    seen = player.seen
    with torch.no_grad():
        log, _, _ = network(seen, State.new(2, 0))
    policy = TorchPolicy.load(offline / "policy")
    values = policy.values(
        Observations(seen.window[0].numpy(), seen.context[0].numpy()), seen.mask[0].numpy() > 0.5
    )
    assert torch.equal(log[0].argmax(dim=1), torch.from_numpy(values).argmax(dim=1))
    plain = _network(loaded, make_recipe("a3c", SMALL), uses_cost=True)
    with torch.no_grad():
        other, _, _ = plain(seen, State.new(2, 0))
    assert log.exp().max() > 2 * other.exp().max()  # it means what it prefers


def test_networks_of_another_form_and_what_is_no_policy_are_refused(
    data: Path, offline: Path, tmp_path: Path
) -> None:
    loaded = load_data(data, 0, with_costs=True)
    larger = make_recipe("a3c", [*SMALL, "hidden_sizes=32", f"start={offline}"])
    with pytest.raises(UserError, match=r"another form \(size mismatch"):
        _network(loaded, larger, uses_cost=True)
    nowhere = make_recipe("a3c", [*SMALL, f"start={tmp_path}"])
    with pytest.raises(MissingPath, match="--set start="):
        _network(loaded, nowhere, uses_cost=True)
    with pytest.raises(UserError, match="start=there is for algorithms that play"):
        make_recipe("dqn", ["start=there"])
