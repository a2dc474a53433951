"""The head with actions as inputs: what it knows before it has learned, and what it shares."""

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from dynamiccl.datasets.costs import NUM_CELLS
from dynamiccl.datasets.features import FEATURES
from dynamiccl.datasets.manifest import Manifest
from dynamiccl.nccl import ABSTAIN, NUM_PROTOCOLS, Algorithm, Config, Protocol
from dynamiccl.train.action_head import ActionHead, ActionInputs
from dynamiccl.train.algorithms import make_algorithm, members_of
from dynamiccl.train.data import load_data
from dynamiccl.train.fit import fit
from dynamiccl.train.heads import Member
from dynamiccl.train.policy import TorchPolicy, forward
from dynamiccl.train.policy_module import PolicyModule
from dynamiccl.train.recipes import make_recipe
from dynamiccl.train.replay import Replay
from tests.stores import new_store

RING, TREE, NVLS = (
    Config(Algorithm.Ring, Protocol.LL),
    Config(Algorithm.Tree, Protocol.Simple),
    Config(Algorithm.NVLS, Protocol.Simple),
)
INPUTS = ActionInputs((ABSTAIN, RING, TREE, NVLS), len(FEATURES), uses_cost=True)
HIDDEN = 5


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
