"""The plugin's choices, the bytes of a table, and what the recorder keeps of calls.

The tuner is driven by NCCL's public ABI alone: random questions to each version of it, a random
table in force. Costs are eighths of a us and everything is drawn by `random`, so that the questions
are the same bits on every machine. tests/serve/test_plugin.py compares the answers with the law.
"""

import hashlib
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from dynamiccl.libraries import PROFILER_NAME, TUNER_NAME
from dynamiccl.nccl import (
    COST_IGNORE,
    MAX_CHANNELS,
    NUM_PROTOCOLS,
    VALID_PROTOCOLS,
    Collective,
    Config,
    Protocol,
)
from dynamiccl.serve.table import DecisionTable
from tests.golden.command import clean_environment, dynamiccl, library
from tests.golden.frames import tables
from tests.golden.golden import Golden
from tests.published import ROOT
from tests.serve.abi import Communicator, TunerPlugin, loopback_environment, write_bare_artifact
from tests.serve.answers import CostTable

_SYSTEM: Final = "test-system"
_QUESTIONS: Final = 2_000
_SHOWN: Final = 100
_TUNED: Final = [collective for collective in Collective if collective.tunable]
#: (ranks, nodes): some algorithms' channels are set on one node only.
_SHAPES: Final = ((8, 1), (16, 2))
#: Of a recorded call: when it was, and on which machine.
_HERE: Final = (
    *("timestamp", "node_fingerprint", "gpu", "mig", "nic_kind", "nics_per_node"),
    *("nic_gbits_per_s", "cpu_vendor", "exclusive_node", "compute_capability"),
    *("nvlink_generation", "nvlinks_per_gpu", "nvswitch"),
)


def _config(random: Random, collective: Collective) -> Config | None:
    """Any Config that NCCL has for `collective`, AUTO knobs included; None is to abstain."""
    algorithm = random.choice([None, *VALID_PROTOCOLS[collective]])
    protocols = Protocol if algorithm is None else VALID_PROTOCOLS[collective][algorithm]
    channels = random.randrange(MAX_CHANNELS + 1) or None
    config = Config(algorithm, random.choice([None, *sorted(protocols)]), channels)
    return None if random.randrange(4) == 0 or config == Config() else config


def _costs(random: Random) -> CostTable:
    """With what a tuner must expect: cells that are not there, ties, a relegated ring, nonsense."""
    step = random.choice([1, 1, 400])  # of an eighth of a us; coarse ones tie
    count = random.choice([6, 7]) * NUM_PROTOCOLS
    drawn = [step * random.randrange(1, 4000 // step) / 8 for _ in range(count)]
    costs = np.array(drawn, dtype=np.float32).reshape(-1, NUM_PROTOCOLS)
    if random.randrange(4) == 0:
        costs[1] *= 1024  # as NCCL does for fp8 on more than 8 ranks
    missing, odd = random.choice([0.0, 0.3, 0.9]), random.choice([0.0, 0.0, 0.1])
    for cell in range(costs.size):
        if random.random() < missing:
            costs.flat[cell] = COST_IGNORE
        elif random.random() < odd:
            costs.flat[cell] = random.choice([np.nan, np.inf, -np.inf, -7.0, 0.0, -0.0])
    return costs


def _answer(communicator: Communicator, random: Random) -> str:
    """What is written for a question: `cell=value` of the cost table, and channels. Or `-`."""
    collective, size_bytes = random.choice(_TUNED), int(2 ** (3 + 35 * random.random()))
    pipe_ops, costs = random.choice([1, 1, 1, 2, 5]), _costs(random)  # 0: symmetric kernels
    answer = communicator.ask(collective, size_bytes, costs, num_pipe_ops=pipe_ops)
    if not answer.acted:
        return "-"
    was, now = (table.ravel().view(np.int32) for table in (costs, answer.cost_table_after))
    written = np.flatnonzero(was != now)
    cells = [f"{cell}={answer.cost_table_after.flat[cell]:g}" for cell in written]
    return " ".join([*cells, f"{answer.num_channels}ch"])


def _answers(directory: Path) -> Any:
    """By shape the table's bytes; by version a digest of all answers, and the first."""
    plugin, found = TunerPlugin(library(TUNER_NAME)), dict[str, Any]()
    for ranks, nodes in _SHAPES:
        random = Random(ranks)
        rows = [[_config(random, each) for _ in range(120)] for each in _TUNED]
        table = DecisionTable.from_configs(rows, num_nodes=nodes, num_ranks=ranks, first_bin=20)
        artifact = directory / f"{nodes}x{ranks}"
        write_bare_artifact(artifact, _SYSTEM, table)
        environment = loopback_environment(artifact, _SYSTEM)
        told: dict[str, Any] = {"table": hashlib.sha256(table.to_bytes()).hexdigest()}
        for version in plugin.versions:
            with plugin.communicator(
                ranks, nodes, version=version, environment=environment, all_ranks=True
            ) as communicator:
                random = Random(ranks)
                answers = [_answer(communicator, random) for _ in range(_QUESTIONS)]
            told[f"v{version}"] = hashlib.sha256("\n".join(answers).encode()).hexdigest()
            told["first"] = answers[:_SHOWN]
        found[f"{nodes}x{ranks}"] = told
    return found


def _calls(directory: Path) -> Any:
    """What the recorder keeps of three ranks' calls, as `dynamiccl-collect import` reads it."""
    module = (sys.executable, "-m", "tests.collect.calls.rank", library(PROFILER_NAME))
    settings = {"DYNAMICCL_CALLS_DIR": str(directory / "calls"), "DYNAMICCL_SAMPLE_PERCENT": "100"}
    for rank in ("0", "1", "2"):
        environment = clean_environment(**settings, DYNAMICCL_JOB_ID="job 9", RANK=rank)
        subprocess.run([*module, rank, "3"], env=environment, cwd=ROOT, check=True)
    words = ("calls", "--out", "out", "--system", "box", "--sweep", "jobs", "--json")
    code, _ = dynamiccl("collect", "import", *words, directory=directory)
    assert code == 0
    return tables(directory / "out", ("collective", "sequence"), _HERE)


GOLDENS: Final = (Golden("plugin-answers", _answers), Golden("plugin-calls", _calls))
