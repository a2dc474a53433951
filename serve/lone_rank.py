"""One rank by itself, with nobody to agree with: for parity checks, the demo and benchmarks.

In a job the plugin acts only when all ranks have agreed. A single process that plays NCCL for one
rank says instead that it has seen to that itself (DYNAMICCL_UNSAFE), with a pre-flight's word.
"""

from pathlib import Path

from dynamiccl.datasets.provenance import file_sha256
from dynamiccl.machine import ThisMachine
from dynamiccl.serve.plugin_index import PluginIndex
from dynamiccl.serve.table import DecisionTable, relative_path
from dynamiccl.serve.this_machine import ask_probe

_NO_MANIFEST = "0" * 64


def lone_environment(plugin: Path, artifact: Path, system: str) -> dict[str, str | None]:
    """The environment of a rank that uses `artifact` unasked, as on a machine of `system`.

    The artifact is bound to this machine; so it is to be a copy, or one's own.
    """
    fingerprint = str(ask_probe(ThisMachine(), plugin)["fingerprint"])
    PluginIndex.read(artifact).bound(system, fingerprint).write(artifact)
    said = ask_probe(ThisMachine(), plugin, artifact=artifact)
    return {
        "DYNAMICCL_ARTIFACT": str(artifact),
        "DYNAMICCL_SYSTEM": system,
        "DYNAMICCL_MODE": None,
        "DYNAMICCL_DISABLE": None,
        "DYNAMICCL_COORDINATOR": "none",
        "DYNAMICCL_UNSAFE": "1",
        "DYNAMICCL_ARTIFACT_SHA256": said["artifact_sha256"],
        "DYNAMICCL_PREFLIGHT": said["preflight"],
    }


def write_bare_artifact(artifact: Path, system: str, table: DecisionTable) -> None:
    """An artifact of one table, without the policy that decided it: all that the plugin reads."""
    key = (system, table.num_nodes, table.num_ranks)
    path = artifact / relative_path(*key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(table.to_bytes())
    tables = {key: file_sha256(path)}
    PluginIndex(_NO_MANIFEST, systems={}, noise_ppm={}, tables=tables).write(artifact)
