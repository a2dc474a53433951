"""What launches measure, how they are started, and what the plugin's report says of it."""

import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Timer
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.collect.schedule import (
    CONFIG_VARIABLES,
    PLUGIN_VARIABLES,
    REPORT_NAME,
    SCHEDULE_NAME,
    Calls,
    LaunchMode,
    arguments,
    calls_of,
    deal,
    environment,
    judge,
    lay_out,
    read_report,
    schedule_of,
    without_slow,
)
from dynamiccl.collect.sweep import Sweep
from dynamiccl.nccl import ABSTAIN
from dynamiccl.schedule import REPORT_MAGIC, REPORT_VERSION, BlockState, Schedule, totals_of
from tests.collect.benchmark.stand_in import feasible, launch_of, picked, sweep

TRIALS = feasible(sweep())
NET = '[{ name = "net", transport = "NET" }]'


@given(data=st.data(), count=st.integers(1, 40), limit=st.integers(1, 60))
@settings(deadline=None, max_examples=60)
def test_nothing_is_lost_whatever_is_picked(data: st.DataObject, count: int, limit: int) -> None:
    chosen = [replace(data.draw(st.sampled_from(TRIALS)), repeat=number) for number in range(count)]
    launch = replace(launch_of(TRIALS), trials=tuple(chosen))
    with patch("dynamiccl.collect.schedule._MOST_BLOCKS", limit):
        grid = deal(launch)
    kept = Counter(grid.blocks) & Counter(chosen)
    assert kept + Counter(grid.left_over) == Counter(chosen)
    assert kept, "a launch must make progress"
    assert len(grid.cycles) <= max(1, limit // len(grid.walk))
    # Gaps are filled with the default; no block has another's number, nor in a further launch.
    fillers = Counter(grid.blocks) - Counter(chosen)
    assert {trial.config for trial in fillers} <= {ABSTAIN}
    more = deal(launch.again(launch.trials))
    assert len(set(grid.blocks)) == len(grid.blocks)
    assert not (set(more.blocks) - set(chosen)) & set(fillers)


def test_command_line_of_a_sweep_and_of_a_read_back() -> None:
    def line(mode: LaunchMode, made: Sweep = IN_NET) -> str:
        launch = launch_of(NET_TRIALS, mode)
        words = arguments(["x_perf"], launch, deal(launch), made.file, gpus=8, folder=WORK)
        return " ".join(words)

    walk = "x_perf -b 1048576 -e 4194304 -f 2 -g 8"
    assert line(LaunchMode.SWEEP) == f"{walk} -n 5 -w 2 -c 1 -d float -N 9 -J /w/rows.json"
    assert line(LaunchMode.READ_BACK) == f"{walk} -n 1 -w 1 -c 0 -d float -N 9"
    single = sweep(runner="{ per_iteration = true }")
    assert line(LaunchMode.SWEEP, single).endswith("-d float -N 9 -I 1 -J /w/rows.json")


IN_NET = sweep(profiles=NET)
NET_TRIALS = feasible(IN_NET)
WORK = Path("/w")


def test_small_messages_get_more_calls() -> None:
    made = sweep(sizes='{ list = ["1K", "256K", "512K"] }')
    launches = lay_out(0, picked(made), made.file, plays_schedules=True)
    calls = {
        tuple(sorted({one.size_bytes for one in launch.trials})): calls_of(launch, made.file)
        for launch in launches
        if launch.mode is LaunchMode.SWEEP
    }
    counts = {sizes: found.iterations for sizes, found in calls.items()}
    assert counts == {(1 << 10, 256 << 10): 200, (512 << 10,): 5}
    # Where all sizes get as many, they share a process.
    alike = {"iterations": "500", "runner": "{ read_back = false }"}
    many = sweep(sizes='{ list = ["256K", "512K"] }', **alike)
    played, _ = lay_out(0, picked(many), many.file, plays_schedules=True)
    assert calls_of(played, many.file).iterations == 500
    few = Calls(20, 5, 1)
    assert few.slow_s(64 << 10) < 0.1
    assert few.slow_s(4 << 30) > 2 * 126  # LL with one channel took 126 s on two nodes of H100


def test_sweep_loads_the_plugin_in_its_profile() -> None:
    found, unset = environment(launch_of(NET_TRIALS), WORK, "/p/lib.so", "00ff")
    assert found == {
        "NCCL_DEBUG": "WARN",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_TUNER_PLUGIN": "/p/lib.so",
        "DYNAMICCL_MODE": "sweep",
        "DYNAMICCL_SCHEDULE": "/w/schedule",
        "DYNAMICCL_SCHEDULE_HASH": "00ff",
        "DYNAMICCL_SWEEP_REPORT": "/w/report",
    }
    assert unset == CONFIG_VARIABLES
    # A reference is the user's own environment.
    reference = launch_of(TRIALS, LaunchMode.REFERENCE, scheduled=False)
    assert environment(reference, WORK, "", "") == ({}, PLUGIN_VARIABLES)


def test_split_is_set_on_every_rank_and_its_mask_is_not() -> None:
    split = sweep(groups='[{ num_nodes = 2, ranks_per_node = 4, split = "MOD 4" }]')
    for mode in (LaunchMode.REFERENCE, LaunchMode.PLAIN, LaunchMode.READ_BACK):
        launch = launch_of([split.trials[0]], mode, scheduled=False)
        found, unset = environment(launch, WORK, "", "")
        assert found["NCCL_TESTS_SPLIT"] == "MOD 4"
        assert "NCCL_TESTS_SPLIT_MASK" in unset
        alone = launch_of(TRIALS[:1], mode, scheduled=False)
        assert "NCCL_TESTS_SPLIT" not in environment(alone, WORK, "", "")[0]


LAUNCH = launch_of(TRIALS)
PLAIN = launch_of(TRIALS[:1], LaunchMode.PLAIN, scheduled=False)
SCHEDULE = schedule_of(LAUNCH.setting, deal(LAUNCH), Calls(5, 2, 1))
TOTAL_CALLS = totals_of(SCHEDULE.to_bytes())[1]
PLAYED, ABSTAINED = BlockState.PLAYED, BlockState.ABSTAINED
FINE = {"actual_chunk_bytes": None}


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
        "<8sIi3Q24x",
        *(REPORT_MAGIC, REPORT_VERSION, count, int(schedule.content_hash, 16), calls, stopped),
    )
    every = [*states, *[BlockState.NOT_REACHED] * (count - len(states))]
    (folder / REPORT_NAME).write_bytes(head + bytes(4 * count) + bytes(every))
    return folder


