"""Starting, waiting for and ending a disturbance on local nodes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynamiccl.collect import disturb as module
from dynamiccl.collect.disturb import Disturber, traffic_argv
from dynamiccl.collect.grid import Interference, Setting
from dynamiccl.collect.launchers import LauncherSettings
from dynamiccl.collect.nodes import Nodes
from dynamiccl.errors import InvalidSweep, MachineError, UnknownName, UserError
from dynamiccl.nccl import Collective
from tests.collect.live_processes import await_true, is_running
from tests.fakes.nccl_tests.install import install_stand_in

LOCAL = Nodes(LauncherSettings())
NOTHING = "/no/such/program"
ROW = "    67108864      16777216     float     sum      -1   274.2  244.7  428.3      0"
SAYS_READY = "import time; print('ready'); time.sleep(60)"


def setting(kind: str = "none", level: float = 0.0, ranks: int = 2, nodes: int = 1) -> Setting:
    return Setting(Collective.AllReduce, nodes, ranks, interference=Interference(kind, level))


class Started(Nodes):
    """Local nodes that tell what was started; with `code`, that Python program instead."""

    def __init__(self, code: str = "") -> None:
        super().__init__(LauncherSettings())
        self.code = code
        self.processes: list[subprocess.Popen[bytes]] = []
        self.argv: list[str] = []

    def start(self, argv, num_nodes, **more):  # type: ignore[no-untyped-def]
        self.argv = list(argv)
        if self.code:
            argv, num_nodes, more = [sys.executable, "-u", "-c", self.code], 1, {}
        process = super().start(argv, num_nodes, **more)
        self.processes.append(process)
        return process

    def is_running(self) -> bool:
        return is_running(self.processes[0].pid)


def test_setting_that_runs_alone_starts_nothing() -> None:
    nodes = Started()
    with Disturber(nodes, None).disturb(setting(), NOTHING) as disturbance:
        assert disturbance.lost is None
    assert nodes.processes == []


def test_cpu_stress_runs_while_the_launch_does_and_not_after() -> None:
    nodes = Started()
    with Disturber(nodes, None).disturb(setting("cpu", 0.1), NOTHING) as disturbance:
        assert nodes.is_running()
        assert disturbance.lost is None
    assert not nodes.is_running()


def test_stress_is_ended_when_the_launch_fails() -> None:
    nodes = Started()
    with (
        pytest.raises(ZeroDivisionError),
        Disturber(nodes, None).disturb(setting("cpu", 0.1), NOTHING),
    ):
        raise ZeroDivisionError
    assert not nodes.is_running()


def test_disturbance_that_ends_before_its_time_is_told() -> None:
    nodes = Started()
    with Disturber(nodes, None).disturb(setting("cpu", 0.1), NOTHING) as disturbance:
        os.kill(nodes.processes[0].pid, 9)
        await_true(lambda: disturbance.lost is not None)
        assert str(disturbance.lost).startswith("interference 'cpu' ended with status -9")


def test_traffic_runs_on_the_gpus_that_are_left_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SECONDS_PER_ROW", "0.01")
    binary = install_stand_in(tmp_path) / "all_reduce_perf"
    nodes = Started()
    disturber = Disturber(nodes, 8)
    with disturber.disturb(setting("traffic", 0.5), str(binary)) as disturbance:
        assert disturbance.lost is None
        assert nodes.is_running()
    assert not nodes.is_running()
    # One process drives the six GPUs behind the trial's two.
    assert "NCCL_TESTS_DEVICE=2" in nodes.argv
    assert nodes.argv[nodes.argv.index("-g") + 1] == "6"
    assert "NCCL_MAX_CTAS=16" in nodes.argv


def test_traffic_needs_to_know_how_many_gpus_there_are_and_one_to_spare() -> None:
    traffic = setting("traffic", 0.5)
    with (
        pytest.raises(MachineError, match="nobody knows how many the nodes have"),
        Disturber(LOCAL, None).disturb(traffic, NOTHING),
    ):
        pass
    with (
        pytest.raises(InvalidSweep, match="use all 2; take groups with fewer ranks_per_node"),
        Disturber(LOCAL, 2).disturb(traffic, NOTHING),
    ):
        pass


def test_traffic_that_does_not_get_under_way_is_an_error_with_its_words(tmp_path: Path) -> None:
    broken = tmp_path / "all_reduce_perf"
    broken.write_text("#!/bin/sh\necho no libnccl here\nexit 3\n")
    broken.chmod(0o755)
    with (
        pytest.raises(MachineError, match=r"ended with status 3.*no libnccl here"),
        Disturber(LOCAL, 8).disturb(setting("traffic", 0.5), str(broken)),
    ):
        pass


@pytest.mark.parametrize(
    "lines",
    [
        "print('0: ready'); time.sleep(0.3); print('[1,1]<stdout>:ready'); print('not ready yet')",
        "print('0: ready'); print('not ready yet'); time.sleep(0.3); print('1: ready')",
    ],
)
def test_every_node_must_be_ready_and_a_launcher_may_label_lines(lines: str) -> None:
    started = time.monotonic()
    nodes = Started(f"import time; {lines}; time.sleep(60)")
    with Disturber(nodes, None).disturb(setting("cpu", 0.5, nodes=2), NOTHING):
        assert time.monotonic() - started > 0.3
    assert not nodes.is_running()


def test_one_that_fails_at_once_says_why() -> None:
    nodes = Started("print('error: no CUDA'); raise SystemExit(4)")
    with (
        pytest.raises(MachineError, match=r"'gemm' ended with status 4; .*error: no CUDA"),
        Disturber(nodes, None).disturb(setting("gemm", 0.5), NOTHING),
    ):
        raise AssertionError


def test_one_that_is_never_ready_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READY_S", 0.5)
    nodes = Started("import time; print('loading'); time.sleep(60)")
    with (
        pytest.raises(MachineError, match=r"not ready after 0.5 s \(0 of 1 .* loading"),
        Disturber(nodes, None).disturb(setting("cpu", 0.5), NOTHING),
    ):
        raise AssertionError
    assert not nodes.is_running()


def test_endless_output_does_not_block_it() -> None:
    nodes = Started(f"while True: print({ROW!r})")
    with Disturber(nodes, 8).disturb(setting("traffic", 0.5), NOTHING) as disturbance:
        assert disturbance.lost is None
    assert not nodes.is_running()


def test_traffic_is_ready_with_its_first_row() -> None:
    started = time.monotonic()
    said = (
        *("# nThread 1 nGpus 1", "#  ready", "ready", "#  size  count  type  redop  root  time"),
        "#  Rank  0 Group  0 Pid  71 on  n1 device  4 [0000:4e:00] NVIDIA H100",
        "n1: Test NCCL failure common.cu:1005 'internal error'",
    )
    nodes = Started(
        f"import time; print(*{said!r}, sep='\\n'); time.sleep(0.3); print('0: ' + {ROW!r}); "
        "time.sleep(60)"
    )
    with Disturber(nodes, 8).disturb(setting("traffic", 0.25, nodes=4), NOTHING):
        assert time.monotonic() - started > 0.3
    assert nodes.argv == [
        *("env", "-u", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS=8", "NCCL_TESTS_DEVICE=2"),
        *(NOTHING, "-b", "64M", "-e", "64M", "-g", "6"),
        *("-n", "100", "-w", "5", "-c", "0", "-N", "0"),
    ]


@pytest.mark.parametrize(("level", "channels"), [(0.001, 1), (0.5, 16), (1.0, 32)])
def test_the_level_of_traffic_is_a_share_of_channels(level: float, channels: int) -> None:
    argv = traffic_argv(NOTHING, level, first_device=4, gpus_per_process=1)
    assert f"NCCL_MAX_CTAS={channels}" in argv


def test_other_kinds_and_levels_are_refused() -> None:
    with (
        pytest.raises(UnknownName, match=r"interference 'congestion'.*cpu, gemm, traffic"),
        Disturber(LOCAL, None).disturb(setting("congestion", 1.0), NOTHING),
    ):
        pass
    with (
        pytest.raises(UserError, match=r"level of 'cpu' is 1\.5"),
        Disturber(LOCAL, None).disturb(setting("cpu", 1.5), NOTHING),
    ):
        pass
