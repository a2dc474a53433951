"""Recorded decisions of NCCL's own code, compared with the model's.

The record is a table of decisions: for each call the cost of every cell, the cell that was chosen
and the channels that ran. Its columns are nccl_version, topology, num_nodes, ranks_per_node,
collective, size_bytes, algorithm, protocol, cost_us, chosen and num_channels.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dynamiccl.errors import MissingPath
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, NcclVersion, Protocol
from dynamiccl.simulator.cost_model import CostModel, Pair
from dynamiccl.simulator.machine import find_machine, machine_names
from dynamiccl.simulator.system import Call, Group


@dataclass(frozen=True, slots=True)
class Decision:
    """One recorded decision."""

    version: NcclVersion
    topology: str
    call: Call
    #: Every cell that NCCL had.
    costs_us: Mapping[Pair, float]
    #: What it took, with the channels that ran.
    chosen: Config

    @property
    def system(self) -> str:
        """Topology and shape."""
        return f"{self.topology} {self.call.group.num_nodes}x{self.call.group.ranks_per_node}"

    @property
    def held_out(self) -> bool:
        """Whether the size is no power of two: constants are fitted on those alone."""
        return self.call.size_bytes.bit_count() > 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """The model's answer to a recorded decision."""

    decision: Decision
    #: What the model takes.
    answer: Config
    #: Relative errors of the predicted costs; infinite for a cell that only one of the two has.
    cost_errors: Sequence[float]

    @property
    def agrees(self) -> bool:
        """Whether algorithm and protocol are the same."""
        ours, theirs = self.answer, self.decision.chosen
        return (ours.algorithm, ours.protocol) == (theirs.algorithm, theirs.protocol)

    @property
    def channels_agree(self) -> bool:
        """Whether as many channels run, where the rest agrees."""
        return self.agrees and self.answer.num_channels == self.decision.chosen.num_channels


def read_decisions(path: Path) -> list[Decision]:
    """Decisions of a record. Raises MissingPath where there is none."""
    if not path.is_file():
        raise MissingPath("record of NCCL's decisions", path, "record one, or leave this out")
    calls: dict[tuple[str, ...], list[dict[str, str]]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            names = ("nccl_version", "topology", "num_nodes", "ranks_per_node", "collective")
            calls.setdefault((*(row[n] for n in names), row["size_bytes"]), []).append(row)
    return [_decision(rows) for rows in calls.values()]


def judge(decisions: Iterable[Decision]) -> list[Verdict]:
    """The model's answers."""
    return [_verdict(decision) for decision in decisions]


def _decision(rows: Sequence[Mapping[str, str]]) -> Decision:
    first = rows[0]
    [chosen] = [row for row in rows if row["chosen"] == "true"]
    group = Group(int(first["num_nodes"]), int(first["ranks_per_node"]))
    return Decision(
        NcclVersion.parse(first["nccl_version"]),
        first["topology"],
        Call(group, Collective.parse(first["collective"]), int(first["size_bytes"])),
        {_pair(row): float(row["cost_us"]) for row in rows},
        Config(*_pair(chosen), int(chosen["num_channels"])),
    )


def _pair(row: Mapping[str, str]) -> Pair:
    return Algorithm.parse(row["algorithm"]), Protocol.parse(row["protocol"])


def _verdict(decision: Decision) -> Verdict:
    model = _model(decision.version, decision.topology)
    call, theirs = decision.call, decision.costs_us
    ours = {cell: model.cost_us(call, *cell) for cell in model.cells(call.group, call.collective)}
    errors = [
        abs(ours[cell] / theirs[cell] - 1.0) if cell in ours and cell in theirs else float("inf")
        for cell in ours.keys() | theirs.keys()
    ]
    return Verdict(decision, model.resolve(call, ABSTAIN), errors)


@cache
def _model(version: NcclVersion, topology: str) -> CostModel:
    machines = {find_machine(name).recorded_as: find_machine(name) for name in machine_names()}
    return CostModel(version, machines[topology])
