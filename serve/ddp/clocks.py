"""Marks in time: of the host for gloo, on the GPU's streams for NCCL."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes marks, and tells the seconds between two of them."""

    def mark(self) -> Any:
        """Now."""

    def ready(self, mark: Any) -> bool:
        """Whether what was asked for before `mark` is done, so that its time is known."""

    def seconds(self, begin: Any, end: Any) -> float:
        """From one mark to another, both ready."""


class HostClock:
    """The monotonic clock, or another function that returns seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now

    def mark(self) -> float:
        """See `Clock`."""
        return self._now()

    def ready(self, mark: float) -> bool:  # noqa: ARG002
        """A host's mark is always known."""
        return True

    def seconds(self, begin: float, end: float) -> float:
        """See `Clock`."""
        return end - begin


class DeviceClock:
    """Events on the current stream: the host runs ahead of the GPU and knows no times."""

    def mark(self) -> torch.cuda.Event:
        """See `Clock`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def ready(self, mark: torch.cuda.Event) -> bool:
        """Asks and does not wait: a step whose times come too late is not measured."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """See `Clock`."""
        return float(begin.elapsed_time(end)) / 1e3
