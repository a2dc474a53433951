"""Random decision tables and cost tables for the tests of `serve`."""

import numpy as np
from numpy.random import Generator

from dynamiccl.nccl import (
    COST_IGNORE,
    MAX_CHANNELS,
    NUM_ALGORITHMS,
    NUM_PROTOCOLS,
    VALID_PROTOCOLS,
    Algorithm,
    Collective,
    Config,
    Protocol,
    invalid_reason,
)
from dynamiccl.serve.table import MAX_BINS, DecisionTable
from tests.serve.answers import CostTable

TUNED = [collective for collective in Collective if collective.tunable]


def uniform(config: Config, num_nodes: int = 1, num_ranks: int = 8) -> DecisionTable:
    """One decision for every call."""
    rows = [[config] * MAX_BINS] * len(TUNED)
    return DecisionTable.from_configs(rows, num_nodes=num_nodes, num_ranks=num_ranks)


def random_config(random: Generator, collective: Collective) -> Config | None:
    """Any Config that NCCL can run for `collective`, AUTO knobs included; None is to abstain."""
    algorithms = [None, *VALID_PROTOCOLS[collective]]
    algorithm = algorithms[random.integers(len(algorithms))]
    allowed = Protocol if algorithm is None else VALID_PROTOCOLS[collective][algorithm]
    protocols = [None, *sorted(allowed)]
    protocol = protocols[random.integers(len(protocols))]
    channels = random.integers(MAX_CHANNELS + 1).item() or None
    chunk_bytes = [None, 1 << 16][random.integers(2)]
    config = Config(algorithm, protocol, channels, chunk_bytes)
    return None if random.integers(4) == 0 or config == Config() else config


def random_table(
    random: Generator, *, num_nodes: int = 1, num_ranks: int = 8, first_bin: int, num_bins: int
) -> DecisionTable:
    return DecisionTable.from_configs(
        [[random_config(random, collective) for _ in range(num_bins)] for collective in TUNED],
        num_nodes=num_nodes,
        num_ranks=num_ranks,
        first_bin=first_bin,
    )


def random_costs(random: Generator) -> CostTable:
    """Cost tables in us with all special cases: missing, tied, relegated, free, NaN."""
    costs = np.exp(random.uniform(1, 6, size=(random.choice([6, 7]), 3))).astype(np.float32)
    if random.integers(3) == 0:
        costs = np.round(costs, -2) + np.float32(1)  # ties
    if random.integers(4) == 0:
        costs[1] *= 1024  # fp8 on more than 8 ranks
    costs[random.random(costs.shape) < random.choice([0.0, 0.3, 0.9])] = COST_IGNORE
    odd = random.random(costs.shape) < random.choice([0.0, 0.0, 0.1])
    costs[odd] = random.choice([np.nan, np.inf, -np.inf, -7.0, 0.0, -0.0], size=int(odd.sum()))
    return costs


def made_up_costs(collective: Collective, num_nodes: int) -> CostTable:
    """Every cell that NCCL has a kernel for is there; each costs 1 us more than the one before."""
    costs = np.full((NUM_ALGORITHMS, NUM_PROTOCOLS), COST_IGNORE, dtype=np.float32)
    cost = 10.0
    for algorithm in Algorithm:
        for protocol in Protocol:
            config = Config(algorithm, protocol)
            if invalid_reason(config, collective, num_nodes=num_nodes) is None:
                costs[algorithm, protocol] = cost
                cost += 1.0
    return costs
