"""What is known of an action before it is tried."""

import numpy as np
import torch

from dynamiccl.datasets.costs import NUM_CELLS
from dynamiccl.datasets.features import CONTEXT_COLUMN, FEATURES
from dynamiccl.nccl import ABSTAIN, NUM_PROTOCOLS, Algorithm, Config, Protocol
from dynamiccl.train.action_features import ACTION_FEATURES, LOG_COST, ActionFeatures
from dynamiccl.train.torch_files import script

CONFIGS = (
    ABSTAIN,
    Config(Algorithm.Ring, Protocol.LL),
    Config(Algorithm.Tree, None),
    Config(Algorithm.NVLS, Protocol.Simple, 8),
)


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
