"""Starting, waiting for and ending a disturbance, with small programs in its place."""

import subprocess
import sys
import time

import pytest

from dynamiccl.collect.interference import disturb as module
from dynamiccl.collect.interference.disturb import argv_for, disturb
from dynamiccl.collect.interference.traffic import Traffic, is_under_way, spare_gpus, traffic_argv
from dynamiccl.errors import InvalidSweep, MachineError, UnknownName, UserError

Popen = subprocess.Popen[bytes]
TRAFFIC = Traffic("/opt/all_reduce_perf", first_device=4)
ROW = "    67108864      16777216     float     sum      -1   274.2  244.7  428.3      0"


class Starter:
    """Starts a Python program in place of whatever it is told to, and remembers both."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.argv: list[str] = []
        self.child: Popen | None = None

    def __call__(self, argv: list[str]) -> Popen:
        self.argv = argv
        self.child = subprocess.Popen(
            [sys.executable, "-u", "-c", self.code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return self.child

    def is_running(self) -> bool:
        assert self.child is not None
        return self.child.poll() is None


SAYS_READY = "import time; print('ready'); time.sleep(60)"


def test_it_runs_while_the_body_does() -> None:
    start = Starter(SAYS_READY)
    with disturb("cpu", 0.5, start) as disturbance:
        assert start.is_running()
        assert disturbance.lost is None
    assert not start.is_running()
    assert start.argv == argv_for("cpu", 0.5)


def test_none_starts_nothing() -> None:
    def never(argv: list[str]) -> Popen:
        raise AssertionError(argv)

    with disturb("none", 0.0, never) as disturbance:
        assert disturbance.lost is None


def test_it_is_ended_when_the_body_fails() -> None:
    start = Starter(SAYS_READY)
    with pytest.raises(ZeroDivisionError), disturb("cpu", 0.5, start):
        _ = 1 / 0
    assert not start.is_running()


def test_the_starters_own_way_of_ending_is_taken() -> None:
    start, ended = Starter(SAYS_READY), []

    def end(child: Popen) -> None:
        ended.append(child)
        child.kill()
        child.wait()

    with disturb("cpu", 0.5, start, end=end):
        pass
    assert ended == [start.child]


def test_the_pipe_may_be_closed_by_whoever_ends_the_process() -> None:
    def end(child: Popen) -> None:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()

    for _ in range(20):
        start = Starter(f"print('ready')\nwhile True: print({ROW!r})")
        with disturb("cpu", 0.5, start, end=end):
            pass
        assert not start.is_running()


def test_every_node_must_be_ready_and_a_launcher_may_label_lines() -> None:
    started = time.monotonic()
    code = (
        "import time; print('0: ready'); time.sleep(0.3); print('[1,1]<stdout>:ready'); "
        "print('not ready yet'); time.sleep(60)"
    )
    start = Starter(code)
    with disturb("cpu", 0.5, start, nodes=2):
        assert time.monotonic() - started > 0.3


def test_one_that_fails_at_once_says_why() -> None:
    start = Starter("print('error: no CUDA'); raise SystemExit(4)")
    with (
        pytest.raises(MachineError, match=r"'gemm' ended with status 4; .*error: no CUDA"),
        disturb("gemm", 0.5, start),
    ):
        raise AssertionError


def test_one_that_is_never_ready_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READY_S", 0.2)
    start = Starter("import time; print('loading'); time.sleep(60)")
    with (
        pytest.raises(MachineError, match=r"not ready after 0.2 s \(0 of 1 .* loading"),
        disturb("cpu", 0.5, start),
    ):
        raise AssertionError
    assert not start.is_running()


def test_one_that_ignores_a_kind_word_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_END_S", 0.1)
    code = "import signal; signal.signal(15, signal.SIG_IGN); " + SAYS_READY
    start = Starter(code)
    with disturb("cpu", 0.5, start):
        pass
    assert start.child is not None
    assert start.child.returncode == -9


def test_one_that_ends_too_early_is_noticed() -> None:
    start = Starter("print('ready'); print('GPU is lost'); raise SystemExit(1)")
    with disturb("gemm", 0.5, start) as disturbance:
        assert start.child is not None
        start.child.wait()
        until = time.monotonic() + 10.0
        while "GPU is lost" not in (disturbance.lost or ""):
            assert time.monotonic() < until
        assert "ended with status 1" in (disturbance.lost or "")


def test_endless_output_does_not_block_it() -> None:
    code = f"import sys\nwhile True: print({ROW!r})"
    start = Starter(code)
    with disturb("traffic", 0.5, start, traffic=TRAFFIC) as disturbance:
        assert disturbance.lost is None


def test_traffic_is_ready_with_its_first_row() -> None:
    started = time.monotonic()
    code = (
        "import time; print('# nThread 1 nGpus 1'); print('#  ready'); time.sleep(0.3); "
        f"print({ROW!r}); time.sleep(60)"
    )
    start = Starter(code)
    with disturb("traffic", 0.25, start, nodes=4, traffic=TRAFFIC):
        assert time.monotonic() - started > 0.3
    assert start.argv == traffic_argv(TRAFFIC, 0.25)


def test_a_process_without_a_pipe_is_our_own_mistake() -> None:
    def start(_argv: list[str]) -> Popen:
        return subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.DEVNULL)

    with pytest.raises(ValueError, match="pipe as stdout"), disturb("cpu", 0.5, start):
        raise AssertionError


def test_argument_vectors() -> None:
    module_ = "dynamiccl.collect.interference"
    assert argv_for("cpu", 0.5) == [sys.executable, "-m", f"{module_}.cpu", "--level", "0.5"]
    assert argv_for("gemm", 1) == [sys.executable, "-m", f"{module_}.gemm", "--level", "1"]
    assert argv_for("traffic", 0.25, TRAFFIC) == [
        *("env", "-u", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS=8", "NCCL_TESTS_DEVICE=4"),
        *("/opt/all_reduce_perf", "-b", "64M", "-e", "64M", "-g", "1"),
        *("-n", "100", "-w", "5", "-c", "0", "-N", "0"),
    ]


@pytest.mark.parametrize(("level", "channels"), [(0.001, 1), (0.5, 16), (1.0, 32)])
def test_the_level_of_traffic_is_a_share_of_channels(level: float, channels: int) -> None:
    assert f"NCCL_MAX_CTAS={channels}" in traffic_argv(TRAFFIC, level)


def test_other_kinds_and_levels_are_refused() -> None:
    with pytest.raises(UnknownName, match=r"unknown interference 'congestion'.*cpu, gemm, traffic"):
        argv_for("congestion", 1.0)
    with pytest.raises(UserError, match=r"level of 'cpu' is 1\.5"):
        argv_for("cpu", 1.5)
    with pytest.raises(ValueError, match="binary and devices"):
        argv_for("traffic", 0.5)


def test_traffic_needs_spare_gpus() -> None:
    assert spare_gpus(8, 6) == 2
    with pytest.raises(InvalidSweep, match="8 ranks per node use all 8"):
        spare_gpus(8, 8)


@pytest.mark.parametrize(
    ("line", "row"),
    [
        (ROW, True),
        (f"0: {ROW}", True),
        (f"[1,0]<stdout>:{ROW}", True),
        ("#       size         count      type   redop    root     time   algbw   busbw", False),
        ("#  Rank  0 Group  0 Pid  71 on  n1 device  4 [0000:4e:00] NVIDIA H100", False),
        ("n1: Test NCCL failure common.cu:1005 'internal error'", False),
        ("", False),
    ],
)
def test_rows_are_told_from_other_lines(line: str, row: bool) -> None:
    assert is_under_way(line) is row
