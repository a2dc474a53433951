"""Facts about the nodes of a sweep, and whether the job has them exclusively."""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dynamiccl.collect.companions.nodes import Nodes
from dynamiccl.collect.telemetry.node import NodeFacts, node_argv
from dynamiccl.errors import CorruptFile, MachineError
from dynamiccl.slurm import capture

_log = logging.getLogger(__name__)

#: `OverSubscribe` of `scontrol show job` for a job that shares its nodes with nobody (slurm.conf(5)
#: and `src/api/job_info.c`, Slurm 22.05 to 24.11).
_ALONE: Final = frozenset({"NO", "EXCLUSIVE"})
_SCONTROL_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """What is known of the nodes before anything runs."""

    #: Environment columns that all nodes agree on.
    columns: Mapping[str, Any]
    #: GPUs of a node, where all have as many.
    num_gpus: int | None


def ask_nodes(nodes: Nodes, num_nodes: int, environ: Mapping[str, str]) -> SiteFacts:
    """Ask each node what it is; columns on which nodes differ are left out, with a warning."""
    found = [facts for line in nodes.ask(node_argv(), num_nodes) if (facts := _facts(line))]
    if len(found) < num_nodes:
        _log.warning("only %d of %d nodes reported their facts", len(found), num_nodes)
    columns = agreed(found)
    alone = exclusive(environ)
    if alone is not None:
        columns["exclusive_node"] = alone
        if not alone:
            _log.warning(
                "the nodes are shared with other jobs: rows are flagged and kept out of verdicts "
                "on NCCL's default; ask for --exclusive"
            )
    if "SLURM_JOB_ID" in environ:
        columns["job_id"] = environ["SLURM_JOB_ID"]
    gpus = {facts.num_gpus for facts in found}
    return SiteFacts(columns, gpus.pop() if len(gpus) == 1 else None)


def agreed(nodes: Sequence[NodeFacts]) -> dict[str, Any]:
    """The environment columns that are equal on all nodes (pure); MIG on any node counts as MIG."""
    rows = [node.row_columns() for node in nodes]
    if not rows:
        return {}
    same = {
        name: value
        for name, value in rows[0].items()
        if all(name in row and row[name] == value for row in rows)
    }
    differing = sorted({name for row in rows for name in row} - same.keys())
    if differing:
        _log.warning("the nodes differ in %s: not recorded", ", ".join(differing))
    if any(row.get("mig") for row in rows):
        same["mig"] = True
    return same


def exclusive(environ: Mapping[str, str]) -> bool | None:
    """Whether a Slurm job has its nodes exclusively; None outside of Slurm or if unknown."""
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    try:
        done = capture(("scontrol", "show", "job", "--oneliner", job), timeout_s=_SCONTROL_S)
    except MachineError as error:
        # As in a container, which has the job's variables and not Slurm's programs.
        _log.warning("not known whether the nodes are ours alone: %s", error)
        return None
    found = re.search(r"\bOverSubscribe=(\S+)", done.stdout)
    return None if found is None else found[1] in _ALONE


def environment() -> Mapping[str, str]:
    """The environment variables of this process, for `exclusive`."""
    return os.environ


def _facts(line: str) -> NodeFacts | None:
    # A launcher may say something of its own between the nodes' lines.
    if not line.startswith("{"):
        return None
    try:
        return NodeFacts.from_json(line)
    except CorruptFile as error:
        _log.warning("%s", error)
        return None
