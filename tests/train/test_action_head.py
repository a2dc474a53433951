"""The head with actions as inputs: what is known of an action, at first and by NCCL's costs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import polars as pl
import pytest
import torch
from mlflow import MlflowClient

from dynamiccl.datasets.cells import task_grid
from dynamiccl.datasets.features import CONTEXT_COLUMN, FEATURES, NUM_CELLS, log_costs
from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.splits import Split
from dynamiccl.nccl import ABSTAIN, NUM_PROTOCOLS, Algorithm, Config, Protocol
from dynamiccl.train.algorithms import make_algorithm, members_of
from dynamiccl.train.data import TrainingData, base_residuals, load_data
from dynamiccl.train.fit import fit
from dynamiccl.train.heads import (
    ACTION_FEATURES,
    LOG_COST,
    ActionFeatures,
    ActionHead,
    ActionInputs,
    Member,
)
from dynamiccl.train.policy import TorchPolicy, forward, script
from dynamiccl.train.policy_module import PolicyModule
from dynamiccl.train.recipes import make_recipe
from dynamiccl.train.replay import CostDropout, Replay
from tests.stores import new_store

RING, TREE, NVLS = (
    Config(Algorithm.Ring, Protocol.LL),
    Config(Algorithm.Tree, Protocol.Simple),
    Config(Algorithm.NVLS, Protocol.Simple),
)
INPUTS = ActionInputs((ABSTAIN, RING, TREE, NVLS), len(FEATURES), uses_cost=True)
HIDDEN = 5


CONFIGS = (
    ABSTAIN,
    Config(Algorithm.Ring, Protocol.LL),
    Config(Algorithm.Tree, None),
    Config(Algorithm.NVLS, Protocol.Simple, 8),
)


FEW = ["steps=20", "steps_per_epoch=10", "num_members=2", "hidden_sizes=16"]


def context(costs_us: dict[Config, float]) -> torch.Tensor:
    made = torch.zeros(2, len(FEATURES) + NUM_CELLS)
    for config, cost_us in costs_us.items():
        assert config.algorithm is not None
        assert config.protocol is not None
        cell = config.algorithm * NUM_PROTOCOLS + config.protocol
        made[:, len(FEATURES) + cell] = float(np.log(cost_us))
    return made


def untaught(inputs: ActionInputs) -> ActionHead:
    """A head whose layers say nothing."""
    head = ActionHead(HIDDEN, inputs)
    for layer in (head.out, head.value):
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    return head


def test_before_it_has_learned_it_says_what_nccl_says() -> None:
    hidden, seen = torch.randn(2, HIDDEN), context({RING: 20.0, TREE: 40.0})
    z = untaught(INPUTS)(hidden, seen)
    wanted = torch.tensor([0.0, 0.0, np.log(2.0)], dtype=torch.float32)
    torch.testing.assert_close(z[:, :3], wanted.expand(2, 3))
    assert (z[:, 3] == 8.0).all()  # NCCL does not take it
    without = untaught(replace(INPUTS, uses_cost=False))(hidden, seen)
    assert (without[:, :3] == 0.0).all()
    assert (untaught(INPUTS)(hidden, context({})) == 0.0).all()  # nothing is known of costs


def test_what_is_learned_of_one_config_moves_its_neighbours_too() -> None:
    torch.manual_seed(0)
    few, many, tree = (
        Config(Algorithm.Ring, Protocol.Simple, 8),
        Config(Algorithm.Ring, Protocol.Simple, 16),
        Config(Algorithm.Tree, Protocol.LL, 8),
    )
    head = ActionHead(HIDDEN, ActionInputs((ABSTAIN, few, many, tree), -1, uses_cost=True))
    hidden, seen = torch.randn(2, HIDDEN), torch.zeros(2, len(FEATURES))
    before = head(hidden, seen).detach()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        head(hidden, seen)[:, 1].sum().backward()
        optimizer.step()
    moved = (head(hidden, seen).detach() - before).mean(dim=0)
    assert moved[1] < 0.0
    assert abs(moved[2] - moved[1]) < 0.5 * abs(moved[3] - moved[1])


def test_inputs_are_plain_data_in_d3rlpys_files() -> None:
    chunk = Config(Algorithm.Ring, Protocol.Simple, 4, 1 << 20)
    inputs = replace(INPUTS, configs=(*INPUTS.configs, chunk))
    read = ActionInputs.from_json(json.loads(json.dumps(inputs.to_json())))
    assert tuple(read.configs) == tuple(inputs.configs)
    assert (read.cost_start, read.uses_cost) == (inputs.cost_start, True)


def test_one_action_alone_is_what_it_is_among_all() -> None:
    torch.manual_seed(0)
    head, hidden, seen = ActionHead(HIDDEN, INPUTS), torch.randn(2, HIDDEN), context({RING: 20.0})
    for action in range(4):
        action_column = torch.tensor([[action], [3 - action]])
        wanted = head(hidden, seen).gather(1, action_column)
        torch.testing.assert_close(head.taken(hidden, seen, action_column), wanted)


def test_imitation_with_actions_as_inputs_does_what_the_data_did(data_dir: Path) -> None:
    data = load_data(data_dir, 0, with_costs=True)
    steps = data.training.steps
    taken = int(np.flatnonzero((steps.tasks.mask > 0.5).all(axis=0))[-1])
    steps = replace(steps, action=np.full_like(steps.action, taken))
    recipe = make_recipe("bc", ["action_inputs=true", "hidden_sizes=16", "learning_rate=0.02"])
    actions = ActionInputs(data.catalogue.configs, data.cost_start, uses_cost=True)
    algorithm = make_algorithm(recipe, steps, actions=actions)
    (imitator,) = members_of(algorithm)
    assert isinstance(imitator.head, ActionHead)
    replay = Replay(steps, 64, seed=0)
    for _ in range(80):
        algorithm.update(replay.sample())
    module = PolicyModule([cast(Member, imitator)], 0.0, 0.0, is_unanimous=False).eval()
    chosen, _ = forward(module, data.observations, data.validation.mask)
    assert taken > 0
    assert (chosen == taken).mean() > 0.9


def test_a_run_beats_the_default_and_its_policy_is_whole(data_dir: Path, tmp_path: Path) -> None:
    few = ["steps=200", "steps_per_epoch=100", "num_members=2", "learning_rate=0.005"]
    recipe = make_recipe("ddqn-actions", [*few])
    done = fit(data_dir, recipe, experiment="x", tracking_uri=new_store(tmp_path), seed=0)
    assert done.validation_regret < done.validation_default_regret / 2
    policy = Path(done.run_directory) / "policy"
    assert Manifest.read(policy).cost_table() is not None
    data = load_data(data_dir, 0, with_costs=True)
    actions = TorchPolicy.load(policy).act(data.observations, data.validation.mask)
    assert data.mean_over_groups(actions) == pytest.approx(done.validation_regret)


def features(costs: dict[tuple[Algorithm, Protocol], float]) -> dict[str, list[float]]:
    context = torch.zeros(1, len(FEATURES) + NUM_CELLS)
    context[0, CONTEXT_COLUMN["log2_size"]] = 20.0
    for (algorithm, protocol), cost_us in costs.items():
        context[0, len(FEATURES) + algorithm * NUM_PROTOCOLS + protocol] = float(np.log(cost_us))
    module = ActionFeatures(CONFIGS, len(FEATURES))
    found = module(context)
    assert torch.equal(found, script(module)(context))
    assert found.shape == (1, len(CONFIGS), len(ACTION_FEATURES))
    return {name: found[0, :, i].tolist() for i, name in enumerate(ACTION_FEATURES)}


def test_what_is_left_to_nccl_is_the_cheapest_cell() -> None:
    tree, ring = (Algorithm.Tree, Protocol.Simple), (Algorithm.Ring, Protocol.LL)
    found = features({tree: 40.0, (Algorithm.Tree, Protocol.LL): 30.0, ring: 20.0})
    assert found["algorithm 1"] == [1.0, 1.0, 0.0, 0.0]  # NCCL's own choice is Ring, too
    assert found["algorithm 0"] == [0.0, 0.0, 1.0, 0.0]
    assert found["protocol 0"] == [1.0, 1.0, 1.0, 0.0]
    assert found["is NCCL's own choice"] == [1.0, 0.0, 0.0, 0.0]
    assert np.allclose(np.exp(found[ACTION_FEATURES[LOG_COST]]), [20.0, 20.0, 30.0, 1.0])
    assert found["cost is known"] == [1.0, 1.0, 1.0, 0.0]  # it does not take NVLS
    assert found["how many cells NCCL takes for cheaper"] == [0.0, 0.0, 1.0, 0.0]


def test_channels_are_told_with_the_bytes_of_each() -> None:
    found = features({})
    assert found["channels are asked for"] == [0.0, 0.0, 0.0, 1.0]
    assert found["log2 channels, 0 unless asked for"] == [0.0, 0.0, 0.0, 3.0]
    assert found["log2 bytes of a channel, 0 unless channels are asked for"] == [
        0.0,
        0.0,
        0.0,
        17.0,
    ]


def test_without_costs_a_config_is_what_it_names() -> None:
    found = features({})
    assert found["cost is known"] == [0.0] * 4
    assert found["algorithm 1"] == [0.0, 1.0, 0.0, 0.0]
    assert found["algorithm 4"] == [0.0, 0.0, 0.0, 1.0]
    assert found["protocol 2"] == [0.0, 0.0, 0.0, 1.0]


def test_costs_are_hidden_from_a_share_of_the_rows_whole(data_dir: Path) -> None:
    data = load_data(data_dir, 0, with_costs=True)
    replay = Replay(data.training.steps, 2_000, seed=0)
    costs = slice(data.cost_start, data.cost_start + NUM_CELLS)
    told = np.asarray(replay.sample().observations[1])
    assert (told[:, costs] != 0.0).any(axis=1).all()
    context = np.asarray(CostDropout(replay, data.cost_start, 0.25).sample().observations[1])
    hidden = (context[:, costs] == 0.0).all(axis=1)
    assert 0.2 < hidden.mean() < 0.3
    assert context.shape[1] == costs.stop
    assert (context[hidden][:, : costs.start] != 0.0).any(axis=1).all()
    # The tasks themselves still know theirs.
    assert (data.training.steps.tasks.context[:, costs] != 0.0).any(axis=1).all()


def as_nccl_predicts(data: TrainingData) -> TrainingData:
    """The same sweep on a machine whose times are NCCL's costs, and half as much again."""
    frame = data.frame.with_columns(data.catalogue.actions(data.frame)).drop_nulls("action")
    assert data.costs is not None
    costs = log_costs(frame, data.costs)
    costs = np.where(costs == 0.0, np.inf, costs)
    actions = frame["action"].to_list()
    cells = [
        None
        if c.algorithm is None or c.protocol is None
        else c.algorithm * NUM_PROTOCOLS + c.protocol
        for c in data.catalogue.configs
    ]
    row = [
        costs[i].min() if cells[a] is None else costs[i, cells[a]] for i, a in enumerate(actions)
    ]
    time = pl.Series("time_us", 1.5 * np.exp(row))
    return replace(
        data, frame=frame.with_columns(time).drop("action").filter(pl.col("time_us").is_finite())
    )


def test_times_that_are_nccls_costs_are_learned_over_them(data_dir: Path) -> None:
    data = as_nccl_predicts(load_data(data_dir, 0, with_costs=True))
    assert task_grid(data.frame, data.catalogue, [Split.VALIDATION]).tasks.height > 3
    found = base_residuals(data)
    assert found is not None
    assert found.over_cost < 1e-5
    assert found.over_time > 0.05
    assert found.is_cost_better
    assert base_residuals(replace(data, costs=None)) is None


@pytest.mark.parametrize("asked", ["held-out", "cost", "time"])
def test_a_run_says_what_times_were_learned_over(
    data_dir: Path, tmp_path: Path, asked: str
) -> None:
    uri = new_store(tmp_path)
    recipe = make_recipe("ddqn-actions", [*FEW, f"cost_base={asked}"])
    done = fit(data_dir, recipe, experiment="x", tracking_uri=uri, seed=0)
    run = MlflowClient(uri).get_run(done.run_id)
    residuals = {name: run.data.metrics[f"residual_over_{name}"] for name in ("cost", "time")}
    better = min(residuals, key=lambda name: residuals[name])
    assert run.data.tags["cost_base"] == (better if asked == "held-out" else asked)
