"""The real machine, asked for things that every machine has."""

import sys
from pathlib import Path

import pytest

from dynamiccl import machine as module
from dynamiccl.collect.doctor.context import Context
from dynamiccl.collect.doctor.examine import run_checks
from dynamiccl.machine import ProgramResult, ThisMachine

HERE = ThisMachine()


def test_a_programs_status_and_output_come_back() -> None:
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(3)"
    assert HERE.run(sys.executable, "-c", code) == ProgramResult(3, "out\nerr\n")


def test_a_program_gets_no_input_and_speaks_english() -> None:
    code = "import os, sys; print(sys.stdin.read() == '', os.environ['LC_ALL'])"
    assert HERE.run(sys.executable, "-c", code).first_line == "True C"


def test_a_program_that_is_not_there_is_an_answer() -> None:
    assert HERE.run("no-such-program") == ProgramResult(
        None, "no-such-program: No such file or directory"
    )


def test_a_program_that_hangs_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.1)
    ran = HERE.run(sys.executable, "-c", "import time; time.sleep(60)")
    assert ran == ProgramResult(None, "no end after 0.1 s")
    assert not ran.worked


def test_files_are_read_and_found(tmp_path: Path) -> None:
    (tmp_path / "b.conf").write_text("x")
    (tmp_path / "a.conf").write_bytes(b"\xff")
    assert HERE.paths(f"{tmp_path}/*.conf") == [f"{tmp_path}/a.conf", f"{tmp_path}/b.conf"]
    assert HERE.read(f"{tmp_path}/b.conf") == "x"
    assert HERE.read(f"{tmp_path}/a.conf") == "\ufffd"
    assert HERE.read(f"{tmp_path}/none") is None
    assert HERE.read(str(tmp_path)) is None


def test_programs_are_found_on_path_or_in_a_folder(tmp_path: Path) -> None:
    program = tmp_path / "all_reduce_perf"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert HERE.which("sh") is not None
    assert HERE.which("all_reduce_perf", str(tmp_path)) == str(program)
    assert HERE.which("sh", str(tmp_path)) is None


def test_room_is_that_of_the_folder_that_will_be_made(tmp_path: Path) -> None:
    free = HERE.free_bytes(str(tmp_path / "a" / "b"))
    assert free is not None
    assert free > 0


def test_this_machine_can_be_examined(tmp_path: Path) -> None:
    found = {check.name: check for check in run_checks(HERE, Context(out=str(tmp_path)))}
    assert {"nccl-tests", "libnccl", "other tuner", "disk", "/dev/shm"} <= found.keys()
    assert all(check.found for check in found.values())
