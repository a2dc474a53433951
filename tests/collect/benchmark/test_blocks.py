import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Timer

import pytest

from dynamiccl.collect.benchmark.blocks import (
    REPORT_NAME,
    SCHEDULE_NAME,
    Verdict,
    await_report,
    has_begun,
    judge_blocks,
    read_report,
)
from dynamiccl.collect.benchmark.command import Calls
from dynamiccl.collect.benchmark.file_system import is_local
from dynamiccl.collect.benchmark.grid import deal
from dynamiccl.collect.benchmark.schedules import schedule_of
from dynamiccl.collect.runner import Launch, LaunchMode
from dynamiccl.datasets.schema import Status
from dynamiccl.schedule import REPORT_MAGIC, REPORT_VERSION, BlockState, Schedule
from tests.collect.benchmark.sweeps import launch_of, sweep

TRIALS = [trial for trial in sweep().trials if trial.infeasible is None]
LAUNCH = launch_of(TRIALS)
FORCED = launch_of(TRIALS[:1], LaunchMode.FORCED, scheduled=False)
GRID = deal(LAUNCH, max_blocks=1000)
SCHEDULE = schedule_of(LAUNCH.setting, GRID, Calls(5, 2, 1))
PLAYED, ABSTAINED = BlockState.PLAYED, BlockState.ABSTAINED
FINE = Verdict(Status.OK)


def leave(
    folder: Path,
    states: Sequence[BlockState] = (),
    *,
    schedule: Schedule = SCHEDULE,
    calls: int = 10,
    stopped: int = 0,
) -> Path:
    """What the plugin and we leave in a launch's folder; further blocks were not reached."""
    (folder / SCHEDULE_NAME).write_bytes(SCHEDULE.to_bytes())
    count = schedule.num_blocks
    head = struct.pack(
        "<8sIi5Qi4x",
        *(REPORT_MAGIC, REPORT_VERSION, count, int(schedule.content_hash, 16), calls, stopped),
        *(0, 0, 0),
    )
    every = [*states, *[BlockState.NOT_REACHED] * (count - len(states))]
    (folder / REPORT_NAME).write_bytes(head + bytes(4 * count) + bytes(every))
    return folder


def judged(folder: Path, count: int, launch: Launch = LAUNCH) -> list[Verdict]:
    return judge_blocks(launch, folder, count)


def test_played_and_abstained_blocks_are_fine(tmp_path: Path) -> None:
    assert judged(leave(tmp_path, [PLAYED, ABSTAINED]), 2) == [FINE, FINE]
    assert judged(tmp_path, 0) == []


def test_report_that_comes_late_is_read_again(tmp_path: Path) -> None:
    leave(tmp_path, [PLAYED])
    late = Timer(0.3, leave, (tmp_path, [PLAYED, PLAYED]))
    late.start()
    await_report(LAUNCH, tmp_path, 2, patience_s=60)
    late.join()
    assert judged(tmp_path, 2) == [FINE, FINE]


@pytest.mark.parametrize("rows", [0, 1])
def test_whole_report_is_not_waited_for(rows: int, tmp_path: Path) -> None:
    leave(tmp_path, [PLAYED])
    await_report(LAUNCH, tmp_path, rows, patience_s=math.inf)
    await_report(FORCED, tmp_path, 2, patience_s=math.inf)


def test_report_that_says_why_it_stops_is_not_waited_for(tmp_path: Path) -> None:
    await_report(LAUNCH, leave(tmp_path, [PLAYED], stopped=9), 5, patience_s=math.inf)


def test_report_that_does_not_come_is_judged_as_it_is(tmp_path: Path) -> None:
    await_report(LAUNCH, leave(tmp_path, [PLAYED]), 2, patience_s=0)
    assert [verdict.status for verdict in judged(tmp_path, 2)] == [Status.OK, Status.FAILED]


