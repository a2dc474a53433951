"""The journal: what a launch leaves on disk, the parts made of it, and who may write there."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

from dynamiccl.collect.journal import (
    Journal,
    hold,
    journal_folder,
    open_journal,
    progress_on_disk,
    with_noise_band,
)
from dynamiccl.collect.schedule import Launch, LaunchMode
from dynamiccl.datasets import store
from dynamiccl.datasets.schema import MEASUREMENTS
from dynamiccl.datasets.store import measurements_table
from dynamiccl.errors import CorruptFile, UserError
from tests.collect.benchmark.stand_in import sweep
from tests.rows import MIB, default, forced

MADE = sweep()
TRIALS = MADE.trials
STAMP = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)


def launch(number: int, *rows: dict[str, Any], **more: Any) -> Launch:
    named = tuple({**row, "system": "box", "sweep": "grid", "launch": f"l{number}"} for row in rows)
    measured = ((TRIALS[0], named),) if named else ()
    setting = TRIALS[0].setting
    return Launch(f"l{number}", 0, setting, LaunchMode.SWEEP, TRIALS[:1], measured=measured, **more)


def journal(
    out: Path, *, resume: bool = True, made: Any = MADE, runner: str = "r"
) -> AbstractContextManager[Journal]:
    out.mkdir(exist_ok=True)
    return open_journal(made, out, runner, resume=resume)


def folder_of(out: Path) -> Path:
    return journal_folder(MADE, out)


def test_segment_becomes_one_part_and_is_kept(tmp_path: Path) -> None:
    with journal(tmp_path) as first:
        first.commit(launch(0, default(100.0, timestamp=STAMP), default(110.0, repeat=1)), 1)
        first.commit(launch(1), 1)
        first.commit(launch(2, forced("Ring", "LL", 90.0, throttled=True)), 1)
        assert progress_on_disk(folder_of(tmp_path)) == (3, 2)
        first.close_segment()
        first.close_segment()
    [path] = store.part_paths(tmp_path)
    rows = store.read(tmp_path)
    assert rows["launch"].to_list() == ["l0", "l0", "l2"]
    assert rows["aa_noise_band"].to_list() == pytest.approx([0.1] * 3)
    assert rows["timestamp"].to_list() == [STAMP, None, None]
    origin = store.part_provenance(path)
    assert (origin["segment"], origin["runner"], origin["sweep_file"]) == (0, "r", MADE.text)
    with journal(tmp_path) as second:
        [kept] = second.launches["l2"]["measured"]
        assert kept[2] == [{"time_us": 90.0, "throttled": True, "in_place": False}]
        assert progress_on_disk(folder_of(tmp_path)) == (3, 2)
    # A part that was moved away is not made anew of what is left.
    path.unlink()
    with journal(tmp_path) as third:
        assert list(third.launches) == ["l0", "l1", "l2"]
    assert not store.part_paths(tmp_path)


def test_damage_in_the_middle_is_refused_with_the_files_name(tmp_path: Path) -> None:
    with journal(tmp_path) as first:
        first.commit(launch(0), 1)
        first.commit(launch(1), 1)
    path = folder_of(tmp_path) / "segment-000000.jsonl"
    path.write_bytes(b"{oops" + path.read_bytes()[5:])
    with pytest.raises(CorruptFile, match=r"segment-000000\.jsonl is damaged"), journal(tmp_path):
        pass


def test_begun_sweep_needs_resume_and_the_same_grid(tmp_path: Path) -> None:
    with journal(tmp_path, resume=False):
        pass
    with pytest.raises(UserError, match="go on with --resume"), journal(tmp_path, resume=False):
        pass
    other = sweep(cycles="1", protocols='["LL"]')
    for changed, what in (({"made": other}, "trials"), ({"runner": "simulator"}, "runner")):
        with pytest.raises(UserError, match=f"with another {what}"), journal(tmp_path, **changed):
            pass
    with journal(tmp_path, made=sweep(cycles="9")):
        pass


def bands(*rows: dict[str, Any]) -> list[float | None]:
    return list(with_noise_band(measurements_table(rows))["aa_noise_band"].to_pylist())


def test_band_is_of_nine_in_ten_pairs_of_defaults() -> None:
    rows = [default(100.0), default(103.0, repeat=1), forced("Ring", "LL", 50.0)]
    assert bands(*rows) == pytest.approx([0.03] * 3)
    # 100..104: ten pairs; the largest is 4 %, the ninth by size 3/101.
    assert bands(*(default(100.0 + i, repeat=i) for i in range(5)))[0] == pytest.approx(0.03)
    assert bands(default(1.0), default(2.0, size_bytes=2 * MIB)) == [None, None]
    # Two processes make a pair: untouched, and under our plugin.
    assert bands(default(1.0), default(2.0, default_scope="profile")) == [1.0, 1.0]
    assert with_noise_band(measurements_table([])).schema == MEASUREMENTS
    assert bands(default(None, status="failed")) == [None]
    # Only usable ones of one setting and round make a pair.
    others: tuple[dict[str, Any], ...] = (
        *({"in_place": True}, {"status": "wrong_values"}, {"throttled": True}, {"round": 1}),
        *({"num_nodes": 2}, {"ranks_per_node": 4}, {"datatype": "half"}),
        {"is_default": False, "requested_algorithm": "Ring"},
        *({"launch_profile": "net"}, {"interference_kind": "cpu", "interference_level": 0.5}),
    )
    for other in others:
        assert bands(default(1.0), {**default(2.0, repeat=1), **other}) == [None, None], other


HOLDS: Final = """
import sys
from pathlib import Path
from dynamiccl.collect.journal import hold
if sys.argv[2] == "without":
    import errno, fcntl
    def flock(*_): raise OSError(errno.ENOSYS, "Function not implemented")
    fcntl.flock = flock
with hold(Path(sys.argv[1])):
    print("taken", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(name="held", params=["with", "without"])
def held_fixture(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A lock that another process holds, on a file system with and without locks."""
    command = [sys.executable, "-P", "-c", HOLDS, str(tmp_path), request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"taken\n"
        if request.param == "without":
            no_locks(monkeypatch)
        yield request.param, holder
        holder.kill()


def no_locks(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOLCK) -> None:
    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def test_a_second_run_is_refused(held: tuple[str, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    locks, holder = held
    runs = "is running" if locks == "with" else r".*may be running"
    said = rf"process {holder.pid} on .* ?{runs} this sweep"
    with pytest.raises(UserError, match=said), hold(tmp_path):
        pass
    holder.kill()
    holder.wait()
    if locks == "without":
        # The owner's file stays, and nobody can tell.
        gone = r"where you know that it is gone, remove that file"
        with pytest.raises(UserError, match=gone), hold(tmp_path):
            pass
        (tmp_path / "owner").unlink()
    with hold(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_requeued_job_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_locks(monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with hold(tmp_path):
        for job in ("7", "8"):
            monkeypatch.setenv("SLURM_JOB_ID", job)
            said = r"\(job 7\) may be running this sweep"
            with pytest.raises(UserError, match=said), hold(tmp_path):
                pass
            monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        with hold(tmp_path):
            assert json.loads((tmp_path / "owner").read_text())["restart"] == 1
