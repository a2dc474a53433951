import subprocess
import sys
from pathlib import Path

import pytest

from dynamiccl.collect.launchers import ContainerSettings, LauncherSettings
from dynamiccl.collect.nodes import Nodes
from dynamiccl.errors import InvalidSweep, MachineError
from tests.collect.live_processes import await_true, children, is_running

LOCAL = Nodes(LauncherSettings())


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_node_is_asked_and_answers_line_by_line() -> None:
    assert LOCAL.ask(python("print('one'); print('two')"), 1) == ["one", "two"]
    assert LOCAL.ask(python(""), 1) == []


def test_answer_that_failed_is_told_with_its_last_words() -> None:
    code = "import sys; [print(i, flush=True) for i in range(9)]; sys.exit('no such device')"
    with pytest.raises(MachineError, match=r"ended with status 1: 7 \| 8 \| no such device"):
        LOCAL.ask(python(code), 1)
    with pytest.raises(MachineError, match="status 1: no output"):
        LOCAL.ask(["false"], 1)


def test_program_that_is_not_there_is_told() -> None:
    with pytest.raises(MachineError, match="cannot start 'no-such-program'"):
        LOCAL.ask(["no-such-program"], 1)
    with pytest.raises(MachineError, match="cannot start 'no-such-program'"):
        LOCAL.start(["no-such-program"], 1)


def test_local_launcher_reaches_one_node() -> None:
    assert LOCAL.one_process
    with pytest.raises(InvalidSweep, match="take launcher mpirun, srun or sbatch"):
        LOCAL.ask(["true"], 2)


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); \
time.sleep(600)"], start_new_session=False)
child.wait()
"""


def test_started_program_is_ended_with_all_its_children() -> None:
    process = LOCAL.start(python(PARENT), 1)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"up\n"
        [child] = children(process.pid)
        LOCAL.end(process)
        assert process.returncode is not None
        await_true(lambda: not is_running(child))
        assert process.stdout.read() == b""
    assert process.stdin is not None
    assert process.stdin.closed


def test_program_hears_us_and_sees_us_go() -> None:
    process = LOCAL.start(["cat"], 1)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"hello\n"
        process.stdin.close()
        assert process.wait(timeout=20) == 0
    LOCAL.end(process)


def test_program_that_ended_before_it_heard_us_is_ended_all_the_same() -> None:
    process = LOCAL.start(["true"], 1)
    assert process.stdin is not None
    process.stdin.write(b"hello\n")
    process.wait(timeout=20)
    LOCAL.end(process)
    assert process.stdin.closed
    assert process.stdout is not None
    process.stdout.close()


def test_ending_what_has_ended_is_harmless() -> None:
    process = LOCAL.start(["true"], 1)
    process.wait(timeout=20)
    LOCAL.end(process)
    LOCAL.end(process)
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """A launcher whose srun says how it was called."""
    fake = tmp_path / "srun"
    fake.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Nodes(
        LauncherSettings(
            kind="srun",
            extra_args=("--mpi=pmix",),
            prefix=("numactl", "-l"),
            container=ContainerSettings(runtime="pyxis", image="nccl.sqsh"),
        )
    )


def test_our_own_programs_run_beside_the_step_and_outside_of_its_container(srun: Nodes) -> None:
    words = srun.ask(["asks", "--what", "x y"], 3)
    assert not srun.one_process
    assert words[-3:] == ["asks", "--what", "x y"]
    assert "--overlap" in words
    assert "--mpi=pmix" in words
    assert not [word for word in words if "container" in word or word == "numactl"]
    assert "-N 3 -n 3" in " ".join(words)


def test_ranks_of_their_own_are_started_where_asked_for(srun: Nodes) -> None:
    process: subprocess.Popen[bytes] = srun.start(["traffic"], 2, ranks_per_node=4)
    assert process.stdout is not None
    with process.stdout:
        words = process.stdout.read().decode().split()
    process.wait(timeout=20)
    srun.end(process)
    assert "-N 2 -n 8" in " ".join(words)
    assert "--overlap" in words
