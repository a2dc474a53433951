"""Installs the stand-in's programs into a folder, as a build of nccl-tests."""

import shlex
import sys
from pathlib import Path

from tests.fakes.nccl_tests.program import PROGRAMS

_START = Path(__file__).with_name("start.py")


def install_stand_in(folder: Path) -> Path:
    """Write one executable for each program into `folder`, and return it.

    Each runs this interpreter by its absolute path, so it works under any launcher and PATH.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        script = folder / name
        command = shlex.join([sys.executable, "-P", str(_START)])
        script.write_text(f'#!/bin/sh\nexec {command} "$0" "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    return folder
