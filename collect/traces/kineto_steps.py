"""Time that a GPU computed and communicated in each training step, from the kernels of a trace."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from dynamiccl.collect.traces.intervals import FloatArray, Union
from dynamiccl.collect.traces.kineto_events import Events, Kernel, Span, step_number

_NONE: Final = np.zeros(0)


class Cover:
    """When the GPUs of a trace computed, and when they communicated."""

    def __init__(self, events: Events) -> None:
        """Unions over the streams of each GPU."""
        starts = np.asarray(events.compute_start_us)
        ends = np.asarray(events.compute_end_us)
        devices = np.asarray(events.compute_device)
        self._of_device = {
            int(device): Union(starts[devices == device], ends[devices == device])
            for device in np.unique(devices)
        }
        self.compute = Union(starts, ends)
        self.communication = Union(
            np.array([each.start_us for each in events.kernels]),
            np.array([each.end_us for each in events.kernels]),
        )
        self.all = self.compute.with_other(self.communication)

    def exposed_us(self, kernels: Sequence[Kernel]) -> list[float]:
        """For each kernel the us in which its GPU ran no compute kernel."""
        nothing = Union(_NONE, _NONE)
        found = []
        for kernel in kernels:
            compute = self._of_device.get(kernel.device, nothing)
            hidden = compute.between(np.array([kernel.start_us]), np.array([kernel.end_us]))
            found.append(max(kernel.duration_us - float(hidden[0]), 0.0))
        return found

    @property
    def whole(self) -> tuple[float, float] | None:
        """(begin, end) of all kernels; None without a kernel."""
        if not len(self.all.starts):
            return None
        return float(self.all.starts[0]), float(self.all.ends[-1])


def steps_of(events: Events, cover: Cover, base_us: float) -> list[dict[str, Any]]:
    """Rows of `steps`: one for each ProfilerStep, else one for the whole trace.

    `base_us` is the moment that the trace counts from. Kernels count where they ran, not where they
    were launched: what runs on into the next step is that one's. Without any kernel (the GPU was
    not traced) only the step's length is known.
    """
    spans = sorted(events.steps, key=lambda each: each.start_us)
    if not spans:
        if cover.whole is None:
            return []
        spans = [Span("ProfilerStep#0", *cover.whole, 0, {})]
    begin, end = np.array([[s.start_us, s.end_us] for s in spans]).T
    parts = _parts(cover, begin, end) if cover.whole else {}
    return [
        {
            "step": step_number(span),
            "timestamp_us": base_us + span.start_us,
            "step_us": span.end_us - span.start_us,
            **{name: float(values[row]) for name, values in parts.items()},
        }
        for row, span in enumerate(spans)
    ]


def _parts(cover: Cover, begin: FloatArray, end: FloatArray) -> dict[str, FloatArray]:
    compute, busy = cover.compute.between(begin, end), cover.all.between(begin, end)
    return {
        "compute_us": compute,
        "communication_us": cover.communication.between(begin, end),
        "exposed_us": busy - compute,
        "idle_us": np.maximum(end - begin - busy, 0.0),
    }
