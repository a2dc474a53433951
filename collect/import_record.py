"""Where the parts of an import come from: program, version, commit, machine, and input files."""

import hashlib
import platform
from pathlib import Path
from typing import Any, Final

import dynamiccl

_BLOCK_BYTES: Final = 1 << 20


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def import_record(commit: str, files: dict[str, str]) -> dict[str, Any]:
    """The record written with each part; `files` maps the name of each input to its SHA-256.

    Unlike the record of a sweep, it has no command line and no host name: importing a file again,
    from wherever, writes the same part again and not a second one.
    """
    return {
        "tool": "import",
        "dynamiccl_version": dynamiccl.__version__,
        "git_commit": commit,
        "files": files,
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
