"""Files that are never half written, and children that do not outlive who started them."""

import ctypes
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

#: How names begin of what is being written, which nobody may read.
WRITING: Final = ".writing-"
#: What nobody wrote to for so long, a killed writer left; it takes seconds.
_LEFT_S: Final = 3600.0
#: Looked up here: a child between fork and exec may take no lock.
_PRCTL: Final = ctypes.CDLL(None).prctl


@contextmanager
def replacing(path: Path, *, is_synced: bool = False) -> Iterator[Path]:
    """A hidden name beside `path` to write to, which takes its place where all went well.

    Each writer has its own; of several the last one's stays. `is_synced`: it is on disk before,
    for what a power cut must not lose.
    """
    clear_leftovers(path.parent)
    hidden = path.with_name(f"{WRITING}{secrets.token_hex(16)}")
    try:
        yield hidden
        if is_synced:
            with hidden.open("rb") as file:
                os.fsync(file.fileno())
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)


def clear_leftovers(folder: Path) -> None:
    """Remove what writers into `folder` left that were killed an hour ago or longer."""
    for left in folder.glob(f"{WRITING}*"):
        with suppress(OSError):  # another one removed it, or may
            if time.time() - left.lstat().st_mtime < _LEFT_S:
                continue
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()


def toml_names(folder: Traversable) -> list[str]:
    """Names of the TOML files in a folder, sorted; an editor's backup is none."""
    names = (file.name for file in folder.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel signal this process when the thread that started it ends; takes no lock."""
    _PRCTL(1, number)  # PR_SET_PDEATHSIG