def test_times_of_a_block_that_was_not_played(tmp_path: Path) -> None:
    for state, status, reason in (
        (BlockState.UNAVAILABLE, "infeasible", "NCCL's cost table has no such cell here"),
        (BlockState.MIXED, "failed", "the plugin did not play all calls of this block (MIXED)"),
    ):
        found = judge(LAUNCH, leave(tmp_path, [PLAYED, state, PLAYED]), 3)
        assert found == ([FINE, {"status": status, "reason": reason}, FINE], True)
    assert judge(LAUNCH, leave(tmp_path), 0) == ([], False)
    # Without a schedule the rows alone tell.
    assert [judge(PLAIN, tmp_path, rows) for rows in (0, 1)] == [([], False), ([{}], True)]


def test_without_a_whole_report_nobody_knows_what_was_played(tmp_path: Path) -> None:
    whole = (leave(tmp_path, [PLAYED] * 3) / REPORT_NAME).read_bytes()
    for cut in (*range(0, len(whole), 7), len(whole) - 1):
        (tmp_path / REPORT_NAME).write_bytes(whole[:cut])
        verdicts, began = judge(LAUNCH, tmp_path, 3)
        assert {one["status"] for one in verdicts} == {"failed"}, cut
        assert not began
    (tmp_path / REPORT_NAME).unlink()
    for verdict in judge(LAUNCH, tmp_path, 3)[0]:
        assert verdict["reason"].startswith("the plugin wrote no report, so the configs are not")
    other = replace(SCHEDULE, cycles=SCHEDULE.cycles[:2])
    leave(tmp_path, [PLAYED] * 3, schedule=other)
    for verdict in judge(LAUNCH, tmp_path, 9)[0]:
        assert f"it is about the schedule {other.content_hash}" in verdict["reason"]
    leave(tmp_path, [PLAYED] * 3, calls=TOTAL_CALLS)
    assert judge(LAUNCH, tmp_path, 3) == ([FINE] * 3, True)
    leave(tmp_path, [PLAYED] * 3, calls=TOTAL_CALLS + 1)
    assert "calls and not" in str(read_report(tmp_path))
    assert {one["status"] for one in judge(LAUNCH, tmp_path, 3)[0]} == {"failed"}


def test_report_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    leave(tmp_path, [PLAYED])
    late = Timer(0.3, leave, (tmp_path, [PLAYED, PLAYED]))
    late.start()
    assert judge(LAUNCH, tmp_path, 2, 60) == ([FINE, FINE], True)
    late.join()
    for rows_printed in (0, 1, 2):
        judge(LAUNCH, tmp_path, rows_printed, math.inf)
    # One that says why it stops does not grow; one that does not come is judged as it is.
    judge(LAUNCH, leave(tmp_path, [PLAYED], stopped=9), 5, math.inf)
    verdicts, _ = judge(LAUNCH, leave(tmp_path, [PLAYED]), 2)
    assert ["status" in verdict for verdict in verdicts] == [False, True]


def test_what_is_slow_at_large_messages_is_left_out() -> None:
    keys = {"num_channels": "[0, 2, 3]", "runner": '{ slow_max = "2M" }'}
    made = sweep(algorithms='["Ring", "CollNetDirect"]', **keys)
    left_out = {
        (trial.size_bytes, trial.config.key): told.infeasible
        for trial, told in zip(made.trials, without_slow(made).trials, strict=True)
        if told != trial
    }
    slow = ["Ring/LL", "Ring/LL/2ch", "Ring/LL/3ch", "Ring/Simple/2ch", "CollNetDirect/Simple/2ch"]
    assert list(left_out) == [(4 << 20, config) for config in slow]
    assert set(left_out.values()) == {
        f"above {2 << 20} bytes, where LL and up to two channels take long and do not win "
        "(runner.slow_max)"
    }
