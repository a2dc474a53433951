"""The congested world of `learning_sequences.py`: 4 x 8 simulated H100.

Congestion multiplies the transfer term of every config, so that what is best moves; between four
levels it wanders as a Markov chain, a round in a hundred. A change of config costs 10 us once. Both
strengths are chosen, not measured: the world shows what learning can do, not what a site will gain.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import pyarrow as pa
from learning_play import Played, World

from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.datasets.episodes import with_noise
from dynamiccl.datasets.provenance import program_record
from dynamiccl.datasets.schema import CALLS, DEFAULT_PROFILE
from dynamiccl.datasets.splits import Split, with_split
from dynamiccl.datasets.store import write_part
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Protocol
from dynamiccl.simulator import h100
from dynamiccl.simulator.channels import actual_channels

SYSTEM: Final = "h100-ib-congested"
GROUP: Final = h100.Group(4, 8)
LEVELS: Final = (0.0, 1.0, 3.0, 7.0)
#: Rounds that a level lasts, on average, and which follows it; the middle ones are passed through.
DWELL: Final = 100.0
NEXT: Final = (
    (0.0, 0.6, 0.3, 0.1),
    (0.5, 0.0, 0.4, 0.1),
    (0.4, 0.3, 0.0, 0.3),
    (0.4, 0.2, 0.4, 0.0),
)
NOISE: Final = 0.05
SWITCH_US: Final = 10.0
SWEEP: Final = """
name = "quiet"
system = "{system}"
collectives = ["AllReduce", "AllGather"]
algorithms = ["Ring", "Tree", "NVLSTree"]
groups = [{{ num_nodes = 4, ranks_per_node = 8 }}]
sizes = {{ min = "32K", max = "256M", steps_per_octave = 2 }}
nccl_version = "2.27.5"
cycles = 3
[simulator]
seed = {seed}
"""


def measure_quiet(out: Path, seed: int) -> Path:
    """A sweep without interference, for reference times and cold steps."""
    return simulate(SWEEP.format(system=SYSTEM, seed=seed), out)


def make_world(catalogue: Catalogue, split: Split, noise: pl.DataFrame) -> World:
    """The world over the sizes of a split; `noise` as policies were trained with."""
    sizes = pl.DataFrame({"size_bytes": [int(2 ** (half / 2)) for half in range(30, 57)]})
    chosen = with_split(sizes).filter(pl.col("split") == split.value)["size_bytes"].to_list()
    keys = [(c, s) for c in (Collective.AllReduce, Collective.AllGather) for s in chosen]
    shape = (len(keys), len(catalogue))
    times = np.full((len(LEVELS), *shape), np.nan)
    algorithm, protocol = np.full((2, *shape), -1, dtype=np.int8)
    channels = np.zeros(shape, dtype=np.int16)
    for key, (collective, size) in enumerate(keys):
        for action, config in enumerate(catalogue.configs):
            ran = h100.default_config(GROUP, collective, size) if config == ABSTAIN else config
            assert ran.algorithm is not None
            assert ran.protocol is not None
            if (ran.algorithm, ran.protocol) not in h100.cells(GROUP, collective):
                continue
            call = (GROUP, collective, ran.algorithm, ran.protocol, size)
            for level, congestion in enumerate(LEVELS):
                times[level, key, action] = h100.true_us(*call, congestion=congestion)
            algorithm[key, action], protocol[key, action] = ran.algorithm, ran.protocol
            channels[key, action] = actual_channels(*call, None)
    stay = 1.0 - 1.0 / DWELL
    tasks = pl.DataFrame([{"collective": c.wire, "size_bytes": s, **_facts()} for c, s in keys])
    return World(
        tasks=with_noise(tasks, noise),
        times_us=times,
        algorithm=algorithm,
        protocol=protocol,
        num_channels=channels,
        transitions=stay * np.eye(len(LEVELS)) + (1.0 - stay) * np.array(NEXT),
        noise_sigma=NOISE,
        switch_us=SWITCH_US,
    )


def write_calls(out: Path, world: World, played: Played, run: str) -> None:
    """Write the calls that the plugin would have recorded."""
    rounds, jobs, keys = played.action.shape
    index = np.indices(played.action.shape).reshape(3, -1)
    action = played.action.reshape(-1)
    key = index[2]
    began = datetime(2026, 1, 1, tzinfo=UTC)
    wire = {int(a): a.wire for a in Algorithm}, {int(p): p.wire for p in Protocol}
    size = rounds * jobs * keys
    columns: dict[str, Any] = {
        "source": [CallSource.SIMULATOR.value] * size,
        "run": [f"{run}-{job}" for job in index[1]],
        "comm": ["0123456789abcdef"] * size,
        "sequence": index[0] * keys + key,
        "replay": np.zeros(size, dtype=np.int64),
        "timestamp": [began + timedelta(milliseconds=int(each)) for each in index[0]],
        "collective": world.tasks["collective"].gather(key).to_list(),
        "size_bytes": world.tasks["size_bytes"].gather(key).to_list(),
        "actual_algorithm": [wire[0][int(a)] for a in world.algorithm[key, action]],
        "actual_protocol": [wire[1][int(p)] for p in world.protocol[key, action]],
        "actual_num_channels": world.num_channels[key, action],
        "actual_num_warps": np.full(size, 16),
        "table": np.ones(size, dtype=np.int64),
        "decided": action != ABSTAIN_ACTION,
        "time_us": played.measured_us.reshape(-1).astype(np.float64),
        "skew_us": np.zeros(size),
        "ranks_seen": np.full(size, GROUP.num_ranks),
        "ranks_timed": np.full(size, GROUP.num_ranks),
        "ranks_agree": np.ones(size, dtype=bool),
        **{name: [value] * size for name, value in (_facts() | {"sweep": run}).items()},
    }
    none = dict.fromkeys(("probe", "graph_captured", "sampled", "incomplete"), np.zeros(size, bool))
    columns |= none
    known = [pa.array(columns[f.name], f.type) if f.name in columns else pa.nulls(size, f.type)
             for f in CALLS]  # fmt: skip
    table = pa.Table.from_arrays(known, schema=CALLS)
    write_part(out, table, kind="calls", provenance=program_record("bench"))


def _facts() -> dict[str, Any]:
    return {
        "system": SYSTEM,
        "num_nodes": GROUP.num_nodes,
        "ranks_per_node": GROUP.ranks_per_node,
        "num_ranks": GROUP.num_ranks,
        "launch_profile": DEFAULT_PROFILE,
        **h100.ENVIRONMENT,
    }
