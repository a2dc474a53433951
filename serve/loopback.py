"""All ranks of a communicator as threads of this process, for parity checks and benchmarks.

They agree as in a job, by a word of shared memory. Only NCCL is a stand-in: a library that says one
version.
"""

import ctypes
import platform
import secrets
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from dynamiccl.datasets.manifest import INDEX_NAME
from dynamiccl.datasets.store import file_sha256
from dynamiccl.serve.plugin_index import PluginIndex
from dynamiccl.serve.table import DecisionTable, relative_path

#: What the stand-in says that it is: a release that tells a tuner all that it can be told, and has
#: no AllGather whose number of channels must be left alone (from 2.29 on).
NCCL_CODE: Final = 22809
_NO_MANIFEST: Final = "0" * 64


def loopback_environment(artifact: Path, system: str) -> dict[str, str | None]:
    """The environment of ranks of this process that use `artifact`, as on a machine of `system`."""
    _load_nccl()
    return {
        "DYNAMICCL_JOB": secrets.token_hex(8),
        **prepared_environment(artifact, system, NCCL_CODE),
        "DYNAMICCL_WORD": "all",
        **dict.fromkeys(f"DYNAMICCL_{name}" for name in ("DISABLE", "KILL_FILE", "PROBLEM")),
        "NCCL_COMM_ID": None,
    }


def prepared_environment(artifact: Path, system: str, nccl_code: int) -> dict[str, str]:
    """What dynamiccl-run would prepare on a machine of `system` with that NCCL."""
    return {
        "DYNAMICCL_HOST": platform.node(),
        "DYNAMICCL_MACHINE": "loopback",
        "DYNAMICCL_SYSTEMS": f"{nccl_code}={system}",
        "DYNAMICCL_TABLES": str(artifact.resolve() / "tables"),
        "DYNAMICCL_INDEX": file_sha256(artifact / INDEX_NAME)[:16],
    }


@cache
def _load_nccl() -> "TemporaryDirectory[str]":
    """Load a stand-in NCCL, once a process, where the tuner looks; it is removed with that."""
    folder = TemporaryDirectory(prefix="dynamiccl-loopback-")
    source, library = (Path(folder.name) / name for name in ("nccl.c", "libnccl.so"))
    source.write_text(f"int ncclGetVersion(int *version) {{ *version = {NCCL_CODE}; return 0; }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    # No logger of an NCCL calls the tuner, so it looks among the program's own symbols.
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return folder


def write_bare_artifact(artifact: Path, system: str, table: DecisionTable) -> None:
    """Write an artifact of one table, without policy: all that the plugin reads."""
    key = (system, table.num_nodes, table.num_ranks)
    path = artifact / relative_path(*key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(table.to_bytes())
    tables = {key: file_sha256(path)}
    PluginIndex(_NO_MANIFEST, systems={}, noise_ppm={}, tables=tables).write(artifact)
