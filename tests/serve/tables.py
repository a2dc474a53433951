"""Random tables, costs and schedules, and what our plugin must answer to each question."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from dynamiccl.nccl import (
    ABSTAIN,
    COST_IGNORE,
    MAX_CHANNELS,
    NUM_PROTOCOLS,
    RELEGATED_COST_RATIO,
    VALID_PROTOCOLS,
    Algorithm,
    Collective,
    Config,
    Protocol,
)
from dynamiccl.schedule import Schedule
from dynamiccl.serve.table import MAX_BINS, DecisionTable

#: Predicted microseconds, shape [6 or 7 algorithms][3 protocols]; -1.0 where not available.
CostTable = npt.NDArray[np.float32]
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


_COLLNET: Final = frozenset({Algorithm.CollNetDirect, Algorithm.CollNetChain})
_NVLS: Final = frozenset({Algorithm.NVLS, Algorithm.NVLSTree})


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The result of one getCollInfo, and what NCCL runs then."""

    #: None where no cell is available.
    algorithm: Algorithm | None
    protocol: Protocol | None
    #: As written to `*nChannels`; 0 leaves it to NCCL.
    num_channels: int
    #: Whether the plugin wrote anything at all.
    acted: bool
    cost_table_after: CostTable

    @property
    def config(self) -> Config:
        """The Config that NCCL runs after this call: the argmin of the cost table."""
        return Config(self.algorithm, self.protocol, self.num_channels or None)


def nccl_choice(cost_table: CostTable) -> tuple[Algorithm, Protocol] | None:
    """NCCL's own argmin: the first of the cheapest cells, None when no cell is available.

    `src/enqueue.cc` topoGetAlgoInfo, v2.30.7-1.
    """
    costs = np.where(_available(cost_table), cost_table, np.inf)
    cell = int(np.argmin(costs))
    if not np.isfinite(costs.flat[cell]):
        return None
    return Algorithm(cell // NUM_PROTOCOLS), Protocol(cell % NUM_PROTOCOLS)


def asked_in_a_job(config: Config | None) -> Config | None:
    """The config that a job requests where its table holds `config`; None for none.

    Chunk sizes are for sweeps only: a rank that simulates a group would use NCCL's own chunk at its
    next call, and the others ours.
    """
    asked = config and replace(config, chunk_bytes=None)
    return None if asked == ABSTAIN else asked


def expected_answer(config: Config | None, cost_table: CostTable, *, num_nodes: int) -> Answer:
    """The answer that the plugin must give when its table holds `config`.

    The same rules as `choose` in `serve/plugin/table.h`, implemented a second time on purpose: the
    parity check compares the two.
    """
    untouched = answer_of(cost_table, cost_table, 0)
    if config is None:
        return untouched
    available = _available(cost_table)
    if (cost_table == 0).any():
        return untouched  # NCCL's tie might go to that cell and not to ours
    allowed = available.copy()
    if config.algorithm is not None:
        allowed &= (np.arange(len(cost_table)) == config.algorithm)[:, None]
    if config.protocol is not None:
        allowed &= np.arange(NUM_PROTOCOLS) == config.protocol
    if _ring_is_relegated(cost_table, available):
        allowed[Algorithm.Ring] = False
    if not allowed.any():
        return untouched
    cell = int(np.argmin(np.where(allowed, cost_table, np.inf)))
    after = cost_table.copy()
    after.flat[cell] = 0.0
    algorithm = Algorithm(cell // NUM_PROTOCOLS)
    unclamped = algorithm in _COLLNET or (algorithm in _NVLS and num_nodes > 1)
    return answer_of(cost_table, after, 0 if unclamped else config.num_channels or 0)


def _available(cost_table: CostTable) -> npt.NDArray[np.bool_]:
    return np.isfinite(cost_table) & (cost_table >= 0)


def _ring_is_relegated(cost_table: CostTable, available: npt.NDArray[np.bool_]) -> bool:
    ring = np.arange(len(cost_table)) == Algorithm.Ring
    ring_costs = cost_table[ring][available[ring]]
    other_costs = cost_table[~ring][available[~ring]]
    if not ring_costs.size or not other_costs.size:
        return False
    with np.errstate(over="ignore"):
        return bool(ring_costs.min() >= np.float32(RELEGATED_COST_RATIO) * other_costs.min())


def answer_of(before: CostTable, after: CostTable, num_channels: int) -> Answer:
    """What NCCL runs after a call that left `after` of the table `before`."""
    algorithm, protocol = nccl_choice(after) or (None, None)
    acted = before.tobytes() != after.tobytes() or num_channels != 0
    return Answer(algorithm, protocol, num_channels, acted, after)


@dataclass(frozen=True, slots=True)
class BenchmarkCall:
    """One collective of the benchmark; `block` is None in the warm-up."""

    size_bytes: int
    block: int | None
    config: Config


def benchmark_calls(schedule: Schedule) -> Iterator[BenchmarkCall]:
    """Warm-up; then cycle by cycle, size by size, half by half: one call, n timed, c checks."""
    for size_bytes, calls in schedule.warmup:
        for _ in range(calls):
            yield BenchmarkCall(size_bytes, None, ABSTAIN)
    block = 0
    for cycle in schedule.cycles:
        for size_bytes, config in zip(schedule.sizes, cycle, strict=True):
            for _half in range(schedule.halves):
                for _call in range(schedule.calls_per_half):
                    yield BenchmarkCall(size_bytes, block, config)
            block += 1


def random_schedule(
    random: Generator, collective: Collective, *, num_nodes: int = 1, chunks: bool = False
) -> Schedule:
    """Eight ranks a node, five sizes, six cycles; chunk sizes only where asked for."""

    def config() -> Config:
        drawn = random_config(random, collective) or ABSTAIN
        if drawn.algorithm is Algorithm.NVLSTree and num_nodes == 1:
            return ABSTAIN
        return drawn if chunks else replace(drawn, chunk_bytes=None)

    return Schedule(
        collective=collective,
        num_ranks=8 * num_nodes,
        num_nodes=num_nodes,
        warmup=tuple((1 << power, 3) for power in range(10, 15)),
        halves=2,
        calls_per_half=7,
        sizes=tuple(1 << power for power in range(10, 15)),
        cycles=tuple(tuple(config() for _ in range(5)) for _ in range(6)),
    )


def stage(directory: Path, schedule: Schedule) -> dict[str, str | None]:
    """Write `schedule` into `directory`; return the environment of a launch that plays it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "schedule"
    path.write_bytes(schedule.to_bytes())
    return {
        "DYNAMICCL_MODE": "sweep",
        "DYNAMICCL_SCHEDULE": str(path),
        "DYNAMICCL_SCHEDULE_HASH": schedule.content_hash,
        "DYNAMICCL_SWEEP_REPORT": str(directory / "report"),
    }
