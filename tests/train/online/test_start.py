"""Networks that begin with those of another run: of one that learned from data, or by playing."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dynamiccl.datasets.features import Observations
from dynamiccl.errors import MissingPath, UserError
from dynamiccl.train.data import TrainingData
from dynamiccl.train.fit import fit
from dynamiccl.train.networks import SHARPNESS, ActionInputs
from dynamiccl.train.offline import make_algorithm
from dynamiccl.train.online import network_of
from dynamiccl.train.online.a3c import ActorCritic, State
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipe import make_recipe
from tests.stores import new_store
from tests.train.online.conftest import SMALL, small_network, small_player

OFFLINE = ("steps=40", "steps_per_epoch=20", "hidden_sizes=16", "num_members=1")


def _trained(data: Path, folder: Path, name: str, settings: list[str]) -> Path:
    recipe = make_recipe(name, settings)
    done = fit(data, recipe, experiment="x", tracking_uri=new_store(folder), seed=0)
    return Path(done.run_directory)


@pytest.fixture(scope="module")
def offline(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _trained(data, tmp_path_factory.mktemp("offline"), "ddqn-dueling", [*OFFLINE])


@pytest.fixture(scope="module")
def online(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _trained(data, tmp_path_factory.mktemp("online"), "a3c", [*SMALL, "actors=1"])


def _log_odds(network: ActorCritic, loaded: TrainingData) -> tuple[Observations, np.ndarray]:
    """Initial observations of a player, and the log probabilities there."""
    seen = small_player(loaded, make_recipe("a3c", SMALL)).seen
    with torch.no_grad():
        log, _, _ = network(seen, State.new(2, 0))
    mask = seen.mask[0].numpy() > 0.5
    found = np.where(mask, log[0].numpy(), -np.inf)
    return Observations(seen.window[0].numpy(), seen.context[0].numpy()), found


def _values(run: Path, seen: Observations, log_odds: np.ndarray) -> np.ndarray:
    return TorchPolicy.load(run / "policy").values(seen, np.isfinite(log_odds))


@pytest.mark.parametrize("uses_cost", [False, True])
def test_the_first_actions_are_those_that_the_offline_network_prefers(
    loaded: TrainingData, offline: Path, uses_cost: bool
) -> None:
    recipe = make_recipe("a3c", [*SMALL, f"start={offline}"])
    seen, log = _log_odds(network_of(loaded, recipe, uses_cost=uses_cost), loaded)
    assert np.array_equal(log.argmax(axis=1), _values(offline, seen, log).argmax(axis=1))
    plain = small_network(loaded, make_recipe("a3c", SMALL))
    _, other = _log_odds(plain, loaded)
    assert np.exp(log).max() > 2 * np.exp(other).max()  # it means what it prefers


def test_actors_that_go_on_elsewhere_begin_with_the_odds_that_they_had(
    loaded: TrainingData, online: Path
) -> None:
    recipe = make_recipe("a3c", [*SMALL, f"start={online}"])
    network = small_network(loaded, recipe)
    seen, log = _log_odds(network, loaded)
    assert network.actor.head.sharpness == 1.0
    values = _values(online, seen, log)  # -exp(-log odds), but for a constant
    odds = -np.log(-np.where(np.isfinite(log), values, -1.0))
    assert np.allclose(
        np.where(np.isfinite(log), log - log[:, :1], 0.0),
        np.where(np.isfinite(log), odds - odds[:, :1], 0.0),
        atol=1e-4,
    )


def test_a_q_network_begins_with_what_actors_prefer_as_times(
    loaded: TrainingData, online: Path
) -> None:
    recipe = make_recipe("ddqn-dueling", [*OFFLINE, f"start={online}"])
    actor = network_of(loaded, make_recipe("a3c", [*SMALL, f"start={online}"]), uses_cost=False)
    actor.actor.head.uses_cost = False
    seen, log = _log_odds(actor, loaded)
    inputs = ActionInputs(loaded.catalogue.configs, loaded.cost_start, uses_cost=False)
    algorithm = make_algorithm(recipe, *loaded.sources(recipe), actions=inputs)
    targets = algorithm.impl.modules.targ_q_funcs
    for network in (*algorithm.impl.modules.q_funcs, *targets):
        network.head.uses_cost = False
        with torch.no_grad():
            window, context = torch.from_numpy(seen.window), torch.from_numpy(seen.context)
            z = network(window, context).numpy()
        known = np.isfinite(log) & (z < 4.0)  # what NCCL does not have is 8
        expected = (log - log[:, :1]) / -SHARPNESS
        assert np.allclose(
            np.where(known, z - z[:, :1], 0.0), np.where(known, expected, 0.0), atol=1e-5
        )
        assert np.abs(np.where(known, expected, 0.0)).max() > 1e-4  # there is something to keep


def test_networks_of_another_form_and_what_is_no_policy_are_refused(
    loaded: TrainingData, offline: Path, tmp_path: Path
) -> None:
    larger = make_recipe("a3c", [*SMALL, "hidden_sizes=32", f"start={offline}"])
    with pytest.raises(UserError, match=r"another form \(size mismatch"):
        small_network(loaded, larger)
    nowhere = make_recipe("a3c", [*SMALL, f"start={tmp_path}"])
    with pytest.raises(MissingPath, match="--set start="):
        small_network(loaded, nowhere)
