"""Files that are never half written, and children that do not outlive who started them."""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIBC = ctypes.CDLL(None)


@contextmanager
def replacing(path: Path, *, is_synced: bool = False) -> Iterator[Path]:
    """A hidden name, which takes the place of `path` where all went well; `is_synced` before."""
    hidden = path.with_name(f".writing-{path.name}")
    try:
        yield hidden
        if is_synced:
            with hidden.open("rb") as file:
                os.fsync(file.fileno())
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel signal this process when the thread that started it ends; takes no lock."""
    _LIBC.prctl(1, number)  # PR_SET_PDEATHSIG
