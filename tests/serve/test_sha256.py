"""SHA-256 of what dynamiccl-run starts, against Python's."""

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np


def test_hashes_are_pythons(build_dir: Callable[[str], Path]) -> None:
    random = np.random.default_rng(11)
    sizes = [*range(200), *(int(size) for size in random.integers(200, 20_000, size=200))]
    cases = [
        (random.bytes(size), int(step))
        for size, step in zip(sizes, random.integers(1, 300, size=len(sizes)), strict=True)
    ]
    done = subprocess.run(
        [str(build_dir("") / "print_values"), "hashes"],
        input="".join(f"{message.hex() or '-'} {step}\n" for message, step in cases),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [hashlib.sha256(message).hexdigest() for message, _ in cases]
