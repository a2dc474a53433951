"""Queries any tuner plugin for its decision at each message size, in a separate process.

NCCL would show it the costs that it predicts for the machine. Here there is no machine, so the
table is made up: every cell that NCCL has a kernel for is available, and each costs 1 us more than
the one before it, from 10 us on, in NCCL's order (Tree, Ring, ...; LL, LL128, Simple). So "NCCL's
own choice" is always the first, and a plugin that compares costs decides on these.

    python -m dynamiccl.serve.ask_tuner PLUGIN NUM_RANKS NUM_NODES      one line of JSON
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np

from dynamiccl import cli
from dynamiccl.datasets.features import TUNED
from dynamiccl.errors import MissingPath, PluginError
from dynamiccl.nccl import (
    COST_IGNORE,
    NUM_ALGORITHMS,
    NUM_PROTOCOLS,
    Algorithm,
    Collective,
    Config,
    Protocol,
    invalid_reason,
)
from dynamiccl.serve.abi import OUR_NAME, TunerPlugin
from dynamiccl.serve.answers import Answer, CostTable, asked_in_a_job, expected_answer, nccl_choice
from dynamiccl.serve.table import DecisionTable

#: 1 KiB to 16 GiB, octave by octave.
SIZES: Final = tuple(1 << octave for octave in range(10, 35))
_FIRST_COST_US: Final = 10.0
#: What the line begins with that holds the answer.
_ANSWER: Final = "dynamiccl-answer "
_TIMEOUT_S: Final = 60.0


def made_up_costs(collective: Collective, num_nodes: int) -> CostTable:
    """The synthetic cost table that the plugin gets."""
    costs = np.full((NUM_ALGORITHMS, NUM_PROTOCOLS), COST_IGNORE, dtype=np.float32)
    cost = _FIRST_COST_US
    for algorithm in Algorithm:
        for protocol in Protocol:
            config = Config(algorithm, protocol)
            if invalid_reason(config, collective, num_nodes=num_nodes) is None:
                costs[algorithm, protocol] = cost
                cost += 1.0
    return costs


def ask_plugin(plugin: Path, num_ranks: int, num_nodes: int) -> dict[str, Any]:
    """The plugin's decisions by size; it sees this process's environment, as in a job.

    Raises MissingPath, and PluginError when it does not load, returns an error or crashes.
    """
    if not plugin.is_file():
        raise MissingPath("tuner plugin", plugin, "give the path of a .so file")
    command = [sys.executable, "-m", "dynamiccl.serve.ask_tuner", str(plugin.resolve())]
    try:
        done = subprocess.run(
            [*command, str(num_ranks), str(num_nodes)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise PluginError(f"{plugin} had not answered after {_TIMEOUT_S:g} s") from None
    # A plugin may write to stdout as well, and what C has buffered comes after all of ours.
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if done.returncode == 0 and answers:
        return dict(json.loads(answers[-1].removeprefix(_ANSWER)))
    said = done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
    if done.returncode < 0:
        said = f"signal {-done.returncode} ended the process that asked {plugin}"
    raise PluginError(said or f"{plugin} ended the process that asked it")


def table_answers(table: DecisionTable) -> dict[str, Any]:
    """What our plugin answers once all ranks have agreed on `table`.

    It is not asked: alone, without the other ranks, it would rightly abstain.
    """
    decisions = {}
    for collective in TUNED:
        costs = made_up_costs(collective, table.num_nodes)
        decisions[collective.wire] = [
            _row(
                size,
                expected_answer(
                    asked_in_a_job(table.lookup(collective, size)),
                    costs,
                    num_nodes=table.num_nodes,
                ),
            )
            for size in SIZES
        ]
    return decisions


def _asked(plugin: TunerPlugin, num_ranks: int, num_nodes: int) -> dict[str, Any]:
    version = plugin.versions[-1]
    per_domain = num_ranks // num_nodes
    decisions: dict[str, Any] = {}
    if plugin.name != OUR_NAME:
        with plugin.communicator(
            num_ranks, num_nodes, version=version, ranks_per_domain=(per_domain, per_domain)
        ) as communicator:
            for collective in TUNED:
                decisions[collective.wire] = [
                    _row(
                        size,
                        communicator.ask(collective, size, made_up_costs(collective, num_nodes)),
                    )
                    for size in SIZES
                ]
    return {
        "name": plugin.name,
        "tuner_versions": list(plugin.versions),
        "asked_version": version,
        "decisions": decisions,
    }


def _row(size_bytes: int, answer: Answer) -> dict[str, Any]:
    return {"size_bytes": size_bytes, "config": _wanted(answer)}


def _wanted(answer: Answer) -> str | None:
    """The config that the plugin requested; None where it left the choice to NCCL."""
    if not answer.acted:
        return None
    channels = answer.num_channels or None
    after = answer.cost_table_after
    # The cheapest made-up cell comes first, so another choice, or a price below it, is a wish.
    if nccl_choice(after) is not None:
        cheapest = after[after >= 0].min()
        if cheapest >= _FIRST_COST_US:
            return Config(None, None, channels).key
    return Config(answer.algorithm, answer.protocol, channels).key


def _main() -> None:
    path, num_ranks, num_nodes = sys.argv[1:]
    asked = _asked(TunerPlugin(Path(path)), int(num_ranks), int(num_nodes))
    sys.stdout.write(f"\n{_ANSWER}{json.dumps(asked)}\n")


if __name__ == "__main__":
    cli.run(_main)
