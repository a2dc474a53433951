"""Processes to their end, with what they said; facts about them from the kernel."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dynamiccl.collect.launchers import Interrupt, run_process

PATIENCE_S = 20.0


class Limits(NamedTuple):
    """Seconds until the first progress, between two, and between SIGTERM and SIGKILL."""

    startup_s: float
    stall_s: float
    grace_s: float = 5.0


class Finished(NamedTuple):
    returncode: int | None
    lines: list[str]


def run_to_end(
    argv: Sequence[str],
    limits: Limits,
    on_line: Callable[[str, float], bool] = lambda *_: True,
    interrupt: Interrupt | None = None,
) -> Finished:
    """Run a program as a launch does, and keep its lines."""
    lines: list[str] = []
    has_begun = False

    def take(text: str, arrived_s: float) -> bool:
        nonlocal has_begun
        lines.append(text)
        is_progress = on_line(text, arrived_s)
        has_begun |= is_progress
        return is_progress

    def patience_s() -> float:
        return limits.stall_s if has_begun else limits.startup_s

    code = run_process(argv, patience_s, limits.grace_s, take, interrupt or Interrupt())
    return Finished(code, lines)


def children(pid: int) -> list[int]:
    """Living children of a process's main thread."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def is_running(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def await_true(what: Callable[[], bool]) -> None:
    """Poll a condition, with a timeout."""
    until = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)
