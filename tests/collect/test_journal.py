import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.collect.runs.journal import Journal, Record, Sealing
from dynamiccl.errors import CorruptFile, MachineError, UserError

GRID = {"trials": "abc", "runner": "Fake"}


def commit(number: int, **more: Any) -> Record:
    return {
        "launch": f"l{number}",
        "round": 0,
        "unfinished": [],
        "quarantined": [],
        "facts": {},
        "outcomes": [],
        "rows": [{"number": number}],
        **more,
    }


def journal(folder: Path, *, resume: bool = True, grid: dict[str, str] | None = None) -> Journal:
    return Journal(folder, grid or GRID, resume=resume)


def launches(found: Journal) -> list[str]:
    return [record["launch"] for record in found.commits]


def nothing(_: Sealing) -> None:
    raise AssertionError("nothing is to be sealed")


def test_commits_are_there_when_it_is_opened_again(tmp_path: Path) -> None:
    with journal(tmp_path) as first:
        first.begin_round({"round": 0, "picks": [["a", 0, None]]})
        first.commit(commit(0))
        first.commit(commit(1, facts={"x": 1}))
    with journal(tmp_path) as second:
        assert launches(second) == ["l0", "l1"]
        assert second.rounds == [{"round": 0, "picks": [["a", 0, None]]}]
        assert second.commits[1]["facts"] == {"x": 1}


def test_sealed_rows_are_handed_on_once_and_the_rest_is_kept(tmp_path: Path) -> None:
    sealed: list[tuple[int, list[Any]]] = []

    def keep(sealing: Sealing) -> None:
        sealed.append((sealing.segment, [commit["rows"] for commit in sealing.commits]))

    with journal(tmp_path) as first:
        first.commit(commit(0))
        first.seal(keep)
        first.seal(nothing)
        first.commit(commit(1))
        first.seal(keep)
        assert all("rows" not in record for record in first.commits)
    assert sealed == [(0, [[{"number": 0}]]), (1, [[{"number": 1}]])]
    with journal(tmp_path) as second:
        assert launches(second) == ["l0", "l1"]
        assert all("rows" not in record for record in second.commits)
        second.settle({0, 1}, nothing)


def test_open_segment_of_a_crash_is_sealed_by_the_next_run(tmp_path: Path) -> None:
    with journal(tmp_path) as first:
        first.commit(commit(0))
    sealed: list[Sealing] = []
    with journal(tmp_path) as second:
        second.settle(set(), sealed.append)
        second.commit(commit(1))
        second.seal(sealed.append)
    assert [s.segment for s in sealed] == [0, 1]
    with journal(tmp_path) as third:
        third.settle({0, 1}, nothing)
        assert launches(third) == ["l0", "l1"]


def test_part_that_was_written_before_a_crash_is_not_written_again(tmp_path: Path) -> None:
    def crash(_: Sealing) -> None:
        raise KeyboardInterrupt

    with journal(tmp_path) as first:
        first.commit(commit(0))
        with pytest.raises(KeyboardInterrupt):
            first.seal(crash)
    with journal(tmp_path) as second:
        second.settle({0}, nothing)
        assert launches(second) == ["l0"]
    assert not list(tmp_path.glob("segment-*.jsonl"))


def test_lines_left_beside_their_sealed_segment_count_once(tmp_path: Path) -> None:
    with journal(tmp_path) as first:
        first.commit(commit(0))
        lines = (tmp_path / "segment-000000.jsonl").read_text()
        first.seal(lambda _: None)
    (tmp_path / "segment-000000.jsonl").write_text(lines)
    with journal(tmp_path) as second:
        second.settle({0}, nothing)
        assert launches(second) == ["l0"]


@given(cut=st.integers(1, 400))
@settings(deadline=None, max_examples=40)
def test_torn_last_line_is_no_commit(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("journal")
    with journal(folder) as first:
        first.commit(commit(0))
        first.commit(commit(1))
    path = folder / "segment-000000.jsonl"
    whole = path.read_bytes()
    cut = min(cut, len(whole))
    path.write_bytes(whole[:-cut])
    left = whole[:-cut].count(b"\n")
    with journal(folder) as second:
        assert launches(second) == [f"l{number}" for number in range(left)]
        second.commit(commit(7))
    with journal(folder) as third:
        assert launches(third) == [*(f"l{number}" for number in range(left)), "l7"]


def test_damage_in_the_middle_is_refused_with_the_file_s_name(tmp_path: Path) -> None:
    with journal(tmp_path) as first:
        first.commit(commit(0))
        first.commit(commit(1))
    path = tmp_path / "segment-000000.jsonl"
    path.write_bytes(b"{oops" + path.read_bytes()[5:])
    with pytest.raises(CorruptFile, match=r"segment-000000\.jsonl is damaged"), journal(tmp_path):
        pass


def test_begun_sweep_needs_resume_and_another_grid_is_refused(tmp_path: Path) -> None:
    with journal(tmp_path, resume=False):
        pass
    with pytest.raises(UserError, match="go on with --resume"), journal(tmp_path, resume=False):
        pass
    other = {**GRID, "trials": "xyz"}
    with pytest.raises(UserError, match="other trials"), journal(tmp_path, grid=other):
        pass


def test_second_run_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from dynamiccl.collect.runs.journal import Journal\n"
        f"with Journal(Path({str(tmp_path)!r}), {GRID!r}, resume=True):\n"
        "    print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(UserError, match=rf"process {holder.pid} on .* is running this sweep"):
            journal(tmp_path).__enter__()
        holder.kill()
        holder.wait()
        with journal(tmp_path):
            pass  # a killed run holds nothing


def test_full_disk_stops_cleanly_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    room = 40

    def write(descriptor: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(descriptor, data[:room])
        room -= written
        return written

    with journal(tmp_path) as first:
        first.commit(commit(0))
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(MachineError, match="the disk is full; everything measured before"):
            first.commit(commit(1))
        monkeypatch.undo()
    assert (tmp_path / "segment-000000.jsonl").read_bytes().count(b"\n") == 1
    with journal(tmp_path) as second:
        assert launches(second) == ["l0"]


def test_records_are_plain_json_lines(tmp_path: Path) -> None:
    with journal(tmp_path) as first:
        first.commit(commit(0))
    [line] = (tmp_path / "segment-000000.jsonl").read_text().splitlines()
    assert json.loads(line) == commit(0)
