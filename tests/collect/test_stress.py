"""Stress of cores and GPUs: real processes, and the shares that they take."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamiccl.collect import stress
from dynamiccl.collect.ending import HELLO
from tests.collect.live_processes import (
    PATIENCE_S,
    await_true,
    children,
    cpu_seconds,
    is_running,
)

Child = subprocess.Popen[str]


def argv_for(kind: str, level: float) -> list[str]:
    return [sys.executable, "-m", "dynamiccl.collect.stress", kind, "--level", f"{level:g}"]


@contextmanager
def disturbing(argv: list[str]) -> Iterator[Child]:
    """A disturbance on one core (others share this machine), surely gone afterwards."""
    core = min(os.sched_getaffinity(0))
    with subprocess.Popen(
        ["taskset", "-c", str(core), *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def await_ready(child: Child) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"


GEMM_ON_CPU = [*argv_for("gemm", 0.5), "--device", "cpu", "--edge", "64"]


def states(pid: int, samples: int = 100) -> set[str]:
    """The states that a process is seen in: R where it runs or wants to, S where it sleeps."""
    seen = set()
    for _ in range(samples):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        seen.add(stat.rpartition(")")[2].split()[0])
        time.sleep(0.005)
    return seen


def test_cpu_stress_takes_no_more_than_its_share_of_a_core() -> None:
    with disturbing(argv_for("cpu", 0.5)) as child:
        await_ready(child)
        (worker,) = children(child.pid)
        used, began = cpu_seconds(worker), time.monotonic()
        assert states(worker) == {"R", "S"}
        share = (cpu_seconds(worker) - used) / (time.monotonic() - began)
    assert share < 0.6


def test_full_cpu_stress_never_sleeps() -> None:
    with disturbing(argv_for("cpu", 1.0)) as child:
        await_ready(child)
        (worker,) = children(child.pid)
        assert states(worker) == {"R"}


@pytest.mark.parametrize("argv", [argv_for("cpu", 1.0), GEMM_ON_CPU], ids=["cpu", "gemm"])
def test_it_ends_when_told_and_leaves_nobody(argv: list[str]) -> None:
    with disturbing(argv) as child:
        await_ready(child)
        workers = children(child.pid)
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE_S) == 0
        assert not any(is_running(pid) for pid in workers)


def test_it_ends_with_the_input_of_a_starter_that_greeted_it() -> None:
    with disturbing(argv_for("cpu", 1.0)) as child:
        await_ready(child)
        assert child.stdin is not None
        child.stdin.write(HELLO.decode())
        child.stdin.close()
        assert child.wait(PATIENCE_S) == 0


def test_a_killed_one_leaves_nobody() -> None:
    with disturbing(argv_for("cpu", 1.0)) as child:
        await_ready(child)
        workers = children(child.pid)
        assert workers
        child.kill()
        child.wait(PATIENCE_S)
        await_true(lambda: not any(is_running(pid) for pid in workers))


def test_gemm_works_without_a_gpu_only_when_told_to() -> None:
    with disturbing(GEMM_ON_CPU) as child:
        await_ready(child)
        used = cpu_seconds(child.pid)
        await_true(lambda: cpu_seconds(child.pid) > used + 0.05)


def outcome(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )


RUN_GEMM = (
    "from dynamiccl import cli; from dynamiccl.collect import stress; "
    "cli.run(lambda: stress.main(['gemm', '--level', '0.5']))"
)


def test_gemm_without_torch_says_what_to_install() -> None:
    done = outcome(f"import sys; sys.modules['torch'] = None; {RUN_GEMM}")
    assert done.returncode == 4
    assert done.stdout == ""
    assert "pip install 'dynamiccl[train]'" in done.stderr


def test_gemm_without_cuda_says_so() -> None:
    done = outcome(f"import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''; {RUN_GEMM}")
    assert done.returncode == 4
    assert "finds no CUDA device on" in done.stderr


def test_a_gpu_that_fails_later_ends_the_disturbance() -> None:
    code = (
        "import torch; from dynamiccl import cli; from dynamiccl.collect import stress\n"
        "def broken(*_, **__): raise RuntimeError('out of memory')\n"
        "torch.mm = broken\n"
        "cli.run(lambda: stress.main(['gemm', '--level', '0.5', '--device', 'cpu']))"
    )
    done = outcome(code)
    assert done.returncode == 4
    assert "interference 'gemm' on cpu: out of memory" in done.stderr


@pytest.mark.parametrize("kind", ["cpu", "gemm"])
@pytest.mark.parametrize("level", ["0", "1.5", "-1"])
def test_levels_out_of_range_are_refused(kind: str, level: str) -> None:
    argv = [*argv_for(kind, 0.5)[:-1], level]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--level" in done.stderr


def test_what_a_rest_overslept_is_taken_off_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    # Clock: work takes 1 s, the first rest takes 5 s where 1 s was asked, and so on.
    times = iter([0.0, 1.0, 6.0, 6.0, 7.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    asked: list[float] = []

    def rest(seconds: float) -> bool:
        asked.append(seconds)
        return len(asked) == 2

    stress.repeat(lambda: None, 0.5, rest)
    assert asked == [1.0, 0.0]


@pytest.mark.parametrize("level", [0.25, 0.5, 1.0])
def test_rest_makes_the_level_the_share_of_busy_time(
    level: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 3.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    rests: list[float] = []

    def rest(seconds: float) -> bool:
        rests.append(seconds)
        return True

    stress.repeat(lambda: None, level, rest)
    assert 3.0 / (3.0 + rests[0]) == pytest.approx(level)


def test_work_is_repeated_until_it_is_over() -> None:
    done, rests = [], itertools.count(1)
    stress.repeat(lambda: done.append(1), 1.0, lambda _: next(rests) == 3)
    assert len(done) == 3


@given(level=st.floats(0.001, 1.0), cores=st.integers(1, 512))
def test_shares_of_cores_add_up_to_the_level(level: float, cores: int) -> None:
    parts = stress.shares(level, cores)
    assert sum(parts) == pytest.approx(level * cores, abs=1e-6)
    assert all(0 < part <= 1 for part in parts)
    assert len(parts) <= cores
