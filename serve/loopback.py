"""All ranks of a communicator as threads of this process, for parity checks and benchmarks.

They agree as in a job, over loopback TCP. Only NCCL is a stand-in: a library that says one version.
"""

import ctypes
import secrets
import socket
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from dynamiccl.datasets.provenance import file_sha256
from dynamiccl.doctor import Machine
from dynamiccl.serve.plugin_index import PluginIndex
from dynamiccl.serve.table import DecisionTable, relative_path
from dynamiccl.serve.this_machine import ask_probe

#: What the stand-in says that it is: a release that tells a tuner all that it can be told, and has
#: no AllGather whose number of channels must be left alone (from 2.29 on).
NCCL_CODE: Final = 22809
_NO_MANIFEST: Final = "0" * 64


def loopback_environment(plugin: Path, artifact: Path, system: str) -> dict[str, str | None]:
    """The environment of ranks of this process that use `artifact`, as on a machine of `system`.

    The artifact is bound to this machine; so it is to be a copy, or one's own.
    """
    bind_here(plugin, artifact, system, NCCL_CODE)
    return {
        "DYNAMICCL_ARTIFACT": str(artifact),
        "DYNAMICCL_SYSTEM": system,
        "DYNAMICCL_DISABLE": None,
        "DYNAMICCL_KILL_FILE": None,
        "NCCL_COMM_ID": None,
        **_meeting_place(),
    }


@cache
def _meeting_place() -> dict[str, str]:
    """Make a stand-in NCCL, a key and a free port once a process; returns their variables."""
    folder = Path(_folder().name)
    source, library, key = (folder / name for name in ("nccl.c", "libnccl.so", "key"))
    source.write_text(f"int ncclGetVersion(int *version) {{ *version = {NCCL_CODE}; return 0; }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    # Where the tuner looks, since no logger of an NCCL calls it.
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    key.write_bytes(secrets.token_bytes(32))
    key.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return {
        "DYNAMICCL_COORDINATOR": f"127.0.0.1:{port}",
        "DYNAMICCL_KEY_FILE": str(key),
        "DYNAMICCL_JOB_ID": folder.name,
    }


@cache
def _folder() -> "TemporaryDirectory[str]":
    """A temporary directory that is removed when the process ends."""
    return TemporaryDirectory(prefix="dynamiccl-loopback-")


def bind_here(plugin: Path, artifact: Path, system: str, nccl_code: int) -> None:
    """Register this machine, with NCCL version `nccl_code` (0: none), as `system`."""
    here = str(ask_probe(Machine(), plugin)["fingerprint"]).partition(";nccl=")[0]
    PluginIndex.read(artifact).bound(system, f"{here};nccl={nccl_code}").write(artifact)


def write_bare_artifact(artifact: Path, system: str, table: DecisionTable) -> None:
    """Write an artifact of one table, without policy: all that the plugin reads."""
    key = (system, table.num_nodes, table.num_ranks)
    path = artifact / relative_path(*key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(table.to_bytes())
    tables = {key: file_sha256(path)}
    PluginIndex(_NO_MANIFEST, systems={}, noise_ppm={}, tables=tables).write(artifact)
