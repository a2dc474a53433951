"""From a node's samples to what is kept of each launch: telemetry rows, and whether it was healthy.

A trial may be shorter than the time between two readings. So a window is judged by the readings
inside it *and* by the last before and the first after it: clocks that are down just before and just
after were down in between, and an error counter needs both to show a difference.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from dynamiccl.collect.telemetry.counters import (
    CLOCK_REASONS,
    COUNTERS,
    ECC_UNCORRECTED,
    MIG_MODE,
    Kind,
)
from dynamiccl.collect.telemetry.samples import Floats, ReadError, Samples, Series
from dynamiccl.collect.telemetry.throttle import SLOWED
from dynamiccl.datasets.schema import TELEMETRY

#: A reading further than this from a window says nothing about it; the slowest ones come once a
#: second (sampler.SLOW_PERIOD_S), so that three in a row must be missing.
MAX_GAP_S: Final = 3.0
#: NVML's words for a GPU that knows no MIG (NVML_ERROR_NOT_SUPPORTED).
_NO_MIG: Final = "Not Supported"


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time, in Unix seconds, and what was measured in it."""

    trial: str
    run: str
    launch: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Health:
    """What the readings say about a window; None = not known."""

    #: A GPU was slowed by heat or power (throttle.SLOWED).
    throttled: bool | None
    #: Uncorrected memory errors that were counted meanwhile.
    ecc_errors: int | None
    #: A GPU is split into MIG instances.
    mig: bool | None


#: What is known of a node without a GPU that can be asked.
UNKNOWN: Final = Health(throttled=None, ecc_errors=None, mig=None)


def health(samples: Samples, begin_s: float, end_s: float) -> Health:
    """What a node's readings say about the time from `begin_s` to `end_s`."""
    return Health(
        throttled=_throttled(samples, begin_s, end_s),
        ecc_errors=_ecc_errors(samples, begin_s, end_s),
        mig=_mig(samples, begin_s, end_s),
    )


def worst(nodes: Iterable[Health]) -> Health:
    """The verdict on several nodes: one bad node is a bad window, one unknown node no good one.

    >>> worst([Health(False, 0, False), Health(None, 0, False)]).throttled is None
    True
    >>> worst([Health(True, 2, False), UNKNOWN])
    Health(throttled=True, ecc_errors=2, mig=None)
    """
    every = list(nodes)
    return Health(
        throttled=_any([h.throttled for h in every]),
        ecc_errors=_sum([h.ecc_errors for h in every]),
        mig=_any([h.mig for h in every]),
    )


def telemetry_table(
    samples: Samples, windows: Iterable[Window], *, system: str, sweep: str
) -> pa.Table:
    """The readings of each window as rows of schema TELEMETRY, one for each value.

    A gauge gives every reading. Of a total or a state only those are kept that differ from the one
    before, and the first and last: nothing is lost. Both begin with the last reading before the
    window and end with the first after it, so that a difference over the window can be formed.
    Totals are raw (counters.py): the difference counts, and one below zero is a counter that began
    anew.
    """
    parts = [
        _rows(samples.host, window, key, series)
        for window in windows
        for key, series in samples.series.items()
    ]
    given = pa.concat_tables([_NO_ROWS, *parts])
    names = {"system": system, "sweep": sweep}
    return pa.Table.from_arrays(
        [
            pa.repeat(pa.scalar(names[field.name], field.type), given.num_rows)
            if field.name in names
            else given[field.name].combine_chunks()
            for field in TELEMETRY
        ],
        schema=TELEMETRY,
    )


_ROW_SCHEMA: Final = pa.schema([TELEMETRY.field(i) for i in range(2, len(TELEMETRY))])
_NO_ROWS: Final = _ROW_SCHEMA.empty_table()


