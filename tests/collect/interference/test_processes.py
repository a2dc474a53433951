"""The real disturbing processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dynamiccl.collect.interference.disturb import argv_for
from dynamiccl.collect.telemetry.companion import HELLO
from tests.collect.interference.processes import (
    PATIENCE_S,
    await_true,
    children,
    cpu_seconds,
    is_running,
)

Child = subprocess.Popen[str]


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
    "from dynamiccl import cli; from dynamiccl.collect.interference import gemm; "
    "cli.run(lambda: gemm.main(['--level', '0.5']))"
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
        "import torch; from dynamiccl import cli; from dynamiccl.collect.interference import gemm\n"
        "def broken(*_, **__): raise RuntimeError('out of memory')\n"
        "torch.mm = broken\n"
        "cli.run(lambda: gemm.main(['--level', '0.5', '--device', 'cpu']))"
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
