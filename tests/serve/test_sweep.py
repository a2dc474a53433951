"""Sweep mode of the built plugin: schedules written here, played there, reports read here."""

import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamiccl.errors import PluginError
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol
from dynamiccl.schedule import MAX_BLOCKS, BlockState, PlayReport, Schedule, fnv1a, totals_of
from tests.serve.abi import Communicator, TunerPlugin
from tests.serve.tables import (
    TUNED,
    CostTable,
    benchmark_calls,
    expected_answer,
    random_costs,
    random_schedule,
    stage,
)

VERSIONS = (4, 5, 6)
RING = Config(Algorithm.Ring, Protocol.LL128, 8)
TREE = Config(Algorithm.Tree, Protocol.Simple, 4)
#: Costs of a machine that can run everything, in us.
ALL: CostTable = np.full((7, 3), 10, dtype=np.float32)
SMALL = Schedule(
    collective=Collective.AllReduce,
    num_ranks=8,
    num_nodes=1,
    warmup=((1024, 1), (2048, 1)),
    calls_per_half=3,
    sizes=(1024, 2048),
    cycles=((RING, TREE), (ABSTAIN, RING)),
)


def one_size(cycles: int) -> Schedule:
    return replace(SMALL, warmup=(), calls_per_half=1, sizes=(1024,), cycles=((RING,),) * cycles)


