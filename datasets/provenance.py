"""Where a file comes from: commit, versions, host. It travels inside every file that we write."""

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import dynamiccl


def git_commit(folder: Path | None = None) -> str:
    """Commit of the running source, '+dirty' when it was changed; 'unknown' outside git."""
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


def provenance(tool: str, **facts: Any) -> dict[str, Any]:
    """The record that is stored with a part: our version and commit, the host, and `facts`."""
    return {
        "tool": tool,
        "dynamiccl_version": dynamiccl.__version__,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "argv": sys.argv,
        **facts,
    }
