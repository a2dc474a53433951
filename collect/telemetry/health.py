"""Health of GPUs and NICs during a time interval, from the readings of samplers on all nodes.

A trial may be shorter than the time between two readings. So a stretch is judged by the readings
inside it *and* by the last before and the first after it: clocks that are down just before and just
after were down in between, and an error counter needs both to show a difference.
"""

import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

#: A reading further than this from a stretch says nothing about it, in seconds.
MAX_GAP_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class PortCount:
    """Counter differences of a NIC port over a time interval; None = unknown."""

    #: HOST DEVICE/PORT.
    name: str
    #: Lost, or sent again; marked or slowed for congestion (nic_counters.py).
    retries: int | None
    congestion: int | None

    @property
    def badness(self) -> tuple[int, int]:
        """Sort key: larger is worse."""
        return self.retries or 0, self.congestion or 0


@dataclass(frozen=True, slots=True)
class Health:
    """Health of the nodes during a time interval; None = unknown."""

    #: A GPU was slowed by heat or power (throttle.SLOWED).
    throttled: bool | None
    #: Uncorrected memory errors that were counted meanwhile.
    ecc_errors: int | None
    #: Of every port of every node that counts anything.
    ports: tuple[PortCount, ...] = ()

    def row_columns(self) -> dict[str, Any]:
        """The measurement columns that this fills."""
        worst = max(self.ports, key=lambda port: port.badness, default=None)
        return {
            "throttled": self.throttled,
            "ecc_errors": self.ecc_errors,
            "nic_retries": _sum([port.retries for port in self.ports]),
            "nic_congestion": _sum([port.congestion for port in self.ports]),
            "nic_worst": worst.name if worst is not None and any(worst.badness) else None,
        }


#: What is known of a node without a GPU that can be asked.
UNKNOWN: Final = Health(throttled=None, ecc_errors=None)


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive equal readings, from the first to the last (Unix seconds)."""

    begin_s: float
    end_s: float
    #: One value for each GPU, as sampler.py prints them.
    slowed: tuple[bool | None, ...]
    ecc_errors: tuple[int | None, ...]
    #: (port, retries, congestion) of each port of a NIC.
    nics: tuple[tuple[str, int | None, int | None], ...] = ()


def parse_reading(line: str) -> tuple[str, Window] | None:
    """The sampler's name and the reading in its line of JSON; None for any other line.

    >>> gpus = '"slowed": [true], "ecc_errors": [0]'
    >>> parse_reading('0: {"sampler": "n1:7", "time_s": 5.0, ' + gpus + ', "nics": {}}')
    ('n1:7', Window(begin_s=5.0, end_s=5.0, slowed=(True,), ecc_errors=(0,), nics=()))
    """
    # A launcher may label each line with its rank, and says things of its own.
    _, brace, rest = line.partition("{")
    try:
        found = json.loads(brace + rest)
        slowed, errors = tuple(found["slowed"]), tuple(found["ecc_errors"])
        nics = tuple((port, *counts) for port, counts in found["nics"].items())
        return str(found["sampler"]), Window(found["time_s"], found["time_s"], slowed, errors, nics)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class NodeReadings:
    """The readings of one node."""

    def __init__(self, host: str = "") -> None:
        """Start without readings."""
        self._host = host
        self._windows: list[Window] = []

    def add(self, reading: Window) -> None:
        """Add a reading; times must increase."""
        last = self._windows[-1] if self._windows else None
        if (
            last is not None
            and reading.begin_s - last.end_s <= MAX_GAP_S
            and (reading.slowed, reading.ecc_errors, reading.nics)
            == (last.slowed, last.ecc_errors, last.nics)
        ):
            self._windows[-1] = replace(last, end_s=reading.end_s)
        else:
            self._windows.append(reading)

    def has_since(self, time_s: float) -> bool:
        """Whether there is a reading at `time_s` or later."""
        return bool(self._windows) and self._windows[-1].end_s >= time_s

    def forget_before(self, time_s: float) -> None:
        """Drop readings that are not needed from `time_s` on."""
        self._windows = [w for w in self._windows if w.end_s >= time_s - MAX_GAP_S]

    def health(self, begin_s: float, end_s: float) -> Health:
        """The node's health from `begin_s` to `end_s`."""
        near = self._around(begin_s, end_s)
        is_known = (
            bool(near)
            and near[0].begin_s <= begin_s
            and near[-1].end_s >= end_s
            and all(after.begin_s - w.end_s <= MAX_GAP_S for w, after in pairwise(near))
        )
        slowed = zip(*(w.slowed for w in near), strict=True)
        errors = zip(*(w.ecc_errors for w in near), strict=True)
        return Health(
            throttled=_any([_any(gpu) if any(gpu) or is_known else None for gpu in slowed]),
            ecc_errors=_sum(
                [_counted(gpu) if _counted(gpu) or is_known else None for gpu in errors]
            ),
            ports=self._ports(near, is_known=is_known),
        )

    def _ports(self, near: Sequence[Window], *, is_known: bool) -> tuple[PortCount, ...]:
        totals: dict[str, list[tuple[int | None, int | None]]] = defaultdict(list)
        for window in near:
            for port, retries, congestion in window.nics:
                totals[port].append((retries, congestion))
        found = []
        for port, counts in totals.items():
            each = [_counted(column) for column in zip(*counts, strict=True)]
            retries, congestion = (count if count or is_known else None for count in each)
            found.append(PortCount(f"{self._host} {port}".strip(), retries, congestion))
        return tuple(found)

    def _around(self, begin_s: float, end_s: float) -> list[Window]:
        """The windows in the stretch, the last before and the first after, if they are near."""
        first = max(bisect_right(self._windows, begin_s, key=lambda w: w.begin_s) - 1, 0)
        last = bisect_left(self._windows, end_s, key=lambda w: w.end_s)
        return [
            w
            for w in self._windows[first : last + 1]
            if w.end_s >= begin_s - MAX_GAP_S and w.begin_s <= end_s + MAX_GAP_S
        ]


def worst(nodes: Iterable[Health]) -> Health:
    """The worst health of several nodes; unknown if any node is unknown and none is bad.

    >>> worst([Health(False, 0), UNKNOWN]).throttled is None
    True
    >>> worst([Health(True, 2), UNKNOWN])
    Health(throttled=True, ecc_errors=2, ports=())
    """
    every = list(nodes)
    return Health(
        throttled=_any([h.throttled for h in every]),
        ecc_errors=_sum([h.ecc_errors for h in every]),
        ports=tuple(port for h in every for port in h.ports),
    )


def _counted(totals: Sequence[int | None]) -> int | None:
    """Errors that one GPU counted; None when it does not tell and no error is known."""
    known = [total for total in totals if total is not None]
    # A counter that began anew (a driver reload) has counted what it shows since then.
    steps = [after - before if after >= before else after for before, after in pairwise(known)]
    return sum(steps) or (0 if len(known) == len(totals) else None)


def _any(verdicts: Sequence[bool | None]) -> bool | None:
    if any(verdicts):
        return True
    return None if not verdicts or None in verdicts else False


def _sum(counts: Sequence[int | None]) -> int | None:
    known = sum(count or 0 for count in counts)
    return None if not known and (not counts or None in counts) else known
