"""Records simulated jobs as the plugin would, in the `calls` table.

Each job is a run of its own, each group shape of it a communicator. Nothing of the surroundings is
written: a recording does not know them either.
"""

import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dynamiccl.datasets.schema import CALLS, CallSource
from dynamiccl.datasets.store import program_record, write_part
from dynamiccl.nccl import Algorithm, Protocol
from dynamiccl.simulator.world import CallResults, World

_ABSTAIN_ACTION: Final = 0
#: What NCCL runs a channel with; no simulated time depends on it.
_WARPS: Final = 16
_BEGIN: Final = datetime(2026, 1, 1, tzinfo=UTC)


class Recording:
    """The recorded calls of N jobs."""

    def __init__(self, world: World, name: str) -> None:
        """`name` becomes the sweep and, with the job's number, the run."""
        self._world = world
        self._name = name
        self._ran: list[CallResults] = []

    def add(self, ran: CallResults) -> None:
        """Record a step."""
        self._ran.append(ran)

    def write(self, out: Path) -> list[Path]:
        """Write the table into a store; raises ValueError when nothing was added."""
        if not self._ran:
            raise ValueError("nothing was recorded")
        columns = self._columns()
        size = len(columns["time_us"])
        known = [
            pa.array(columns[field.name], field.type)
            if field.name in columns
            else pa.nulls(size, field.type)
            for field in CALLS
        ]
        table = pa.Table.from_arrays(known, schema=CALLS)
        return write_part(out, table, kind="calls", provenance=program_record("simulator"))

    def _columns(self) -> dict[str, Any]:
        world = self._world
        key, action = (
            np.stack([getattr(ran, name) for ran in self._ran]) for name in ("key", "action")
        )
        steps, jobs = key.shape
        size = steps * jobs
        time_us = np.stack([ran.measured_us for ran in self._ran]).reshape(size)
        skew_us = np.stack([ran.skew_us for ran in self._ran]).reshape(size)
        step, job = (part.reshape(size) for part in np.indices(key.shape))
        key, action = key.reshape(size), action.reshape(size)
        algorithms = np.array([each.wire for each in Algorithm])
        protocols = np.array([each.wire for each in Protocol])
        flags = {
            name: np.zeros(size, dtype=np.bool_)
            for name in ("probe", "graph_captured", "sampled", "incomplete")
        }
        return {
            **self._facts(key),
            **flags,
            "run": [f"{self._name}-{each}" for each in job],
            "sweep": [self._name] * size,
            "source": [CallSource.SIMULATOR.value] * size,
            "sequence": step,
            "replay": np.zeros(size, dtype=np.int64),
            "timestamp": [_BEGIN + timedelta(milliseconds=int(each)) for each in step],
            "actual_algorithm": algorithms[world.algorithm[key, action]],
            "actual_protocol": protocols[world.protocol[key, action]],
            "actual_num_channels": world.num_channels[key, action],
            "actual_num_warps": np.full(size, _WARPS),
            "table": np.ones(size, dtype=np.int64),
            "decided": action != _ABSTAIN_ACTION,
            "asks_tuner": np.ones(size, dtype=np.bool_),
            "time_us": time_us,
            "time_at_most_us": time_us,
            "skew_us": skew_us,
            "ranks_agree": np.ones(size, dtype=np.bool_),
        }

    def _facts(self, key: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Columns of the communicator and the machine."""
        world, size = self._world, len(key)
        by_key: dict[str, list[Any]] = {
            "collective": [call.collective.wire for call in world.keys],
            "size_bytes": [call.size_bytes for call in world.keys],
            "num_nodes": [call.group.num_nodes for call in world.keys],
            "ranks_per_node": [call.group.ranks_per_node for call in world.keys],
            "num_ranks": [call.group.num_ranks for call in world.keys],
            "comm": [
                hashlib.sha256(f"{call.group}".encode()).hexdigest()[:16] for call in world.keys
            ],
        }
        found: dict[str, Any] = {
            name: np.array(values)[key].tolist() for name, values in by_key.items()
        }
        found["ranks_seen"] = found["ranks_timed"] = found["num_ranks"]
        known = {"system": world.system.name, **world.system.environment}
        names = {field.name for field in CALLS}
        return found | {n: [value] * size for n, value in known.items() if n in names}
