"""Health samplers on every node while a sweep runs, and their verdict on a time interval."""

import logging
import math
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol, Self

from dynamiccl.collect.companions.nodes import Nodes
from dynamiccl.collect.ending import HELLO
from dynamiccl.collect.telemetry.health import (
    UNKNOWN,
    Health,
    NodeReadings,
    parse_reading,
    worst,
)
from dynamiccl.collect.telemetry.sampler import sampler_argv

_log = logging.getLogger(__name__)

#: How long the first reading of a sampler is waited for: readings must lie before the first trial.
_FIRST_READING_S: Final = 20.0
#: How long the reading that closes a launch may take, its way through the launcher included.
_NEXT_READING_S: Final = 1.25
#: How long the last words of ended samplers may take.
_END_S: Final = 10.0


class Watch(Protocol):
    """Reports the health of the nodes during given time intervals."""

    def health(self, stretches: Sequence[tuple[float, float]]) -> list[Health]:
        """The health in each (begin, end) interval, Unix seconds, in the order of time."""


class NoWatch:
    """No samplers: health is unknown."""

    def health(self, stretches: Sequence[tuple[float, float]]) -> list[Health]:
        """Unknown for every interval."""
        return [UNKNOWN] * len(stretches)


class NodeWatch:
    """A sampler process on each node; a context manager around a run."""

    def __init__(self, nodes: Nodes, num_nodes: int) -> None:
        """Take where samplers run."""
        self._nodes = nodes
        self._num_nodes = num_nodes
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = threading.Thread(target=self._listen, daemon=True)
        #: Guards what follows, and tells of news.
        self._heard = threading.Condition()
        self._readings: dict[str, NodeReadings] = {}
        self._last_words: deque[str] = deque(maxlen=2)
        self._is_over = False

    def __enter__(self) -> Self:
        """Start the samplers, and wait for their first readings."""
        self._process = self._nodes.start(sampler_argv(), self._num_nodes)
        try:
            self._reader.start()
            self._greet(self._process)
            if not self._await_readings(-math.inf, _FIRST_READING_S):
                words = " | ".join(self._last_words)
                _log.warning("no telemetry: the samplers do not write (%s)", words)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the samplers."""
        if self._process is not None:
            self._nodes.end(self._process)
            # A process that one left behind may hold the pipe open: then the thread stays with it.
            self._reader.join(timeout=_END_S)

    def health(self, stretches: Sequence[tuple[float, float]]) -> list[Health]:
        """The health in each interval: the worst of all nodes; unknown where a node is silent."""
        if not stretches:
            return []
        # Only the reading after it tells what happened at the end of a launch.
        self._await_readings(max(end for _, end in stretches), _NEXT_READING_S)
        with self._heard:
            for node in self._readings.values():
                node.forget_before(min(begin for begin, _ in stretches))
            silent = [UNKNOWN] * (self._num_nodes - len(self._readings))
            return [
                worst([*(node.health(*stretch) for node in self._readings.values()), *silent])
                for stretch in stretches
            ]

    @staticmethod
    def _greet(process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        # One that has ended already is seen by its silence, and its last words say why.
        with suppress(BrokenPipeError):
            process.stdin.write(HELLO)
            process.stdin.flush()

    def _await_readings(self, since_s: float, patience_s: float) -> bool:
        """Wait until every node has a reading at `since_s` or later; False on timeout."""
        with self._heard:
            self._heard.wait_for(lambda: self._is_over or self._are_read(since_s), patience_s)
            return self._are_read(since_s)

    def _are_read(self, since_s: float) -> bool:
        read = [node.has_since(since_s) for node in self._readings.values()]
        return len(read) >= self._num_nodes and all(read)

    def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._hear(line.decode(errors="replace"))
        with self._heard:
            self._is_over = True
            self._heard.notify_all()

    def _hear(self, line: str) -> None:
        found = parse_reading(line)
        with self._heard:
            if found is None:
                self._last_words.append(line.strip())
                return
            sampler, reading = found
            host = sampler.rpartition(":")[0]
            self._readings.setdefault(sampler, NodeReadings(host)).add(reading)
            self._heard.notify_all()
