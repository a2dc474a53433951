"""All goldens; writes what they keep, of all or of those whose names begin with an argument."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Final

import pytest

from tests.golden import commands, logs, sweeps, tables

GOLDENS: Final = (*commands.GOLDENS, *logs.GOLDENS, *sweeps.GOLDENS, *tables.GOLDENS)


def main(prefixes: list[str]) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    for golden in GOLDENS:
        if prefixes and not golden.name.startswith(tuple(prefixes)):
            continue
        with tempfile.TemporaryDirectory() as directory:
            try:
                golden.write(Path(directory))
                sys.stderr.write(f"{golden.name}\n")
            except pytest.skip.Exception as absent:
                sys.stderr.write(f"{golden.name}: what was kept stays: {absent}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
