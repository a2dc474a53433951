"""What became of a pick, in the three figures that a strategy and a progress bar need."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dynamiccl.collect.runner import Launch, LaunchMode, LaunchResult, Measured
from dynamiccl.datasets.cells import is_unwell
from dynamiccl.datasets.schema import Status


@dataclass(frozen=True, slots=True)
class Outcome:
    """One pick: its trial, the round, and its time (None when there is none that may be used)."""

    trial_key: str
    round: int
    time_us: float | None
    ok: bool
    #: It is not there to be measured, which is no failure.
    infeasible: bool = False


def encode_outcomes(launch: Launch, result: LaunchResult) -> dict[str, list[list[Any]]]:
    """The outcomes of a launch as plain data, as fields of a journal's record.

    Those of NCCL's untouched default are apart, as `references`: nobody picked them.
    """
    found = [
        [measured.pick.trial.key, launch.round, *_time_and_status(measured)]
        for measured in result.measured
    ]
    if launch.mode is LaunchMode.REFERENCE:
        return {"outcomes": [], "references": found}
    return {"outcomes": [] if launch.mode is LaunchMode.READ_BACK else found}


def decode_outcomes(record: Mapping[str, Any], field: str = "outcomes") -> Iterator[Outcome]:
    """The outcomes in a journal's record, or its `references`, which version 0.1 had not."""
    for key, number, time_us, ok, infeasible in record.get(field, ()):
        yield Outcome(key, number, time_us, ok, infeasible)


def _time_and_status(measured: Measured) -> tuple[float | None, bool, bool]:
    """Out-of-place counts; a wrong value in any half is a failure, unwell GPUs leave no time."""
    rows = measured.rows
    ok = all(row.get("status", Status.OK.value) == Status.OK.value for row in rows)
    first = next((row for row in rows if not row.get("in_place")), rows[0])
    infeasible = all(row.get("status") == Status.INFEASIBLE.value for row in rows)
    is_told = ok and not is_unwell(first)
    return first.get("time_us") if is_told else None, ok, infeasible
