"""Makes something once a test session, across the workers of pytest-xdist.

once(tmp_path_factory, "trained", make)     make(folder) runs in one worker; all get the folder
with locked(path): ...                      one process at a time, for a shared build directory
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def session_dir(factory: pytest.TempPathFactory) -> Path:
    """The temporary directory that all workers of this session have in common."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; the kernel gives it back if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder filled by `make`, in this process or in the first one that asked.

    Users must not change it. Where `make` fails, the next process tries again.
    """
    folder = session_dir(factory) / "once" / name
    done = folder.with_name(f"{name}.done")
    with locked(folder.with_name(f"{name}.lock")):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            make(folder)
            done.touch()
    return folder
