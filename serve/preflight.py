"""The pre-flight check: every rank prints what it has, and one process compares all lines.

Each rank prints `rank N {...}`; a single process reads and compares all lines. In the job the ranks
compare the same values once more, when they agree.
"""

import json
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dynamiccl.datasets.provenance import file_sha256
from dynamiccl.errors import MachineError, UserError
from dynamiccl.machine import Machine
from dynamiccl.serve.doctor import ASK_PLUGIN, Question
from dynamiccl.serve.this_machine import ask_probe, nccl_libraries

#: As the plugin looks for them, the first that is set counts.
_RANK: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")
_SIZE: Final = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS", "PMI_SIZE")
#: What all ranks must have alike.
COMPARED: Final = ("plugin_version", "plugin_sha256", "loads", "artifact_sha256", "fingerprint")
_LINE: Final = re.compile(r"\brank (\d+) (\{.*\})\s*$")


@dataclass(frozen=True, slots=True)
class Agreed:
    """The values that all ranks share."""

    num_ranks: int
    artifact_sha256: str
    system: str


def rank_line(machine: Machine, question: Question) -> str:
    """This rank's line; raises UserError when no launcher tells the rank."""
    rank, size = _number(machine.env, _RANK), _number(machine.env, _SIZE)
    if rank is None or size is None:
        raise UserError(
            f"no launcher says which rank this is (none of {', '.join(_RANK)} with its size is "
            "set); run it under srun, mpirun or torchrun"
        )
    if question.artifact is None:
        raise UserError("no artifact to compare: add ARTIFACT, or set DYNAMICCL_ARTIFACT")
    plugin = question.plugin
    loaded = machine.run(
        sys.executable, "-c", ASK_PLUGIN, str(plugin.resolve()), "ncclTunerPlugin_v2"
    )
    found = [lib for lib in nccl_libraries(machine, question.nccl) if lib.version is not None]
    nccl = found[0].path if found else None
    said = ask_probe(machine, plugin, nccl=nccl, artifact=question.artifact)
    said |= {
        "host": platform.node(),
        "num_ranks": size,
        "plugin_sha256": file_sha256(plugin),
        "loads": loaded.worked and "ncclTunerPlugin_v2" in loaded.output,
    }
    return f"rank {rank} {json.dumps(said)}"


def compare(lines: Iterable[str]) -> Agreed:
    """Check that all ranks have the same.

    Raises UserError when there is nothing to compare, and MachineError that names the ranks that
    differ and in what, missing ranks, or that the artifact does not know the machine.
    """
    said = _read(lines)
    if not said:
        raise UserError(
            "no line 'rank N {...}' to compare; pipe in what all ranks of "
            "'dynamiccl-deploy doctor --all-ranks' printed"
        )
    num_ranks = int(next(iter(said.values())).get("num_ranks", 0))
    silent = sorted(set(range(num_ranks)) - said.keys())
    if silent or len(said) != num_ranks:
        raise MachineError(
            f"{len(said)} of {num_ranks} ranks reported; missing: "
            f"{', '.join(map(str, silent[:8])) or 'one from elsewhere did'}"
        )
    problems = [_difference(said, name) for name in COMPARED]
    differing = "; ".join(text for text in problems if text)
    if differing:
        raise MachineError(f"the ranks are not alike: {differing}")
    first = said[0]
    if not first.get("loads"):
        raise MachineError("the plugin loads on no rank; run 'dynamiccl-deploy doctor' on a node")
    if "artifact_problem" in first:
        raise MachineError(f"the plugin refuses the artifact: {first['artifact_problem']}")
    if first.get("system") is None:
        raise MachineError(
            f"all {num_ranks} ranks are alike, and the artifact does not know their machine, so "
            f"they would abstain: '{first['fingerprint']}'; see 'dynamiccl-deploy bind'"
        )
    return Agreed(num_ranks, first["artifact_sha256"], first["system"])


def _read(lines: Iterable[str]) -> dict[int, Mapping[str, Any]]:
    said: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        # A launcher may put the rank's label in front, or say something of its own between.
        found = _LINE.search(line)
        if found is None:
            continue
        try:
            said[int(found[1])] = dict(json.loads(found[2]))
        except ValueError as error:
            raise UserError(f"the line of rank {found[1]} is cut off: {line[:120]}") from error
    return said


def _difference(said: Mapping[int, Mapping[str, Any]], name: str) -> str:
    """Which ranks have which value, where they differ; the smallest group first."""
    having: dict[str, list[int]] = defaultdict(list)
    for rank, values in sorted(said.items()):
        having[str(values.get(name))].append(rank)
    if len(having) == 1:
        return ""
    parts = []
    for value, ranks in sorted(having.items(), key=lambda item: len(item[1])):
        hosts = sorted({str(said[rank].get("host", "?")) for rank in ranks})
        shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
        parts.append(f"'{value}' on {', '.join(hosts[:3])} (rank {shown})")
    return f"{name} is {' and '.join(parts)}"


def _number(env: Mapping[str, str], names: Iterable[str]) -> int | None:
    found = next((env[name] for name in names if env.get(name)), "")
    return int(found) if found.isdecimal() else None
