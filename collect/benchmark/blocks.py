"""Whether the plugin really applied the config that each block was to measure."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamiccl.collect.runner import Launch
from dynamiccl.datasets.schema import Status
from dynamiccl.errors import DataError
from dynamiccl.schedule import BlockState, PlayReport, Schedule


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a block's times count for its config: `ok`, or another status with the reason."""

    status: Status
    reason: str = ""
    #: The smallest chunk that NCCL was given; None = its own.
    chunk_bytes: int | None = None


#: Files of a launch in its folder.
SCHEDULE_NAME: Final = "schedule"
REPORT_NAME: Final = "report"
_FINE: Final = Verdict(Status.OK)
_LOOK_S: Final = 0.2
#: Seconds that the report may take to arrive over a network file system.
REPORT_S: Final = 45.0


def judge_blocks(launch: Launch, folder: Path, num_rows: int) -> list[Verdict]:
    """A verdict for each of the first `num_rows` blocks of a launch that ran in `folder`.

    Without a schedule the config is forced by environment, which NCCL obeys or refuses. With one,
    the plugin's report tells which configs were applied: the times of a block that it does not
    confirm are not used.
    """
    if not launch.is_scheduled:
        return [_FINE] * num_rows
    played = read_report(folder)
    if isinstance(played, str):
        reason = f"the plugin wrote no report, so the configs are not known: {played}"
        return [Verdict(Status.FAILED, reason)] * num_rows
    return [_verdict(played, number) for number in range(num_rows)]


def await_report(launch: Launch, folder: Path, num_rows: int, patience_s: float) -> None:
    """Wait until the plugin's report covers the last row; the file is re-read each time.

    A client of a network file system may write the mapped pages of an ended process as late as 30 s
    after its end (`vm.dirty_expire_centisecs`), and ours looks at the server again only after its
    attribute cache has expired (nfs(5), `acregmax`).
    """
    deadline = time.monotonic() + patience_s
    while launch.is_scheduled and num_rows and not _tells_of(read_report(folder), num_rows):
        if time.monotonic() >= deadline:
            return
        time.sleep(_LOOK_S)


def _tells_of(played: PlayReport | str, num_rows: int) -> bool:
    if isinstance(played, str):
        return False
    return played.stopped_at_call is not None or (
        played.states[min(num_rows, len(played.states)) - 1] is not BlockState.NOT_REACHED
    )


def has_begun(launch: Launch, folder: Path) -> bool:
    """Whether the plugin reached the first block: if so, a failure is that of a config."""
    played = read_report(folder) if launch.is_scheduled else ""
    return not isinstance(played, str) and played.states[0] is not BlockState.NOT_REACHED


def read_report(folder: Path) -> PlayReport | str:
    """The plugin's report of the schedule in `folder`, or the reason why there is none."""
    try:
        schedule = Schedule.from_bytes((folder / SCHEDULE_NAME).read_bytes())
        played = PlayReport.from_bytes((folder / REPORT_NAME).read_bytes())
    except (OSError, DataError) as error:
        return str(error)
    if played.schedule_hash != schedule.content_hash:
        return f"it is about the schedule {played.schedule_hash}, not {schedule.content_hash}"
    if played.calls > schedule.num_calls:
        # With one size only, the plugin cannot notice a missing or additional block.
        return f"the benchmark made {played.calls} calls and not {schedule.num_calls}"
    return played


def _verdict(played: PlayReport, number: int) -> Verdict:
    state = played.states[number]
    if state in {BlockState.PLAYED, BlockState.ABSTAINED}:
        return Verdict(Status.OK, chunk_bytes=played.chunk_bytes[number] or None)
    if state is BlockState.UNAVAILABLE:
        return Verdict(Status.INFEASIBLE, "NCCL's cost table has no such cell here")
    if state is BlockState.MIXED:
        return Verdict(Status.FAILED, "the plugin could play it in some of its calls only")
    where = (
        "" if played.stopped_at_call is None else f" (it stopped at call {played.stopped_at_call})"
    )
    return Verdict(Status.FAILED, f"the plugin did not play this block{where}")
