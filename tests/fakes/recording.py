"""Builds the recording tuner, once a session."""

import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("recording_tuner.cpp")
_ABI = Path(__file__).parents[2] / "serve" / "plugin" / "nccl"


def compiler() -> str | None:
    """A C++ compiler, or None when there is none."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def build_recorder(folder: Path) -> Path:
    """Compile it into `folder`; needs a compiler."""
    found = compiler()
    assert found is not None
    library = folder / "librecorder.so"
    subprocess.run(
        [found, "-std=c++17", "-shared", "-fPIC", "-O1", f"-I{_ABI}", str(_SOURCE), "-o", library],
        check=True,
    )
    return library
