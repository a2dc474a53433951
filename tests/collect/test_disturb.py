"""Interference: starting, waiting for and ending it on local nodes, and the programs themselves."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dynamiccl.collect import nodes as module
from dynamiccl.collect.grid import Interference, Setting
from dynamiccl.collect.launchers import LauncherSettings
from dynamiccl.collect.nodes import Nodes, disturb
from dynamiccl.collect.on_node import HELLO, ON_NODE
from dynamiccl.errors import InvalidSweep, MachineError
from dynamiccl.nccl import Collective
from tests.collect.live_processes import PATIENCE_S, await_true, children, cpu_seconds, is_running
from tests.fakes.nccl_tests.install import install_stand_in

LOCAL = Nodes(LauncherSettings())
NOTHING = "/no/such/program"
ROW = "    67108864      16777216     float     sum      -1   274.2  244.7  428.3      0"


def setting(kind: str = "none", level: float = 0.0, ranks: int = 2, nodes: int = 1) -> Setting:
    shape = nodes, ranks, nodes, ranks
    return Setting(Collective.AllReduce, *shape, interference=Interference(kind, level))


class Started(Nodes):
    """Local nodes that tell what was started; with `code`, that Python program instead."""

    def __init__(self, code: str = "") -> None:
        super().__init__(LauncherSettings())
        self.code = code
        self.pids: list[int] = []
        self.argv: list[str] = []

    @contextmanager
    def start(self, argv, num_nodes, hear, **more):  # type: ignore[no-untyped-def]
        self.argv = list(argv)
        if self.code:
            argv, num_nodes, more = [sys.executable, "-u", "-c", self.code], 1, {}
        with super().start(argv, num_nodes, hear, **more) as program:
            self.pids.append(program.process.pid)
            yield program

    def is_running(self) -> bool:
        return is_running(self.pids[0])


def test_stress_is_ended_when_the_launch_fails_and_told_when_it_ends_itself() -> None:
    nodes = Started()
    stress = disturb(nodes, None, setting("cpu", 0.1), NOTHING)
    with suppress(ZeroDivisionError), stress as lost:
        assert nodes.is_running()
        assert lost() is None
        raise ZeroDivisionError
    assert not nodes.is_running()
    with disturb(nodes, None, setting("cpu", 0.1), NOTHING) as lost:
        os.kill(nodes.pids[-1], 9)
        await_true(lambda: lost() is not None)
        assert str(lost()).startswith("interference 'cpu' ended with status -9")


def test_traffic_runs_on_the_gpus_that_are_left_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SECONDS_PER_ROW", "0.01")
    binary = install_stand_in(tmp_path) / "all_reduce_perf"
    nodes = Started()
    with disturb(nodes, 8, setting("traffic", 0.5), str(binary)) as lost:
        assert lost() is None
        assert nodes.is_running()
    assert not nodes.is_running()
    # One process drives the six GPUs behind the trial's two.
    assert nodes.argv == [
        *("env", "-u", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS=16", "NCCL_TESTS_DEVICE=2"),
        *(str(binary), "-b", "64M", "-e", "64M", "-g", "6"),
        *("-n", "100", "-w", "5", "-c", "0", "-N", "0"),
    ]


@pytest.mark.parametrize(
    ("num_gpus", "said"),
    [(None, "of nobody knows how many"), (2, "of 2; take groups with fewer ranks_per_node")],
)
def test_traffic_needs_to_know_how_many_gpus_there_are_and_one_to_spare(
    num_gpus: int | None, said: str
) -> None:
    traffic = disturb(LOCAL, num_gpus, setting("traffic", 0.5), NOTHING)
    with pytest.raises(InvalidSweep, match=said), traffic:
        pass


def test_traffic_is_ready_with_its_first_row() -> None:
    started = time.monotonic()
    said = (
        *("# nThread 1 nGpus 1", "#  ready", "#  size  count  type  redop  root  time"),
        "#  Rank  0 Group  0 Pid  71 on  n1 device  4 [0000:4e:00] NVIDIA H100",
        "n1: Test NCCL failure common.cu:1005 'internal error'",
    )
    row = f"print({ROW!r})"
    nodes = Started(
        f"import time; print(*{said!r}, sep='\\n'); time.sleep(0.3); {row}\nwhile True: {row}"
    )
    # Its output is endless, and blocks nobody.
    with disturb(nodes, 8, setting("traffic", 0.25, nodes=4), NOTHING):
        assert time.monotonic() - started > 0.3
    assert not nodes.is_running()
    assert "NCCL_MAX_CTAS=8" in nodes.argv
    with disturb(nodes, 8, setting("traffic", 0.01), NOTHING):
        assert "NCCL_MAX_CTAS=1" in nodes.argv


@pytest.mark.parametrize(
    ("code", "ready_s", "said"),
    [
        ("print('error: no cores'); raise SystemExit(4)", 60, "ended with status 4; .*no cores"),
        (
            "import time; print('loading'); time.sleep(60)",
            1,
            r"not ready after 1 s \(0 of 1 .* loading",
        ),
    ],
)
def test_one_that_does_not_get_ready_is_ended_and_says_why(
    code: str, ready_s: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READY_S", ready_s)
    nodes = Started(code)
    started = disturb(nodes, None, setting("cpu", 0.5), NOTHING)
    with pytest.raises(MachineError, match=f"'cpu' .*{said}"), started:
        raise AssertionError
    assert not nodes.is_running()


def argv_for(level: float) -> list[str]:
    return [*ON_NODE, "busy", f"{level:g}"]


@contextmanager
def disturbing(argv: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A disturbance on one core (others share this machine), busy, surely gone afterwards."""
    core = min(os.sched_getaffinity(0))
    with subprocess.Popen(
        ["taskset", "-c", str(core), *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def test_cpu_stress_takes_its_share_of_a_core() -> None:
    with disturbing(argv_for(0.5)) as child:
        (worker,) = children(child.pid)
        used, began = cpu_seconds(worker), time.monotonic()
        time.sleep(0.5)
        assert 0.0 < cpu_seconds(worker) - used < 0.6 * (time.monotonic() - began)


def test_it_ends_with_its_starter_or_by_a_signal_and_leaves_nobody() -> None:
    argv = argv_for(0.1)
    with disturbing(argv) as left, disturbing(argv) as ended, disturbing(argv) as killed:
        workers = [pid for child in (left, ended, killed) for pid in children(child.pid)]
        assert len(workers) == 3
        assert left.stdin is not None
        left.stdin.write(HELLO.decode())
        left.stdin.close()
        ended.send_signal(signal.SIGTERM)
        killed.send_signal(signal.SIGKILL)
        codes = [child.wait(PATIENCE_S) for child in (left, ended, killed)]
        assert codes == [0, 0, -signal.SIGKILL]
        await_true(lambda: not any(map(is_running, workers)))
