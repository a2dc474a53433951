"""What Python's library lacks: files that are never half written, and children that do not stay."""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)


@contextmanager
def replacing(path: Path, *, is_synced: bool = False) -> Iterator[Path]:
    """A hidden name beside `path` to write to; it takes the place of `path` where all went well.

    So a reader never sees half a file, and what a full disk refused takes no room. `is_synced`: it
    is on disk before, for what a power cut must not lose.
    """
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
    """Let the kernel send this process a signal when the thread that started it ends (prctl(2)).

    It takes no lock, so it may run between fork and exec.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
