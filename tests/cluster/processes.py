"""Processes of a cluster under test: they end with the test, and carry a mark."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def spawn_mortal(argv: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a program that ends when we do (PR_SET_PDEATHSIG); its output goes to `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", "--", *argv],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def processes_with(is_mark: Callable[[bytes], bool]) -> list[int]:
    """Living processes, other than we are, one of whose environment's NAME=VALUE is a mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environ = (entry / "environ").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # ended, or not to be looked at, hence not ours
            if any(is_mark(variable) for variable in environ):
                found.append(int(entry.name))
    return found
