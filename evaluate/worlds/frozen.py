"""The frozen version worlds-1: names, draws, and hashes of all draws.

A draw's seed is its number; the splits are those of datasets/splits.py. If numpy, the simulator or
a split changes, draws are no longer what they were, and figures of before and after cannot be
compared: worlds-1.json holds what each draw was when the version was made. Logarithms of times are
rounded to 1e-6, so that another processor's last bits are no change. For another version:
`python benchmarks/freeze_worlds.py`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.evaluate.worlds.draws import Draw

VERSION: Final = "worlds-1"
#: Of each world.
DRAWS: Final = 20
_DIGITS: Final = 6
_PARTS: Final = {
    "questions": "the test questions",
    "truth": "the true times",
    "train": "the times to learn from",
}


def digests(draw: Draw) -> dict[str, str]:
    """SHA-256 of a draw's questions, true times and training times."""
    questions = [
        f"{task} {' '.join(choices)}"
        for task, choices in zip(draw.tasks, draw.choices, strict=True)
    ]
    return {
        "questions": _sha256("\n".join(questions).encode()),
        "truth": _of_times([draw.truth.times_us]),
        "train": _of_times([draw.training.times_us, draw.validation.times_us]),
    }


def drifted(draw: Draw) -> list[str]:
    """What of a draw differs from the frozen version; empty if nothing does."""
    frozen = known()[draw.world][draw.number]
    return [
        f"{draw.name}: {_PARTS[part]} are not those of {VERSION} (SHA-256 {digest[:12]}, frozen "
        f"{frozen[part][:12]})"
        for part, digest in digests(draw).items()
        if digest != frozen[part]
    ]


def known() -> Mapping[str, list[dict[str, str]]]:
    """World -> the `digests` of each draw."""
    text = (resources.files(__package__) / f"{VERSION}.json").read_text(encoding="utf-8")
    read: dict[str, Any] = json.loads(text)
    return read


def _of_times(grids: Iterable[npt.NDArray[np.float64]]) -> str:
    # What was not measured is no number, and must stay one that no time is.
    logs = np.concatenate([np.log(grid).ravel() for grid in grids])
    whole = np.round(logs * 10**_DIGITS)
    return _sha256(np.where(np.isnan(whole), -(2.0**62), whole).astype("<i8").tobytes())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
