"""Real processes: hanging, dying, talking nonsense, leaving children behind."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from dynamiccl.collect.launchers import MAX_LINE_BYTES, Interrupt, run_process
from tests.collect.live_processes import Limits, is_running, run_to_end

LIMITS = Limits(startup_s=20, stall_s=20, grace_s=5)


def shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


PYTHON = f"exec {sys.executable} -c"
#: What a shell script makes of itself: its exit code, and the lines that we see.
SCRIPTS = {
    "a signal is a negative exit code": ("kill -SEGV $$", -signal.SIGSEGV, []),
    "variables are kept": ("echo $KEPT", 0, ["k"]),
    "no output is no line": ("exit 0", 0, []),
    "a last line without newline": ("printf 'a\\n\\nb'", 0, ["a", "", "b"]),
    "bytes that are no text": (
        r"printf '\377\376\000x\r\n\303\274\n'", 0, ["\ufffd\ufffd\x00x", "ü"],
    ),
    "it closes its output and goes on": ("echo x; exec >&- 2>&-; sleep 0.3; exit 5", 5, ["x"]),
    "a grandchild that still writes": ("(sleep 0.1; echo late) & echo early", 0, ["early", "late"]),
    "a session of its own": (
        f"{PYTHON} 'import os; print(os.getsid(0) == os.getpid())'", 0, ["True"],
    ),
    "much output": (
        f"{PYTHON} 'for i in range(100_000): print(i)'", 0, [str(i) for i in range(100_000)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SCRIPTS)
def test_exit_code_and_lines(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, code, lines = SCRIPTS[case]
    monkeypatch.setenv("KEPT", "k")
    done = run_to_end(shell(script), LIMITS)
    assert (done.returncode, done.lines) == (code, lines)


def test_lines_that_are_no_progress_do_not_put_off_a_stall() -> None:
    limits = Limits(startup_s=0.5, stall_s=60)
    done = run_to_end(shell("echo hello; sleep 60"), limits, lambda *_: False)
    assert (done.returncode, done.lines) == (None, ["hello"])
    # It ends by itself some time, so that noise that counts fails the test instead of hanging it.
    script = "echo row; for i in $(seq 2000); do echo noise; sleep 0.02; done"
    limits = Limits(startup_s=60, stall_s=0.5)
    done = run_to_end(shell(script), limits, lambda text, _: text == "row")
    assert done.returncode is None
    assert done.lines.count("noise") > 3


def test_a_step_that_takes_long_may() -> None:
    script = "echo 1; echo 2; sleep 0.5; echo 3; sleep 60"
    rows: list[str] = []

    def take(text: str, _: float) -> bool:
        rows.append(text)
        return True

    def patience_s() -> float:
        return 20 if len(rows) in {0, 2} else 0.3

    assert run_process(shell(script), patience_s, 5, take, Interrupt()) is None
    assert rows == ["1", "2", "3"]


def test_children_in_other_groups_are_killed_too() -> None:
    # Open MPI puts each local rank into a process group of its own.
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        "    os.setpgid(0, 0)\n"
        "    print(os.getpid(), flush=True)\n"
        "time.sleep(300)\n"
    )
    done = run_to_end(python(code), Limits(startup_s=20, stall_s=0.2, grace_s=0.2))
    assert not is_running(int(done.lines[0]))


def test_a_grandchild_at_the_pipe_does_not_hold_us(tmp_path: Path) -> None:
    done = run_to_end(shell("sleep 300 & echo $!; exit 0"), LIMITS)
    # Held, it would have been stopped as stalled.
    assert done.returncode == 0
    assert not is_running(int(done.lines[0]))
    script = f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec yes' & sleep 0.2; exit 4"
    done = run_to_end(shell(script), LIMITS)
    try:
        assert done.returncode == 4
    finally:
        # It left our session, so it is the test's to end (a closed pipe may have done it).
        pid = int((tmp_path / "pid").read_text(encoding="utf-8"))
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_very_long_line_comes_in_pieces() -> None:
    done = run_to_end(python(f"print('a' * {3 * MAX_LINE_BYTES}); print('next')"), LIMITS)
    assert len(done.lines) > 2
    assert max(map(len, done.lines)) < 2 * MAX_LINE_BYTES
    assert "".join(done.lines) == "a" * 3 * MAX_LINE_BYTES + "next"


def test_the_first_signal_lets_the_trial_finish() -> None:
    with Interrupt() as interrupt:
        done = run_to_end(
            shell(f"kill -USR1 {os.getpid()}; sleep 0.2; echo done"), LIMITS, interrupt=interrupt
        )
        assert (interrupt.requested, interrupt.cause) == (True, "SIGUSR1")
    assert (done.returncode, done.lines) == (0, ["done"])


# KeyboardInterrupt may come between an open() and its `with`: such a file is closed by nobody.
interrupted = pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@interrupted
@pytest.mark.parametrize(("times", "trap", "grace_s"), [(2, "", 5), (3, "trap '' TERM; ", 600)])
def test_ctrl_c_again_ends_at_once(times: int, trap: str, grace_s: float, tmp_path: Path) -> None:
    again = f"for i in $(seq {times}); do kill -INT {os.getpid()}; sleep 0.3; done"
    script = f"{trap}echo $$ > {tmp_path}/pid; {again}; sleep 300"
    started = time.monotonic()
    # Not ended at once, it would be stopped as stalled, and nothing would be raised.
    with Interrupt() as interrupt, pytest.raises(KeyboardInterrupt):
        run_to_end(shell(script), Limits(600, 600, grace_s=grace_s), interrupt=interrupt)
    assert time.monotonic() - started < 300
    assert not is_running(int((tmp_path / "pid").read_text(encoding="utf-8")))


def test_only_a_person_insists() -> None:
    with Interrupt() as interrupt:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        assert (interrupt.requested, interrupt.forced) == (True, False)
        interrupt.check()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.forced
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
