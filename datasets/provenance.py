"""Provenance record (commit, versions, host) that every written file contains."""

import hashlib
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import dynamiccl


@cache
def git_commit(folder: Path | None = None) -> str:
    """Commit of the running source, '+dirty' when it was changed; 'unknown' outside git.

    Cached for the process: the code that runs is the one read at its start.
    """
    root = folder or Path(dynamiccl.__file__).resolve().parent
    try:
        head = _git(root, "rev-parse", "HEAD")
        dirty = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+dirty" if dirty else head


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def program_record(tool: str, **facts: Any) -> dict[str, Any]:
    """The program that wrote a part: our version and commit, Python, platform, and `facts`.

    Equal for every run of the same program.
    """
    return {
        "tool": tool,
        "dynamiccl_version": dynamiccl.__version__,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **facts,
    }


def run_record(tool: str, **facts: Any) -> dict[str, Any]:
    """`program_record`, and where and how the run was started."""
    return program_record(tool, host=platform.node(), argv=sys.argv, **facts)
