"""What the built profiler records, of which calls it takes the times, and its files.

A test has a copy of the library, and so what else a process has once: the files and the budget of
sampled calls.
"""

import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamiccl.collect.calls import (
    ENTRY,
    FLAG_CAPTURED,
    FLAG_INCOMPLETE,
    HEADER,
    read_header,
    read_records,
)
from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.collect.output import FileReport
from dynamiccl.datasets import store
from dynamiccl.libraries import PROFILER_NAME
from tests.collect.calls.rank import (
    COLL,
    KERNEL_CH,
    KERNEL_LAUNCH,
    P2P,
    Call,
    Comm,
    Kernel,
    Nccl,
    OneOf,
)

VERSIONS = pytest.mark.parametrize("version", [4, 5, 6])
BURST = 16
BROADCAST, REDUCE, GATHER, SCATTER, ALL_REDUCE = range(5)
UNKNOWN = 255


class Job:
    """A process with its own copy of the library, which records into `calls`."""

    def __init__(self, plugin: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.calls, self.patch = folder / "calls", patch
        self.library = shutil.copy(plugin.with_name(PROFILER_NAME), folder / "profiler.so")
        patch.delenv("RANK", raising=False)
        patch.setenv("DYNAMICCL_CALLS_DIR", str(self.calls))

    def set(self, **variables: str) -> None:
        for name, value in variables.items():
            self.patch.setenv(name, value)

    def nccl(self, version: int = 5, **more: Any) -> Nccl:
        return Nccl(self.library, version, **more)

    @contextmanager
    def recording(self, version: int = 5, **shape: Any) -> Iterator[Comm]:
        """One communicator, ended behind the `with`."""
        comm = self.nccl(version).comm(**shape)
        yield comm
        comm.finalize()

    @property
    def files(self) -> list[Path]:
        return sorted(self.calls.iterdir())

    @property
    def records(self) -> "np.ndarray[tuple[int], np.dtype[np.void]]":
        """In the order in which they were written."""
        return np.concatenate([read_records(p, FileReport(str(p), "calls")) for p in self.files])


@pytest.fixture
def job(plugin_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(plugin_path, tmp_path, monkeypatch)


@VERSIONS
def test_records_say_what_ran(version: int, job: Job) -> None:
    comm = job.nccl(version, allgatherv=False).comm(0xABC, rank=3, ranks=8, nodes=2)
    assert comm.call()[0].handle is None  # not sampled: nothing more to hear
    for call in (
        Call("AllGather", 4096, "ncclInt8", 4, "PAT", "SIMPLE"),
        Call("ReduceScatter", 100, "ncclBfloat16", 1, "NVLS", "LL"),
        Call("Broadcast", 64, "ncclInt8", 1, "COLLNET_CHAIN", "LL"),
        Call("Reduce", 3, "Unknown", 1, "NVLS_TREE", "new"),
        Call("AllReduce", 5, "ncclFloat64", 1, "COLLNET_DIRECT", "LL128"),
        Call("AllReduce", 5, "ncclFloat8e5m2", 1, "TREE", "LL128"),
        Call("AlltoAll", 5, "ncclFloat64", 1, "RING", "LL128"),  # no tuner is asked about it
    ):
        comm.call(call)
    comm.finalize()
    found = job.records
    told = [name for name in found.dtype.names or () if name != "enqueued_ns"]
    same = {"comm_id": 0xABC, "rank": 3, "num_ranks": 8, "num_nodes": 2, "num_warps": 16}
    numbers = (
        *("collective", "sequence", "size_bytes", "datatype"),
        *("algorithm", "protocol", "num_channels"),
    )
    wanted = [
        (ALL_REDUCE, 0, 4 << 20, 7, 1, 1, 2),
        (GATHER, 0, 4096 * 8, 0, 6, 2, 4),
        (SCATTER, 0, 1600, 9, 4, 0, 1),
        (BROADCAST, 0, 64, 0, 3, 0, 1),
        (REDUCE, 0, 3, 1, 5, UNKNOWN, 1),
        (ALL_REDUCE, 1, 40, 8, 2, 1, 1),
        (ALL_REDUCE, 2, 5, 11, 0, 1, 1),
    ]
    plain = dict.fromkeys(told, 0) | same
    assert [{name: int(row[name]) for name in told} for row in found] == [
        plain | dict(zip(numbers, row, strict=True)) for row in wanted
    ]
    assert (found["enqueued_ns"] > 1_600_000_000_000_000_000).all()


@VERSIONS
def test_times_are_of_all_channels_or_none(version: int, job: Job) -> None:
    job.set(DYNAMICCL_SAMPLE_PERCENT="100")
    nccl = job.nccl(version)
    comm = nccl.comm(1)
    launched = [comm.call()[0] for _ in range(8)]
    assert {each.kernels for each in launched} == {2}
    comm.kernels(launched[0], 110, 190)
    comm.kernel(launched[1], 0, 100, 200)  # the other one is lost
    for channel, ends in ((63, (300, 400)), (63, (300, 400)), (2, (290, 350)), (3, (1, 999))):
        comm.kernel(launched[2], channel, *ends)  # one twice, and one too late
    comm.kernels(launched[3], 500, 500)  # a clock that stood still
    comm.kernel(launched[6], 0, 600, 700)
    comm.stop(comm.start(KERNEL_CH, launched[6].handle, OneOf(kernel=Kernel(1, 600))))  # no end
    comm.finalize()
    comm.kernels(launched[4], 1, 2)  # after the end of everything
    later = nccl.comm(2)  # what is late for another does not reach it
    fresh = later.call()[0]
    comm.kernels(launched[5], 1, 2)
    comm.stop(launched[5].handle)
    later.kernels(fresh, 50, 60)
    later.finalize()
    found = job.records
    assert Counter(found["comm_id"].tolist()) == {1: 8, 2: 1}
    times = {
        (r["comm_id"], r["sequence"]): (r["start_ns"], r["stop_ns"], r["flags"]) for r in found
    }
    timed = {(1, 0): (110, 190, 0), (1, 2): (290, 400, 0), (2, 0): (50, 60, 0)}
    assert times == {key: timed.get(key, (0, 0, FLAG_INCOMPLETE)) for key in times}


def test_the_oldest_gives_way(job: Job) -> None:
    """Of more calls than can wait for their times; what is late for it is nobody's."""
    job.set(DYNAMICCL_SAMPLE_PERCENT="100")
    with job.recording() as comm:
        waiting = [comm.call()[0] for _ in range(1100)]
        for place, launched in enumerate(waiting):
            comm.kernels(launched, 1 if place < 76 else 100, 200)
    found = np.sort(job.records, order="sequence")
    assert found["sequence"].tolist() == [*range(1100)]
    assert (found["flags"][:76] == FLAG_INCOMPLETE).all()
    assert (found["start_ns"][76:] == 100).all()


@VERSIONS
def test_captured_calls_are_marked(version: int, job: Job) -> None:
    with job.recording(version) as comm:
        comm.call()
        for _ in range(3):
            comm.call(Call(captured=True))
    found = job.records
    assert found["sequence"].tolist() == [0, 1, 1, 1]
    # 2.27 does not say so; there a number that stands still does.
    first = 0 if version == 4 else FLAG_CAPTURED
    assert found["flags"].tolist() == [0, first, FLAG_CAPTURED, FLAG_CAPTURED]


def sampled(comm: Comm, calls: int, *, captured: bool = False) -> list[int]:
    """The places, among `calls`, of those for which the mask was wide."""
    wide = []
    for place in range(calls):
        (launched,) = comm.call(Call(captured=captured))
        comm.kernels(launched, 100, 200)
        if launched.kernels:
            wide.append(place)
    return wide


@VERSIONS
def test_one_percent_is_whole_bursts_that_all_ranks_know(version: int, job: Job) -> None:
    quiet = COLL | (0 if version == 4 else KERNEL_LAUNCH)
    with job.recording(version) as comm:
        assert comm.nccl.mask.value == quiet
        assert sampled(comm, 5000) == [
            place for place in range(5000) if place // BURST % 100 == 0 and place >= BURST
        ]
        assert comm.nccl.mask.value == quiet


@pytest.mark.parametrize(
    ("percent", "taken"),
    [("0", 0), ("100", 320), ("50", 144), ("12.5", 32), ("", 0), ("ten", 0), ("100.1", 0)],
)
def test_share_of_calls_is_what_was_asked_for(percent: str, taken: int, job: Job) -> None:
    job.set(DYNAMICCL_SAMPLE_PERCENT=percent)
    with job.recording() as comm:
        assert len(sampled(comm, 320)) == taken
    assert not comm.nccl.is_wide()
    is_wrong = "is not a number from 0 to 100" in comm.nccl.lines[0]
    assert is_wrong == (percent in {"ten", "100.1"})


@pytest.mark.parametrize("size", [4, 64])
def test_large_groups_are_sampled_too(size: int, job: Job) -> None:
    """All calls of a group are made before the first of their events."""
    with job.recording() as comm:
        groups = (comm.call(*[Call()] * size) for _ in range(9600 // size))
        wide = sum(each.kernels > 0 for group in groups for each in group)
        assert 0 < wide <= 9600 // 100 + 64 + size
    assert not comm.nccl.is_wide()


@VERSIONS
def test_a_burst_that_never_ends_has_a_budget(version: int, job: Job) -> None:
    nccl = job.nccl(version)
    stalled, busy = nccl.comm(1), nccl.comm(2)
    sampled(stalled, 1604)
    assert nccl.is_wide()
    assert 0 < len(sampled(busy, 1500)) < 100
    assert not nccl.is_wide()
    sampled(stalled, 1600)
    assert nccl.is_wide()
    for _ in range(200):
        busy.start(P2P)  # sends and receives cost as much
    assert not nccl.is_wide()


@VERSIONS
def test_capture_ends_a_burst(version: int, job: Job) -> None:
    nccl = job.nccl(version)
    comm = nccl.comm()
    sampled(comm, 1599)
    assert not nccl.is_wide()
    # 2.27 does not tell of a capture: a burst may begin in one, and goes as far as any other.
    assert len(sampled(comm, 40, captured=True)) <= (BURST if version == 4 else 0)
    assert not nccl.is_wide()
    other = nccl.comm(2)
    sampled(other, 1602)
    assert nccl.is_wide()
    other.append(Call(captured=True))
    assert nccl.is_wide() == (version == 4)


def test_a_broadcast_is_recorded_by_its_call(job: Job) -> None:
    """From 2.29 on nothing else tells of it, and not how it ran: no default stands for that."""
    comm = job.nccl(6).comm(ranks=1)
    broadcast = Call("Broadcast", 1000, "ncclBfloat16", root=3)
    comm.call(broadcast)
    comm.call()
    comm.call(broadcast, broadcast)
    comm.call(Call("Broadcast", 10, "ncclBfloat16", captured=True))
    comm.call(broadcast)
    comm.finalize()
    found = job.records
    broadcasts = found[found["collective"] == BROADCAST]
    assert broadcasts["sequence"].tolist() == [0, 1, 2, 3, 3]
    assert broadcasts["size_bytes"].tolist() == [2000, 2000, 2000, 20, 2000]
    assert broadcasts["flags"].tolist() == [0, 0, 0, FLAG_CAPTURED, 0]
    assert len(found) == 6
    out = job.calls.with_name("out")
    import_files([job.calls], out, options=ImportOptions(system="box", sweep="jobs"))
    calls = store.read(out, "calls").filter(collective="Broadcast", sequence=0)
    told = calls.select("datatype", "size_bytes", "asks_tuner", "sampled", "time_us").row(0)
    assert told == ("bfloat16", 2000, True, False, None)
    names = ("algorithm", "protocol", "num_channels", "num_warps")
    assert calls.select(f"actual_{name}" for name in names).row(0) == (None,) * 4


def test_broadcasts_of_several_roots_in_a_group_are_none(job: Job) -> None:
    """NCCL runs them as one AllGatherV, about which it asks as about an AllGather."""
    with job.recording(6) as comm:
        comm.call(*[Call("Broadcast", 10 + root, root=root) for root in range(4)])
        comm.call(Call("Broadcast", 20, root=2))
    assert job.records["size_bytes"].tolist() == [80]


def test_header_says_whose_calls_these_are(job: Job) -> None:
    machine = "gpu=box*8;mig=0;nic=socket*1"
    job.set(OMPI_COMM_WORLD_RANK="12", SLURM_JOB_ID="88")
    job.set(DYNAMICCL_MODE="table", DYNAMICCL_MACHINE=machine)
    for comm_id in range(3):  # all into one file
        with job.recording(comm_id=comm_id) as comm:
            comm.call()
    (path,) = job.files
    host, pid = os.uname().nodename, os.getpid()
    assert path.name == f"calls-{host}-{pid}-r12-0000.dcc"
    header = read_header(path)
    told = ("host", "mode", "job", "fingerprint", "world_rank", "sample_ppm")
    assert {name: header[name] for name in told} == {
        "host": host.encode(),
        "mode": b"table",
        "job": b"88",
        "fingerprint": machine.encode(),
        "world_rank": 12,
        "sample_ppm": 10_000,
    }
    assert len(job.records) == 3


def test_files_rotate_within_a_bound(job: Job) -> None:
    job.set(DYNAMICCL_CALLS_MAX_MIB="1", DYNAMICCL_SAMPLE_PERCENT="0")
    mib = 1 << 20
    nccl, calls = job.nccl(5), 3 * mib // 2 // ENTRY.itemsize
    comm = nccl.comm()
    for number in range(calls):
        comm.call()
        if number % 2000 == 0:
            other = nccl.comm()
            other.finalize()
            with suppress(FileNotFoundError):  # the recorder took it away meanwhile
                assert sum(path.stat().st_size for path in job.files) <= mib
    comm.finalize()
    assert len(job.files) == 8
    assert all("-rx-" in path.name for path in job.files)
    kept = job.records["sequence"]
    assert kept.tolist() == [*range(calls - len(kept), calls)]
    assert len(kept) * ENTRY.itemsize > mib * 3 // 4


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda at: (at.mkdir(), at.chmod(0o702)), "others may write to it"),
        (lambda at: (at.mkdir(), shutil.chown(at, 12345)), "it belongs to another user"),
        (lambda at: at.symlink_to("/tmp"), "it is not a directory, or a symbolic link to one"),
        (lambda at: at.write_text("x"), "it is not a directory, or a symbolic link to one"),
    ],
)
def test_others_directory_is_refused(make: Callable[[Path], object], why: str, job: Job) -> None:
    if "another" in why and os.geteuid() != 0:
        pytest.skip("only root may give a directory away")
    calls = job.calls
    make(calls)
    with job.recording() as comm:
        comm.call()
    (line,) = comm.nccl.lines
    assert line.endswith(f"cannot keep calls in {calls}: {why}; GPU times of 1 % of the calls")
    assert not list(calls.parent.rglob("*.dcc"))


def test_on_a_full_disk_the_file_ends_with_a_whole_entry(job: Job) -> None:
    """As on a full disk a write comes back short, and the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    two = HEADER.itemsize + 2 * ENTRY.itemsize
    resource.setrlimit(resource.RLIMIT_FSIZE, (two + 11, before[1]))
    try:
        with job.recording() as comm:
            for _ in range(5):
                comm.call()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.stat().st_size for path in job.files] == [two]


def test_killed_rank_loses_no_more_than_its_buffer(job: Job) -> None:
    """The file of a process that never finalizes is read up to its last whole entry."""
    code = (
        "import os, sys, time; from tests.collect.calls.rank import Nccl\n"
        "comm = Nccl(sys.argv[1], 5).comm(ranks=1)\n"
        "for _ in range(41): comm.call()\n"
        "time.sleep(0.5); os._exit(9)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code, str(job.library)], cwd=root, check=False)
    assert done.returncode == 9
    assert len(job.records) == 41


def test_without_a_directory_it_only_hears_of_captures(job: Job) -> None:
    job.patch.delenv("DYNAMICCL_CALLS_DIR")
    before = {path.name for path in Path("/proc/self/task").iterdir()}
    with job.recording() as comm:
        assert comm.nccl.mask.value == COLL | KERNEL_LAUNCH
        assert sampled(comm, 2000) == []
    # One of the test before may end meanwhile.
    assert {path.name for path in Path("/proc/self/task").iterdir()} <= before
    said = "8 ranks on 1 nodes: keeps no calls; GPU times of 1 % of the calls"
    assert comm.nccl.lines == [f"DYNAMICCL: {said}"]


def test_disabled_it_asks_for_no_events(job: Job) -> None:
    job.set(DYNAMICCL_DISABLE="1")
    with job.recording() as comm:
        assert (comm.context.value, comm.nccl.mask.value) == (None, 0)
        comm.call()
    assert not (job.calls).exists()
