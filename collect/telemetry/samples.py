"""Reading a sampler's file back, from any moment on."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.telemetry.record import FORMAT, KEY_PERIOD_S
from dynamiccl.errors import CorruptFile, MissingPath

Floats = npt.NDArray[np.float64]
#: (device, counter).
Key = tuple[str, str]
#: By how much a line may be older than one above it (PCIe lines are written late), in seconds.
_DISORDER_S: Final = 2.0
#: Bisection ends in a stretch that is read faster than searched.
_NEAR_BYTES: Final = 65536
_NOT_READINGS: Final = frozenset({"t", "sampler", "columns", "errors"})


@dataclass(frozen=True, slots=True)
class Series:
    """One counter of one device: Unix times in seconds, ascending, and the values read then."""

    times_s: Floats  # (N,)
    values: Floats  # (N,)


@dataclass(frozen=True, slots=True)
class ReadError:
    """Something that could not be read, and why: a fact about the node."""

    device: str
    counter: str
    error: str


@dataclass(frozen=True, slots=True)
class Samples:
    """What a sampler wrote about one node."""

    host: str
    rate_hz: float
    series: Mapping[Key, Series]
    errors: tuple[ReadError, ...]

    def counter(self, name: str) -> dict[str, Series]:
        """The series of one counter, by device."""
        return {device: s for (device, counter), s in self.series.items() if counter == name}


def read_samples(path: Path, since_s: float | None = None) -> Samples:
    """Read a sampler's file: all of it, or what was read since a Unix time.

    With `since_s` a little of what was read before is there too, and the rest of the file is not
    gone through. The sampler may still be writing, or have been killed: a torn last line is left
    out. Raises MissingPath, and CorruptFile for a line that is no record or another format.
    """
    if not path.is_file():
        raise MissingPath("telemetry file", path, "was the sampler started, and could it write?")
    building = _Building(path, -math.inf if since_s is None else since_s - _DISORDER_S)
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        # From a key record before it on: without one the columns are not known.
        start = 0 if since_s is None else _seek(file, path, end, since_s - 2 * KEY_PERIOD_S)
        for record in _records(file, path, start, end):
            building.add(record)
    return building.samples()


class _Building:
    def __init__(self, path: Path, since_s: float) -> None:
        self._path = path
        self._since_s = since_s
        self._about: dict[str, Any] | None = None
        self._columns: dict[str, list[Key]] = {}
        self._times: dict[str, list[float]] = {}
        self._rows: dict[str, list[list[float | None]]] = {}
        self._errors: dict[ReadError, None] = {}
        self._done: list[tuple[Key, Floats, Floats]] = []

    def add(self, record: dict[str, Any]) -> None:
        if "sampler" in record:
            self._begin(record["sampler"])
        for error in record.get("errors", ()):
            self._errors[ReadError(*error)] = None
        for group, columns in record.get("columns", {}).items():
            keys = [(device, counter) for device, counter in columns]
            if self._columns.get(group) != keys:
                self._close(group)
                self._columns[group] = keys
        if record["t"] >= self._since_s:
            for group in record.keys() - _NOT_READINGS:
                self._times.setdefault(group, []).append(record["t"])
                self._rows.setdefault(group, []).append(record[group])

    def _begin(self, about: dict[str, Any]) -> None:
        if about.get("format") != FORMAT:
            raise CorruptFile(
                f"{self._path} has telemetry format {about.get('format')}, this release reads "
                f"{FORMAT}; read it with the release that wrote it"
            )
        self._about = about

    def _close(self, group: str) -> None:
        """Turn what was read of a group into arrays: it begins anew, or the file is at its end."""
        rows = self._rows.pop(group, [])
        times = np.asarray(self._times.pop(group, []), dtype=np.float64)
        if not rows:
            return
        try:
            table = np.asarray(rows, dtype=np.float64)  # None becomes NaN
            assert table.shape == (len(times), len(self._columns[group]))
        except (ValueError, KeyError, AssertionError) as error:
            raise CorruptFile(
                f"{self._path}: lines of group '{group}' do not fit its columns; remove the file"
            ) from error
        for index, key in enumerate(self._columns[group]):
            self._done.append((key, times, table[:, index]))

    def samples(self) -> Samples:
        if self._about is None:
            raise CorruptFile(f"{self._path} is no sampler's file: its first line is missing")
        for group in list(self._rows):
            self._close(group)
        series: dict[Key, Series] = {}
        for key in dict.fromkeys(key for key, _, _ in self._done):
            parts = [(t, v) for other, t, v in self._done if other == key]
            times = np.concatenate([t for t, _ in parts])
            values = np.concatenate([v for _, v in parts])
            there = ~np.isnan(values)
            order = np.argsort(times[there], kind="stable")
            series[key] = Series(times[there][order], values[there][order])
        return Samples(
            host=self._about["host"],
            rate_hz=float(self._about["rate_hz"]),
            series=series,
            errors=tuple(self._errors),
        )


def _records(file: BinaryIO, path: Path, start: int, end: int) -> Iterator[dict[str, Any]]:
    """Whole lines from `start` to `end`, decoded; leaves the file behind the last one given."""
    file.seek(start)
    while (at := file.tell()) < end:
        line = file.readline()
        if not line.endswith(b"\n") or at + len(line) > end:
            return
        record = _decode(line)
        if record is not None:
            yield record
        elif not _was_torn(file, end):
            raise CorruptFile(f"{path} is damaged at byte {at}: a line is no record; remove it")


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "t" in record else None


def _was_torn(file: BinaryIO, end: int) -> bool:
    """Whether a new sampler starts here: then the line above is one that a crash tore off."""
    at = file.tell()
    if at >= end:
        return False
    following = _decode(file.readline())
    file.seek(at)
    return following is not None and "sampler" in following


def _seek(file: BinaryIO, path: Path, end: int, time_s: float) -> int:
    """Where a line begins before which all is older than `time_s`: bisection on bytes."""
    low, high = 0, end
    while high - low > _NEAR_BYTES:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        begin = file.tell()
        record = next(_records(file, path, begin, high), None)
        if record is None or record["t"] >= time_s:
            high = middle
        else:
            low = begin
    return low
