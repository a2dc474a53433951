"""The sampler's file: JSON lines, one for each tick, written whole and (nearly) in time order.

    {"t": 1760000000.1, "sampler": {"format": 1, "host": "n1", "rate_hz": 10.0, "pid": 77}}
    {"t": 1760000000.2, "errors": [["gpu0", "mig_mode", "nvmlDeviceGetMigMode: Not Supported"]]}
    {"t": 1760000000.2, "sampler": {...}, "errors": [...], "columns": {"fast": [["gpu0",
        "sm_clock_mhz"], ...], "slow": [...]}}
    {"t": 1760000000.3, "fast": [1980, ...], "slow": [0, ...]}
    {"t": 1760000000.4, "fast": [1980, ...]}

`t` is Unix time in seconds, taken before the readings of its line. A line is one write(2) to a file
that is only appended to, so that kill -9 leaves whole lines; a reader drops a torn last one. PCIe
lines come from a thread of their own, stamped up to 40 ms before they are written. What a reader
must know of a sampler stands in a *key record*, again every KEY_PERIOD_S, so that one can begin in
the middle of a night's file.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

FORMAT: Final = 1
KEY_PERIOD_S: Final = 30.0


class Recorder:
    """Appends records to a file; a context manager. Any thread may add."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Say where to; the file is made, or added to."""
        self._path = path
        self._clock = clock
        self._file = -1
        self._errors: list[tuple[str, str, str]] = []

    def __enter__(self) -> Self:
        """Open the file, and close off a line that an earlier sampler left torn."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the file."""
        os.close(self._file)

    def now(self) -> float:
        """The time to stamp a record with, taken before its readings."""
        return self._clock()

    def add(self, what: Mapping[str, Any], *, time_s: float | None = None) -> None:
        """Write one record; raises OSError when the disk is full."""
        stamp = self._clock() if time_s is None else time_s
        line = json.dumps({"t": round(stamp, 4), **what}, separators=(",", ":"), allow_nan=False)
        data = line.encode() + b"\n"
        written = os.write(self._file, data)
        if written != len(data):
            raise OSError(f"{self._path}: only {written} of {len(data)} bytes could be written")

    def error(self, device: str, counter: str, error: str) -> None:
        """Record that something cannot be read: a fact, told once."""
        self._errors.append((device, counter, error))
        self.add({"errors": [(device, counter, error)]})

    def key(self, about: Mapping[str, Any], columns: Mapping[str, list[tuple[str, str]]]) -> None:
        """Write a key record: the sampler, its columns by group, and all errors until now."""
        self.add({"sampler": dict(about), "errors": self._errors, "columns": dict(columns)})


def tidy(values: list[float | None]) -> list[float | int | None]:
    """Whole numbers without their '.0', and no more digits than a counter has.

    >>> tidy([1980.0, 71.20000000000001, None])
    [1980, 71.2, None]
    """
    return [
        None if v is None else int(v) if v == int(v) else round(v, 3)  # a reading is never inf
        for v in values
    ]
