"""How long one getCollInfo takes: the time that every collective pays on the host.

    python benchmarks/bench_plugin.py

A full table (every size bin, five collectives, all kinds of decisions) is asked random questions by
a C++ program, in batches of 64; p50 and p99 are over 20,000 batches of the mean time of a call,
since one call is as short as reading the clock. The baseline is the same function pointer with a
communicator that abstains for good. Beside it, in the same run: an equivalent of NVIDIA's example
tuner, which scans a list of rules and logs at each (bench_csv_scan.cpp says how). Writes
out/bench/plugin.json.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from harness import write_result

from dynamiccl.nccl import VALID_PROTOCOLS, Collective, Config
from dynamiccl.serve.build import PLUGIN_NAME, build_plugin
from dynamiccl.serve.lone_rank import lone_environment, write_bare_artifact
from dynamiccl.serve.table import MAX_BINS, DecisionTable

NUM_RANKS, NUM_NODES = 16, 2
SYSTEM = "bench"


def full_table() -> DecisionTable:
    """Every bin acts, with a random Config of those that NCCL has for the collective."""
    random = np.random.default_rng(1)
    rows = []
    for collective in (c for c in Collective if c.tunable):
        choices: list[Config | None] = [Config(num_channels=8)]
        for algorithm, protocols in VALID_PROTOCOLS[collective].items():
            choices += [Config(algorithm, protocol, 8) for protocol in sorted(protocols)]
            choices.append(Config(algorithm))
        rows.append([choices[i] for i in random.integers(len(choices), size=MAX_BINS)])
    return DecisionTable.from_configs(rows, num_nodes=NUM_NODES, num_ranks=NUM_RANKS)


def figures_of(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """What a benchmark program printed."""
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=True
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    """Build, measure, write."""
    build_dir = build_plugin(Path("out/bench-plugin"), tests=True).parent
    with tempfile.TemporaryDirectory() as artifact:
        write_bare_artifact(Path(artifact), SYSTEM, full_table())
        alone = lone_environment(build_dir / PLUGIN_NAME, Path(artifact), SYSTEM)
        environment = {name: value for name, value in alone.items() if value is not None}
        arguments = [str(build_dir / PLUGIN_NAME), str(NUM_RANKS), str(NUM_NODES)]
        figures = figures_of([str(build_dir / "bench_plugin"), *arguments], environment)
    write_result("plugin", figures | figures_of([str(build_dir / "bench_csv_scan")], {}))


if __name__ == "__main__":
    main()
