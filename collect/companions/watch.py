"""Samplers of telemetry on every node while a sweep runs, and what they say of a time."""

import logging
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol, Self

import pyarrow as pa

from dynamiccl.collect.companions.nodes import Nodes
from dynamiccl.collect.telemetry.companion import HELLO
from dynamiccl.collect.telemetry.counters import CLOCK_REASONS, ECC_UNCORRECTED
from dynamiccl.collect.telemetry.sampler import SLOW_PERIOD_S, sampler_argv
from dynamiccl.collect.telemetry.samples import Samples, read_samples
from dynamiccl.collect.telemetry.windows import (
    UNKNOWN,
    Health,
    Window,
    health,
    telemetry_table,
    worst,
)
from dynamiccl.errors import CorruptFile

_log = logging.getLogger(__name__)

#: How long the first reading of a sampler is waited for: readings must lie before the first trial.
_FIRST_READING_S: Final = 20.0
_LOOK_S: Final = 0.05
#: How long after a launch the readings that close it may take: a slow one, and its writing.
_NEXT_READING_S: Final = 1.25 * SLOW_PERIOD_S


class Watch(Protocol):
    """What knows how the nodes were meanwhile."""

    def health(self, stretches: Sequence[tuple[float, float]]) -> list[Health]:
        """A verdict on each (begin, end), Unix seconds."""

    def table(self, windows: Sequence[Window], *, system: str, sweep: str) -> pa.Table | None:
        """The readings of each window; None without any."""

    def forget(self) -> None:
        """Drop what was read: it is in the parts that it belongs to."""


class NoWatch:
    """Nobody watches: nothing is known."""

    def health(self, stretches: Sequence[tuple[float, float]]) -> list[Health]:
        """Unknown, every time."""
        return [UNKNOWN] * len(stretches)

    def table(self, windows: Sequence[Window], *, system: str, sweep: str) -> pa.Table | None:  # noqa: ARG002
        """Nothing."""
        return None

    def forget(self) -> None:
        """Nothing to drop."""


class NodeWatch:
    """A sampler on each node; a context manager around a run."""

    def __init__(self, nodes: Nodes, num_nodes: int, rate_hz: float, folder: Path) -> None:
        """Take where samplers run, how often they read, and where they write."""
        self._nodes = nodes
        self._num_nodes = num_nodes
        self._rate_hz = rate_hz
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start the samplers, and wait for their first readings."""
        self._folder.mkdir(parents=True, exist_ok=True)
        mark = f"{time.time_ns()}"
        out = self._folder.resolve() / f"{mark}.{{host}}.samples"
        argv = sampler_argv(out, self._rate_hz)
        log = self._folder / "samplers.log"
        self._process = self._nodes.start(argv, self._num_nodes, log=log)
        try:
            self._greet(self._process)
            self._await_readings(self._process, mark)
        except BaseException:
            self._nodes.end(self._process)
            raise
        if not self._all_read(mark):
            words = log.read_text(errors="replace").strip().splitlines()[-2:]
            _log.warning("no telemetry: the samplers do not write (%s)", " | ".join(words))
        return self

    def __exit__(self, *_: object) -> None:
        """End the samplers."""
        if self._process is not None:
            self._nodes.end(self._process)

    def health(self, stretches: Sequence[tuple[float, float]]) -> list[Health]:
        """A verdict on each stretch: the worst of all nodes; unknown where one is silent."""
        if not stretches:
            return []
        self._await_closing_readings(max(end for _, end in stretches))
        nodes = list(self._read(min(begin for begin, _ in stretches)))
        silent = [UNKNOWN] * (self._num_nodes - len(nodes))
        return [
            worst([*(health(node, begin, end) for node in nodes), *silent])
            for begin, end in stretches
        ]

    def table(self, windows: Sequence[Window], *, system: str, sweep: str) -> pa.Table | None:
        """The readings of each window on every node."""
        if not windows:
            return None
        since = min(window.begin_s for window in windows)
        parts = [
            telemetry_table(node, windows, system=system, sweep=sweep) for node in self._read(since)
        ]
        full = [part for part in parts if part.num_rows]
        return pa.concat_tables(full) if full else None

    def forget(self) -> None:
        """Remove the samplers' files; a night of readings is larger than its measurements."""
        for path in self._files():
            path.unlink()

    @staticmethod
    def _greet(process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        # One that has ended already is seen by its silence, and its log says why.
        with suppress(BrokenPipeError):
            process.stdin.write(HELLO)
            process.stdin.flush()

    def _await_readings(self, process: subprocess.Popen[bytes], mark: str) -> None:
        deadline = time.monotonic() + _FIRST_READING_S
        while not self._all_read(mark) and time.monotonic() < deadline:
            if process.poll() is not None:
                return
            time.sleep(_LOOK_S)

    def _await_closing_readings(self, end_s: float) -> None:
        """Wait, for a moment, until every node was read after `end_s`.

        Only the reading after it tells what happened in the last second of a launch.
        """
        while time.time() < end_s + _NEXT_READING_S:
            if self._process is None or self._process.poll() is not None:
                return
            nodes = list(self._read(end_s))
            if len(nodes) >= self._num_nodes and not any(_is_behind(n, end_s) for n in nodes):
                return
            time.sleep(_LOOK_S)

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*.samples"))

    def _all_read(self, mark: str) -> bool:
        """Whether every sampler of this run has read something."""
        files = list(self._folder.glob(f"{mark}.*.samples"))
        # The key record names the group, and each tick has its values.
        named = [path.read_bytes().count(b'"fast":[') for path in files]
        return len(files) >= self._num_nodes and all(count >= 2 for count in named)

    def _read(self, since_s: float) -> Iterable[Samples]:
        for path in self._files():
            # A file of an earlier run, whose sampler is long gone, has nothing to say.
            if path.stat().st_mtime < since_s:
                continue
            try:
                yield read_samples(path, since_s)
            except CorruptFile as error:
                _log.warning("telemetry left out: %s", error)


def _is_behind(node: Samples, end_s: float) -> bool:
    """Whether a GPU that is read has not been read since then."""
    return any(
        series.times_s[-1] < end_s
        for counter in (CLOCK_REASONS, ECC_UNCORRECTED)
        for series in node.counter(counter).values()
        if len(series.times_s)
    )
