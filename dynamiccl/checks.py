"""Results of machine checks, and their display, for the two `doctor` commands."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from dynamiccl.errors import MachineError


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    #: It works, and something may mislead or is lacking.
    WARN = "warn"
    #: It cannot work like this, or would do something else.
    FAIL = "fail"
    #: It could not be found out here.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what was checked, what was found, and advice."""

    name: str
    status: Verdict
    found: str
    #: What to do; empty when there is nothing to do.
    advice: str = ""


def ok(name: str, found: str) -> Check:
    """A passed check."""
    return Check(name, Verdict.OK, found)


def warn(name: str, found: str, advice: str) -> Check:
    """A check that found something that works but may mislead."""
    return Check(name, Verdict.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Check:
    """A failed check: something cannot work, or does something else."""
    return Check(name, Verdict.FAIL, found, advice)


def unknown(name: str, found: str, advice: str = "") -> Check:
    """A check without a result."""
    return Check(name, Verdict.UNKNOWN, found, advice)


_MARKS: Final = {Verdict.OK: "ok", Verdict.WARN: "WARN", Verdict.FAIL: "FAIL", Verdict.UNKNOWN: "?"}


def render(checks: Iterable[Check]) -> str:
    """The findings as lines of text, advice under its finding, and a count at the end.

    >>> print(render([ok("/dev/shm", "23.5 GiB free"), fail("libnccl", "none", "install NCCL")]))
    ok    /dev/shm: 23.5 GiB free
    FAIL  libnccl: none
          -> install NCCL
    1 ok, 0 warnings, 1 failed, 0 unknown
    """
    every = list(checks)
    lines = []
    for check in every:
        lines.append(f"{_MARKS[check.status]:<4}  {check.name}: {check.found}")
        if check.advice:
            lines.append(f"      -> {check.advice}")
    count = {verdict: sum(c.status is verdict for c in every) for verdict in Verdict}
    lines.append(
        f"{count[Verdict.OK]} ok, {count[Verdict.WARN]} warnings, {count[Verdict.FAIL]} failed, "
        f"{count[Verdict.UNKNOWN]} unknown"
    )
    return "\n".join(lines)


def exit_code(checks: Iterable[Check]) -> int:
    """The exit code of `doctor`: 0 when no check failed, else that of a MachineError."""
    failed = any(check.status is Verdict.FAIL for check in checks)
    return MachineError.exit_code if failed else 0