def _rows(host: str, window: Window, key: tuple[str, str], series: Series) -> pa.Table:
    device, counter = key
    chosen = _around(series, window.begin_s, window.end_s)
    times, values = series.times_s[chosen], series.values[chosen]
    if len(values) and counter in COUNTERS and COUNTERS[counter].kind is not Kind.GAUGE:
        keep = np.concatenate([[True], values[1:] != values[:-1]])
        keep[-1] = True
        times, values = times[keep], values[keep]
    columns: dict[str, object] = {
        "trial": window.trial,
        "run": window.run,
        "launch": window.launch,
        "host": host,
        "device": device,
        "counter": counter,
    }
    microseconds = pa.array(np.round(times * 1e6).astype(np.int64))
    return pa.Table.from_arrays(
        [
            pa.repeat(pa.scalar(columns[field.name], field.type), len(values))
            if field.name in columns
            else microseconds.cast(field.type)
            if field.name == "timestamp"
            else pa.array(values)
            for field in _ROW_SCHEMA
        ],
        schema=_ROW_SCHEMA,
    )


def _around(series: Series, begin_s: float, end_s: float) -> slice:
    """The readings in the window, the last before and the first after, if they are near."""
    times = series.times_s
    first = int(np.searchsorted(times, begin_s, side="right")) - 1
    last = int(np.searchsorted(times, end_s, side="left"))
    if first < 0 or times[first] < begin_s - MAX_GAP_S:
        first += 1
    if last >= len(times) or times[last] > end_s + MAX_GAP_S:
        last -= 1
    return slice(first, last + 1)


def _is_covered(times: Floats, begin_s: float, end_s: float) -> bool:
    """Whether there are readings from begin to end, both ends included, without a hole."""
    if not len(times) or times[0] > begin_s or times[-1] < end_s:
        return False
    return bool(np.all(np.diff(times) <= MAX_GAP_S))


def _throttled(samples: Samples, begin_s: float, end_s: float) -> bool | None:
    verdicts: list[bool | None] = []
    for series in samples.counter(CLOCK_REASONS).values():
        chosen = _around(series, begin_s, end_s)
        slowed = bool(np.any(series.values[chosen].astype(np.int64) & int(SLOWED)))
        known = slowed or _is_covered(series.times_s[chosen], begin_s, end_s)
        verdicts.append(slowed if known else None)
    silent: list[None] = [None for _ in _silent(samples, CLOCK_REASONS)]
    return _any([*verdicts, *silent])


def _ecc_errors(samples: Samples, begin_s: float, end_s: float) -> int | None:
    counts: list[int | None] = []
    for series in samples.counter(ECC_UNCORRECTED).values():
        chosen = _around(series, begin_s, end_s)
        values = series.values[chosen]
        steps = np.diff(values)
        # A counter that began anew (a driver reload) has counted what it shows since then.
        counted = int(np.where(steps < 0, values[1:], steps).sum())
        known = counted or _is_covered(series.times_s[chosen], begin_s, end_s)
        counts.append(counted if known else None)
    silent: list[None] = [None for _ in _silent(samples, ECC_UNCORRECTED)]
    return _sum([*counts, *silent])


def _mig(samples: Samples, begin_s: float, end_s: float) -> bool | None:
    verdicts: list[bool | None] = []
    for series in samples.counter(MIG_MODE).values():
        near = series.values[_around(series, begin_s, end_s)]
        verdicts.append(bool(np.any(near > 0)) if len(near) else None)
    verdicts += [None if _NO_MIG not in e.error else False for e in _silent(samples, MIG_MODE)]
    return _any(verdicts)


def _silent(samples: Samples, counter: str) -> list[ReadError]:
    """Why GPUs gave no reading of `counter` at all: they were asked in vain, or not reached."""
    heard = samples.counter(counter)
    return [
        error
        for error in samples.errors
        if error.counter in {counter, "nvml"} and error.device not in heard
    ]


def _any(verdicts: Sequence[bool | None]) -> bool | None:
    if any(verdicts):
        return True
    return None if not verdicts or None in verdicts else False


def _sum(counts: Sequence[int | None]) -> int | None:
    known = sum(count or 0 for count in counts)
    return None if not known and (not counts or None in counts) else known