@dataclass
class Lab:
    """Plays schedules whose files are in `folder`."""

    plugin: TunerPlugin
    folder: Path

    @contextmanager
    def playing(
        self, schedule: Schedule, version: int = 6, **environment: str | None
    ) -> Iterator[Communicator]:
        """A communicator of its ranks, which plays it."""
        told: dict[str, Any] = {"version": version}
        told["environment"] = stage(self.folder, schedule) | environment
        with self.plugin.communicator(schedule.num_ranks, schedule.num_nodes, **told) as made:
            yield made

    def report(self) -> PlayReport:
        return PlayReport.from_bytes((self.folder / "report").read_bytes())

    def in_a_process(
        self, schedule: Schedule, sizes: list[int], how: str, *within: str, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        """CHILD, run."""
        staged = stage(self.folder, schedule) | environment
        (self.folder / "sizes").write_text(" ".join(map(str, sizes)))
        command = [*within, sys.executable, "-c", CHILD, str(self.plugin.path)]
        return subprocess.run(
            [*command, str(self.folder / "sizes"), how],
            env=os.environ | {name: value for name, value in staged.items() if value},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def lab(sweep_path: Path, tmp_path: Path) -> Lab:
    return Lab(TunerPlugin(sweep_path), tmp_path)


#: Plays some calls of AllReduce to eight ranks in a process of its own: PLUGIN, a file of the
#: calls' sizes, and what then (`end` or `kill`), or how long files may grow.
CHILD = """
import os, sys
from pathlib import Path
import numpy as np
from dynamiccl.nccl import Collective
from tests.serve.abi import TunerPlugin
plugin, sizes, how = sys.argv[1:]
if how.isdigit():
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(how), int(how)))
library = TunerPlugin(Path(plugin))
with library.communicator(8, 1) as communicator:
    for size in Path(sizes).read_text().split():
        communicator.ask(Collective.AllReduce, int(size), np.full((7, 3), 10, dtype=np.float32))
    if how == "kill":
        os.kill(os.getpid(), 9)
print(*communicator.lines, sep="\\n")
"""


def play(communicator: Communicator, schedule: Schedule, costs: CostTable = ALL) -> None:
    for call in benchmark_calls(schedule):
        communicator.ask(schedule.collective, call.size_bytes, costs)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("collective", TUNED, ids=lambda c: c.wire)
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_calls_get_configs(version: int, collective: Collective, num_nodes: int, lab: Lab) -> None:
    random = np.random.default_rng([version, collective, num_nodes])
    schedule = random_schedule(random, collective, num_nodes=num_nodes, chunks=version >= 6)
    forced: list[set[bool]] = [set() for _ in range(schedule.num_blocks)]
    with lab.playing(schedule, version) as communicator:
        for call in benchmark_calls(schedule):
            costs = random_costs(random)
            costs[costs == 0] = 1  # so that setting a cell to 0.0 shows
            answer = communicator.ask(collective, call.size_bytes, costs)
            wanted = None if call.config == ABSTAIN else call.config
            expected = expected_answer(wanted, costs, num_nodes=num_nodes)
            np.testing.assert_array_equal(answer.cost_table_after, expected.cost_table_after)
            assert answer.num_channels == expected.num_channels
            if call.block is not None:
                forced[call.block].add(expected.acted)
        assert not communicator.ask(collective, schedule.sizes[0], ALL).acted  # after the last
    report = lab.report()
    assert report.schedule_hash == schedule.content_hash
    assert report.calls == totals_of(schedule.to_bytes())[1] + 1
    assert report.stopped_at_call is None
    configs = [config for cycle in schedule.cycles for config in cycle]
    assert report.states == tuple(map(state_of, configs, forced))
    assert {BlockState.ABSTAINED, BlockState.MIXED} <= set(report.states)


def state_of(config: Config, forced: set[bool]) -> BlockState:
    if config == ABSTAIN:
        return BlockState.ABSTAINED
    if len(forced) > 1:
        return BlockState.MIXED
    return BlockState.PLAYED if forced == {True} else BlockState.UNAVAILABLE


STATES = {state.name[0]: state for state in BlockState}


@pytest.mark.parametrize(
    ("nth", "size_bytes", "states"),
    [
        (1, 1025, "NNNN"),
        (3, 2048, "NNNN"),
        (5, 4096, "MNNN"),
        # The first block has more calls than the schedule gives it: its last ones were not played.
        (9, 1024, "MNNN"),
        (15, 2048, "PMNN"),
        (26, 1, "PPAM"),
    ],
)
def test_an_unexpected_call_stops_it(nth: int, size_bytes: int, states: str, lab: Lab) -> None:
    calls = list(benchmark_calls(SMALL))
    with lab.playing(SMALL) as communicator:
        for number, call in enumerate(calls, start=1):
            is_wrong = number == nth
            asked = size_bytes if is_wrong else call.size_bytes
            answer = communicator.ask(SMALL.collective, asked, ALL)
            assert answer.acted == (number < nth and call.config != ABSTAIN)
    report = lab.report()
    assert report.states == tuple(STATES[letter] for letter in states)
    assert (report.stopped_at_call, report.calls) == (nth, len(calls))


def test_symmetric_kernels_are_no_calls(lab: Lab) -> None:
    """NCCL 2.31 asks about them too, three times before each call."""
    with lab.playing(SMALL) as communicator:
        for call in benchmark_calls(SMALL):
            for _ in range(3):
                asked = communicator.ask(SMALL.collective, call.size_bytes, ALL, num_pipe_ops=0)
                assert not asked.acted
            answer = communicator.ask(SMALL.collective, call.size_bytes, ALL)
            assert answer.acted == (call.config != ABSTAIN)
    report = lab.report()
    assert (report.calls, report.stopped_at_call) == (26, None)


def test_what_it_plays_is_one_line_and_timed_calls_leave_the_report_alone(lab: Lab) -> None:
    seen = []
    with lab.playing(SMALL, 5) as communicator:
        (line,) = communicator.lines
        assert line == (
            f"DYNAMICCL: 8 ranks on 1 nodes: plays 4 blocks from {lab.folder / 'schedule'} "
            f"(hash {SMALL.content_hash}, tuner v5), reports to {lab.folder / 'report'}"
        )
        for call in list(benchmark_calls(SMALL))[:10]:
            communicator.ask(SMALL.collective, call.size_bytes, ALL)
            seen.append(lab.report().calls)
    assert seen == [1, 2, 3, 3, 3, 6, 6, 6, 9, 9]
    assert lab.report().calls == 10


CHUNKED = replace(SMALL, cycles=((replace(RING, chunk_bytes=100_000), TREE),))


def test_what_cannot_be_played_fails_the_communicator(lab: Lab) -> None:
    os.mkfifo(lab.folder / "fifo")
    schedule = "DYNAMICCL_SCHEDULE"
    for played, shape, changes, reason in (
        (SMALL, (16, 2), {}, "made for another number of ranks or nodes"),
        (SMALL, (8, 1), {f"{schedule}_HASH": "0" * 16}, "hash is not DYNAMICCL_SCHEDULE_HASH"),
        (SMALL, (8, 1), {f"{schedule}_HASH": None}, "DYNAMICCL_SCHEDULE_HASH is not set"),
        (SMALL, (8, 1), {schedule: "/nowhere"}, "/nowhere: it cannot be opened"),
        (SMALL, (8, 1), {schedule: str(lab.folder)}, "it cannot be read"),
        (SMALL, (8, 1), {schedule: f"{lab.folder}/fifo"}, "it is too short"),  # must not block
        (SMALL, (8, 1), {schedule: "/dev/zero"}, "it is too long"),
        (CHUNKED, (8, 1), {}, "chunk sizes need NCCL 2.30 or later"),
    ):
        environment = stage(lab.folder, played) | changes
        with (
            pytest.raises(PluginError, match=f"init returned 5; log: DYNAMICCL: .*{reason}"),
            lab.plugin.communicator(*shape, environment=environment),
        ):
            pass
        assert not (lab.folder / "report").exists()


def refused(lab: Lab, data: bytes, reason: str) -> bool:
    """Whether a schedule file of these bytes, whose hash the launcher says, gives one reason."""
    environment = stage(lab.folder, SMALL) | {"DYNAMICCL_SCHEDULE_HASH": data[-8:][::-1].hex()}
    (lab.folder / "schedule").write_bytes(data)
    said = f"init returned 5; log: DYNAMICCL: .*/schedule: {reason}"
    with (
        pytest.raises(PluginError, match=said),
        lab.plugin.communicator(8, 1, environment=environment),
    ):
        pass
    return True


def test_a_damaged_schedule_is_refused(lab: Lab) -> None:
    good = SMALL.to_bytes()
    assert all(refused(lab, good[:size], "") for size in range(len(good)))
    for bit in range(8 * len(good)):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        assert refused(lab, bytes(flipped), ""), bit
    assert refused(lab, good + b"\0", "its length does not fit its header")


#: Of SMALL: two warm-up runs, two sizes, three configs (RING, TREE, ABSTAIN), four blocks.
RUNS, SIZES, CONFIGS, BLOCKS = 48, 48 + 2 * 16, 48 + 2 * 16 + 2 * 8, 48 + 2 * 16 + 2 * 8 + 3 * 8
#: Where, how and what -> what is out of range.
SPOILT: tuple[tuple[int, str, tuple[Any, ...], str], ...] = (
    (8, "<I", (0, 2), "its format version is another"),
    *((at, "<i", (0, -1), "a number in its header") for at in (12, 16, 24, 28, 36, 40, 44)),
    *((at, "<i", (-1, 5000), "a number in its header") for at in (12, 20, 24, 32, 36, 44)),
    (28, "<i", ((1 << 24) + 1,), "a number in its header"),
    (40, "<i", ((1 << 19) + 1,), "a number in its header"),
    (32, "<i", (1,), "its length does not fit its header"),
    (RUNS + 16, "<Q", (0, 1 << 62, 2**64 - 1), "a warm-up run"),
    (RUNS + 24, "<Q", (0, (1 << 24) + 1), "a warm-up run"),
    (SIZES + 8, "<Q", (0, 1 << 62, 2**64 - 1), "a size"),
    (CONFIGS, "<bbbb", ((7, 0, 8, 1), (-2, 0, 8, 1), (1, 3, 8, 1), (1, -2, 8, 1)), "a config"),
    (CONFIGS, "<bbbb", ((1, 0, 65, 1), (1, 0, -3, 1), (1, 0, 8, 2), (1, 0, 8, 0)), "a config"),
    (CONFIGS, "<bbbb", ((-1, -1, 0, 1), (6, 2, 8, 1), (4, 0, 8, 1)), "a config"),
    (CONFIGS + 4, "<i", (-1,), "a config is outside the vocabulary"),
    (BLOCKS + 6, "<H", (3, 65535), "a block has no config"),
)


def test_each_number_is_checked_whatever_the_checksum(lab: Lab) -> None:
    for offset, layout, values, reason in SPOILT:
        for value in values:
            body = bytearray(SMALL.to_bytes()[:-8])
            struct.pack_into(layout, body, offset, *np.atleast_1d(value).tolist())
            sealed = bytes(body) + fnv1a(bytes(body)).to_bytes(8, "little")
            assert refused(lab, sealed, reason), (offset, value)


@pytest.mark.parametrize("version", VERSIONS)
def test_in_another_mode_it_abstains(version: int, lab: Lab) -> None:
    with lab.playing(SMALL, version, DYNAMICCL_MODE="play") as communicator:
        assert not communicator.ask(Collective.AllReduce, 1024, ALL).acted
        if version >= 6:
            cell = (Algorithm.Ring, Protocol.Simple)
            assert communicator.chunk_bytes(cell, 512, Collective.AllReduce) == 512
    (line,) = communicator.lines
    assert "this library is for sweeps, and DYNAMICCL_MODE is 'play'" in line


def test_largest_schedule_is_played(lab: Lab) -> None:
    largest = one_size(MAX_BLOCKS)
    with lab.playing(largest) as communicator:
        assert communicator.ask(Collective.AllReduce, 1024, ALL).config == RING
    report = lab.report()
    assert report.states[:2] == (BlockState.PLAYED, BlockState.NOT_REACHED)
    assert len(report.states) == MAX_BLOCKS


def test_chunk_sizes_are_given_to_the_call_that_they_belong_to(lab: Lab) -> None:
    cells = (
        Config(Algorithm.Ring, Protocol.Simple, 8, 100_000),
        Config(Algorithm.Tree, Protocol.LL128, 8, 5),
        Config(Algorithm.Ring, Protocol.LL, 8),
        Config(num_channels=4, chunk_bytes=1),
    )
    schedule = replace(
        SMALL, warmup=(), calls_per_half=2, sizes=(1024,), cycles=tuple((each,) for each in cells)
    )
    own = 1 << 19
    ring, tree = (Algorithm.Ring, Protocol.Simple), (Algorithm.Tree, Protocol.LL128)
    short = (Algorithm.Ring, Protocol.LL)
    with lab.playing(schedule) as communicator:

        def of_part(
            cell: tuple[Algorithm, Protocol], own: int = own, of: Collective = SMALL.collective
        ) -> int:
            return communicator.chunk_bytes(cell, own, of)

        def chunk(cell: tuple[Algorithm, Protocol], costs: CostTable = ALL) -> int:
            communicator.ask(Collective.AllReduce, 1024, costs)
            return of_part(cell)

        assert of_part(ring) == own  # before any question
        assert chunk(ring) == 99_840  # a multiple of 512
        assert of_part(ring, 70_000) == 69_632  # never more than NCCL's own
        assert of_part(ring, 100) == 100  # less than a grain
        assert of_part(tree) == own
        assert of_part(short) == own
        assert of_part(ring, of=Collective.Reduce) == own
        assert [chunk(ring) for _ in range(3)] == [99_840] * 3
        assert of_part(ring) == 99_840  # of another part
        assert chunk(tree) == 1920  # a grain at least
        communicator.ask(Collective.AllReduce, 1024, ALL)
        assert chunk(tree) == own  # it may be about either of the two
        assert chunk(tree) == 1920
        assert [chunk(short) for _ in range(4)] == [own] * 4
        cheap = ALL.copy()
        cheap[short] = 1
        assert [chunk(short, cheap) for _ in range(3)] == [16] * 3
        assert chunk(short, np.full_like(ALL, -1)) == own  # NCCL's own chunk too
        assert chunk(short) == own  # past the end
    assert lab.report().chunk_bytes == (69_632, 1920, 0, 16)


def test_second_communicator_plays_and_leaves_the_report_alone(lab: Lab) -> None:
    with lab.playing(SMALL) as first, lab.playing(SMALL, 4) as second:
        play(second, SMALL)
        assert set(lab.report().states) == {BlockState.NOT_REACHED}
        first.ask(SMALL.collective, 1024, ALL)
    assert lab.report().calls == 1
    assert first.lines[0].endswith(f", reports to {lab.folder / 'report'}")
    assert "report" not in second.lines[0].removeprefix(str(lab.folder))


def test_report_that_cannot_be_written_is_one_line(lab: Lab) -> None:
    report = str(lab.folder / "nowhere" / "report")
    with lab.playing(SMALL, DYNAMICCL_SWEEP_REPORT=report) as communicator:
        assert not communicator.ask(SMALL.collective, 1024, ALL).acted
        communicator.ask(SMALL.collective, 2048, ALL)
        assert communicator.ask(SMALL.collective, 1024, ALL).config == RING
    complaint, _ = communicator.lines
    assert complaint.endswith(f"no sweep report: {report}: it cannot be created")


@pytest.mark.parametrize(("calls", "reached"), [(0, 0), (3, 1), (26, 4)])
def test_report_outlives_a_kill(calls: int, reached: int, lab: Lab) -> None:
    sizes = [call.size_bytes for call in benchmark_calls(SMALL)][:calls]
    done = lab.in_a_process(SMALL, sizes, "kill")
    assert done.returncode == -signal.SIGKILL, done.stderr
    report = lab.report()
    played = (BlockState.PLAYED, BlockState.PLAYED, BlockState.ABSTAINED, BlockState.PLAYED)
    assert report.states == (*played[:reached], *[BlockState.NOT_REACHED] * (4 - reached))
    assert calls - SMALL.calls_per_half < report.calls <= calls


def test_file_size_limit_means_no_report_and_no_signal(lab: Lab) -> None:
    sizes = [call.size_bytes for call in benchmark_calls(SMALL)]
    done = lab.in_a_process(SMALL, sizes, "64")
    assert done.returncode == 0, done.stderr
    assert "report: files may not grow that long here" in done.stdout
    assert not (lab.folder / "report").exists()


def test_full_disk_means_no_report(lab: Lab) -> None:
    disk = lab.folder / "disk"
    disk.mkdir()
    unshare = shutil.which("unshare")
    mount = f"mount -t tmpfs -o size=16k tmpfs {disk}"
    spaces = [str(unshare), "--user", "--map-root-user", "--mount", "sh", "-c"]
    if unshare is None or subprocess.run([*spaces, mount], check=False).returncode != 0:
        pytest.skip("no mount namespaces for an ordinary user here")
    within = (*spaces, f'{mount} && "$@" && ls {disk}', "sh")
    own = {"DYNAMICCL_SWEEP_REPORT": str(disk / "report")}
    done = lab.in_a_process(one_size(20_000), [1024] * 40_000, "end", *within, **own)
    assert done.returncode == 0, done.stderr
    complaint, plays = done.stdout.splitlines()  # and `ls` shows an empty directory
    assert complaint.endswith("report: its space cannot be reserved")
    assert "plays 20000 blocks" in plays
