"""The result of one getCollInfo, and the one that our plugin must give."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import ABSTAIN, NUM_PROTOCOLS, RELEGATED_COST_RATIO, Algorithm, Config, Protocol

#: Predicted microseconds, shape [6 or 7 algorithms][3 protocols]; -1.0 where not available.
CostTable = npt.NDArray[np.float32]

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

    The same rules as `choose` in `serve/plugin/choice.h`, implemented a second time on purpose: the
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
