"""Agreement of the simulator's default choices with recorded decisions of NCCL.

    python benchmarks/simulator_default.py

The record holds 925 decisions of NCCL 2.27.7's own code on five systems, with the cost of every
cell and the channels that ran. Constants of the graphs may be fitted on its powers of two; the
share on the other sizes (3 x 2^k) stands apart. Beside it: what real machines were seen to choose.
Sockets under 2.29.7 were read back from NCCL's log; B300's choices are only stated by their source.
"""

import csv
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from harness import ROOT
from rich.console import Console
from rich.table import Table

from dynamiccl.errors import MissingPath
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, NcclVersion, Protocol
from dynamiccl.simulator.default import CostModel, find_machine
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.system import Call
from tests.simulator.recorded import Verdict, judge, read_decisions

DATA: Final = ROOT.parent / "shared" / "data"
DECISIONS: Final = DATA / "model" / "nccl_default_decisions.csv"
#: Sweeps of real machines that say what the default was: the machine that describes them, and how
#: their source knows. B300's calls everything NVLS without having looked at NCCL's log.
SEEN: Final = {
    "rtx5090_socket_tables.csv": ("rtx5090-sockets", "read_back"),
    "b300_nvlink_allreduce.csv": ("b300", "stated"),
}


def figures(data: Path = DATA) -> dict[str, float | int | str | None]:
    """Shares that agree (0..1) and relative errors of costs. Raises MissingPath without the data.

    `default_agreement` counts algorithm and protocol on all decisions, `_held_out` on sizes that
    are no power of two, `default_channels_agreement` the channels too; `default_read_back_*` and
    `default_stated_*` are what sources say of real machines.
    """
    verdicts = judge(read_decisions(data / "model" / DECISIONS.name))
    held_out = [verdict for verdict in verdicts if verdict.decision.held_out]
    errors = sorted(error for verdict in verdicts for error in verdict.cost_errors)
    found: dict[str, float | int | str | None] = {
        "default_agreement": _share(verdicts),
        "default_agreement_held_out": _share(held_out),
        "default_decisions": len(verdicts),
        "default_decisions_held_out": len(held_out),
        "default_channels_agreement": _mean([v.channels_agree for v in verdicts]),
        "default_cost_error_median": statistics.median(errors),
        "default_cost_error_max": errors[-1],
    }
    for system in dict.fromkeys(verdict.decision.system for verdict in verdicts):
        part = [verdict for verdict in verdicts if verdict.decision.system == system]
        key = system.replace(" ", "_")
        found[f"default_agreement_{key}"] = _share(part)
        found[f"default_channels_agreement_{key}"] = _mean([v.channels_agree for v in part])
    for name, (machine, how) in SEEN.items():
        agreed = [told == ran for _, told, ran in seen_choices(data, name)]
        found[f"default_{how}_agreement_{machine}"] = _mean(agreed)
        found[f"default_{how}_choices_{machine}"] = len(agreed)
    return found


def disagreements(data: Path = DATA) -> list[str]:
    """Every decision that the model does not share, one line each."""
    verdicts = judge(read_decisions(data / "model" / DECISIONS.name))
    lines = [_difference(verdict) for verdict in verdicts if not verdict.channels_agree]
    for name, (machine, how) in SEEN.items():
        lines.extend(
            f"{machine} {where}: {told.key} {how.replace('_', ' ')}, {ran.key} by the model"
            for where, told, ran in seen_choices(data, name)
            if told != ran
        )
    return lines


def seen_choices(data: Path, name: str) -> Iterator[tuple[str, Config, Config]]:
    """Default rows of a sweep that name what ran: where, what the source says, and the model.

    The model's answer is cut down to the knobs that the source names.
    """
    path = data / "sweeps" / name
    if not path.is_file():
        raise MissingPath("sweep", path, "it holds what real machines chose")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["is_default"] != "true" or not row["algorithm"]:
            continue
        group = Group(int(row["num_nodes"]), int(row["ranks_per_node"]))
        call = Call(group, Collective.parse(row["collective"]), int(row["size_bytes"]))
        model = CostModel(NcclVersion.parse(row["nccl_version"]), find_machine(SEEN[name][0]))
        ran = model.resolve(call, ABSTAIN)
        told = Config(
            Algorithm.parse(row["algorithm"]),
            Protocol.parse(row["protocol"]) if row["protocol"] else None,
            int(row["num_channels"]) if row["num_channels"] else None,
        )
        where = f"{row['run']} {group.num_nodes}x{group.ranks_per_node} {_call(call)}"
        yield where, told, _like(told, ran)


def _like(told: Config, ran: Config) -> Config:
    protocol = ran.protocol if told.protocol is not None else None
    return Config(
        ran.algorithm, protocol, ran.num_channels if told.num_channels is not None else None
    )


def _share(verdicts: Sequence[Verdict]) -> float:
    return _mean([verdict.agrees for verdict in verdicts])


def _mean(agreed: Sequence[bool]) -> float:
    return sum(agreed) / len(agreed)


def _call(call: Call) -> str:
    return f"{call.collective.wire} {call.size_bytes} B"


def _difference(verdict: Verdict) -> str:
    decision = verdict.decision
    where = f"{decision.system} {_call(decision.call)}"
    return f"{where}: {decision.chosen.key} by NCCL, {verdict.answer.key} by the model"


def main() -> None:
    """Print the figures and what disagrees."""
    console = Console(soft_wrap=True)
    table = Table("figure", "value", title="NCCL's default")
    for key, value in figures().items():
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    lines = disagreements()
    console.print(f"{len(lines)} disagreements")
    for line in lines:
        console.print(f"  {line}", highlight=False)


if __name__ == "__main__":
    main()
