"""One run of a sweep at a time where the file system has no locks, as Lustre without `-o flock`."""

import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import pytest

from dynamiccl.collect.runs.lock import SweepLock
from dynamiccl.errors import UserError

WITHOUT_LOCKS: Final = """
import errno, fcntl, sys
from pathlib import Path
def flock(*_): raise OSError(errno.ENOSYS, "Function not implemented")
fcntl.flock = flock
from dynamiccl.collect.runs.lock import SweepLock
from dynamiccl.errors import UserError
lock = SweepLock(Path(sys.argv[1]), take_over=False)
try:
    lock.take()
except UserError:
    print("refused", flush=True)
else:
    print("taken", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True, params=[errno.ENOSYS, errno.ENOLCK], ids=["lustre", "nfs"])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def other_run(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", WITHOUT_LOCKS, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def word_of(run: subprocess.Popen[str]) -> str:
    assert run.stdout is not None
    return run.stdout.readline().strip()


def lock(folder: Path, *, take_over: bool = False) -> SweepLock:
    return SweepLock(folder, take_over=take_over)


def leave(folder: Path, **owner: Any) -> None:
    """What a run on another node, which cannot be asked, has left."""
    there = {"host": "n17", "pid": 4711, "started": "b 1", "job": None, "restart": "0"}
    (folder / "owner").write_text(json.dumps(there | owner))


def test_it_is_taken_once_and_given_back(tmp_path: Path) -> None:
    first = lock(tmp_path)
    first.take()
    with pytest.raises(UserError, match=rf"process {os.getpid()} on .* may be running this sweep"):
        lock(tmp_path).take()
    first.release()
    second = lock(tmp_path)
    second.take()
    second.release()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_killed_run_of_this_host_holds_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with other_run(tmp_path) as holder:
        assert word_of(holder) == "taken"
        with pytest.raises(UserError, match=rf"process {holder.pid} on .* --take-over"):
            lock(tmp_path).take()
        holder.kill()
        holder.wait()
    with caplog.at_level(logging.WARNING):
        lock(tmp_path).take()
    assert f"taking over from process {holder.pid} on" in caplog.text


def test_another_process_of_the_same_number_is_no_owner(tmp_path: Path) -> None:
    leave(tmp_path, host=os.uname().nodename, pid=os.getpid(), started="another boot 1")
    lock(tmp_path).take()


def test_of_another_host_nobody_knows_and_take_over_says_so(tmp_path: Path) -> None:
    leave(tmp_path)
    with pytest.raises(UserError, match="process 4711 on n17 may be running this sweep"):
        lock(tmp_path).take()
    lock(tmp_path, take_over=True).take()
    assert json.loads((tmp_path / "owner").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("says", "is_over"),
    [
        ({"code": 0, "out": "7|RUNNING|None|n17|run"}, False),
        ({"code": 0, "out": "7|NODE_FAIL|None|n17|run"}, True),
        ({"code": 1, "err": "slurm_load_jobs error: Invalid job id specified"}, True),
        ({"code": 1, "err": "Unable to contact slurm controller"}, False),
    ],
)
def test_slurm_says_whether_the_job_of_another_host_is_over(
    says: Mapping[str, Any], is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(
        f"#!/bin/sh\necho '{says.get('out', '')}'\necho '{says.get('err', '')}' >&2\n"
        f"exit {says['code']}\n"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    folder = tmp_path / "journal"
    folder.mkdir()
    leave(folder, job="7")
    refusal = pytest.raises(UserError, match="may be running this sweep")
    with nullcontext() if is_over else refusal:
        lock(folder).take()


def test_a_requeued_job_takes_over_from_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    leave(tmp_path, job="7")
    with pytest.raises(UserError, match="may be running this sweep"):
        lock(tmp_path).take()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    lock(tmp_path).take()


def test_of_many_that_find_a_dead_owner_one_runs(tmp_path: Path) -> None:
    leave(tmp_path, host=os.uname().nodename, pid=2**22 + 1)
    runs = [other_run(tmp_path) for _ in range(6)]
    try:
        words = [word_of(run) for run in runs]
    finally:
        for run in runs:
            run.communicate()
    assert sorted(words) == ["refused"] * 5 + ["taken"]


def test_an_error_that_is_not_about_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output"):
        lock(tmp_path).take()
