"""The outcome of a pick (trial, round, time), for strategies and the progress bar."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dynamiccl.collect.runner import Launch, LaunchMode, LaunchResult, Measured
from dynamiccl.datasets.cells import is_unwell
from dynamiccl.datasets.schema import Status


@dataclass(frozen=True, slots=True)
class Outcome:
    """One pick: its trial, its round, and its time in us (None when there is no usable time)."""

    trial_key: str
    round: int
    time_us: float | None
    ok: bool
    #: It is not there to be measured, which is no failure.
    infeasible: bool = False


def encode_outcomes(launch: Launch, result: LaunchResult) -> dict[str, list[list[Any]]]:
    """The outcomes of a launch as plain data: fields of a journal record.

    Those of NCCL's untouched default stand apart, as `references`: no strategy picked them.
    """
    found = [
        [measured.pick.trial.key, launch.round, *_time_and_status(measured)]
        for measured in result.measured
    ]
    if launch.mode is LaunchMode.REFERENCE:
        return {"outcomes": [], "references": found}
    return {"outcomes": [] if launch.mode is LaunchMode.READ_BACK else found}


def decode_outcomes(record: Mapping[str, Any], field: str = "outcomes") -> Iterator[Outcome]:
    """The outcomes in a journal record, or its `references` (absent in version 0.1)."""
    for key, number, time_us, ok, infeasible in record.get(field, ()):
        yield Outcome(key, number, time_us, ok, infeasible)


def _time_and_status(measured: Measured) -> tuple[float | None, bool, bool]:
    """Time of the out-of-place half; wrong in any half = failed; throttled = no time."""
    rows = measured.rows
    ok = all(row.get("status", Status.OK.value) == Status.OK.value for row in rows)
    first = next((row for row in rows if not row.get("in_place")), rows[0])
    infeasible = all(row.get("status") == Status.INFEASIBLE.value for row in rows)
    is_told = ok and not is_unwell(first)
    return first.get("time_us") if is_told else None, ok, infeasible