MOUNTS = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:44 / /home rw shared:2 - nfs4 server:/home rw,vers=4.2
31 22 0:45 / /my\\040data rw - lustre mgs@tcp:/fs rw,flock
32 30 0:46 / /home/scratch rw - tmpfs tmpfs rw
33 22 0:47 / /late rw - tmpfs tmpfs rw
34 22 0:48 / /late rw - nfs server:/late rw
torn line
"""


@pytest.mark.parametrize(
    ("path", "local"),
    [
        ("/", True),
        ("/tmp/x", True),
        ("/home", False),
        ("/home/ann/sweep", False),
        ("/homes", True),
        ("/my data/sweep", False),
        ("/home/scratch/sweep", True),
        ("/late/sweep", False),
    ],
)
def test_file_system_of_a_path_is_that_of_the_innermost_mount(
    path: str, local: bool, tmp_path: Path
) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert is_local(Path(path), tmp_path / "mountinfo") is local
    assert not is_local(Path(path), tmp_path / "none")


@pytest.mark.parametrize(
    ("state", "status", "reason"),
    [
        (BlockState.UNAVAILABLE, Status.INFEASIBLE, "NCCL's cost table has no such cell here"),
        (BlockState.MIXED, Status.FAILED, "the plugin could play it in some of its calls only"),
        (BlockState.NOT_REACHED, Status.FAILED, "the plugin did not play this block"),
    ],
)
def test_times_of_a_block_that_was_not_played_are_not_its_configs(
    state: BlockState, status: Status, reason: str, tmp_path: Path
) -> None:
    assert judged(leave(tmp_path, [PLAYED, state, PLAYED]), 3) == [
        FINE,
        Verdict(status, reason),
        FINE,
    ]


def test_where_it_stopped_is_said(tmp_path: Path) -> None:
    [_, lost] = judged(leave(tmp_path, [PLAYED], stopped=77), 2)
    assert lost.reason == "the plugin did not play this block (it stopped at call 77)"


def test_launch_without_a_schedule_needs_no_report(tmp_path: Path) -> None:
    assert judged(tmp_path, 2, FORCED) == [FINE, FINE]
    assert not has_begun(FORCED, tmp_path)


def test_without_a_whole_report_nobody_knows_what_was_played(tmp_path: Path) -> None:
    whole = (leave(tmp_path, [PLAYED] * 3) / REPORT_NAME).read_bytes()
    for cut in (*range(0, len(whole), 7), len(whole) - 1):
        (tmp_path / REPORT_NAME).write_bytes(whole[:cut])
        assert {verdict.status for verdict in judged(tmp_path, 3)} == {Status.FAILED}, cut
        assert not has_begun(LAUNCH, tmp_path)
    (tmp_path / REPORT_NAME).unlink()
    for verdict in judged(tmp_path, 3):
        assert verdict.reason.startswith("the plugin wrote no report, so the configs are not known")


def test_report_on_another_schedule_is_none(tmp_path: Path) -> None:
    other = replace(SCHEDULE, cycles=SCHEDULE.cycles[:2])
    leave(tmp_path, [PLAYED] * 3, schedule=other)
    for verdict in judged(tmp_path, 9):
        assert verdict.status is Status.FAILED
        assert f"it is about the schedule {other.content_hash}" in verdict.reason


def test_more_calls_than_were_planned_mean_that_nothing_fits(tmp_path: Path) -> None:
    leave(tmp_path, [PLAYED] * 3, calls=SCHEDULE.num_calls)
    assert judged(tmp_path, 3) == [FINE] * 3
    leave(tmp_path, [PLAYED] * 3, calls=SCHEDULE.num_calls + 1)
    assert "calls and not" in str(read_report(tmp_path))
    assert {verdict.status for verdict in judged(tmp_path, 3)} == {Status.FAILED}


def test_launch_has_begun_when_its_first_block_was_reached(tmp_path: Path) -> None:
    assert not has_begun(LAUNCH, leave(tmp_path))
    for state in (PLAYED, ABSTAINED, BlockState.UNAVAILABLE, BlockState.MIXED):
        assert has_begun(LAUNCH, leave(tmp_path, [state]))
