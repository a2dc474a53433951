"""Writes what goldens keep: all of them, or those whose names begin with an argument."""

import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.golden.registry import GOLDENS


def main(prefixes: list[str]) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    chosen = [g for g in GOLDENS if not prefixes or g.name.startswith(tuple(prefixes))]
    if not chosen:
        sys.stderr.write(f"error: no golden begins with {' or '.join(prefixes)}; there are:\n")
        sys.stderr.writelines(f"  {golden.name}\n" for golden in GOLDENS)
        return 2
    for golden in chosen:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            try:
                path = golden.write(Path(directory))
            except pytest.skip.Exception as absent:
                sys.stderr.write(f"{golden.name}: not written, what was kept stays: {absent}\n")
                continue
        seconds = time.monotonic() - begun
        sys.stderr.write(f"{path.name}: {path.stat().st_size} B, {seconds:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
