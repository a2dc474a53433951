import os
from pathlib import Path

import pytest

from dynamiccl.collect.companions.disturber import Disturber
from dynamiccl.collect.companions.nodes import Nodes
from dynamiccl.collect.launchers import LauncherSettings
from dynamiccl.collect.sweep.trial import Interference, Setting
from dynamiccl.errors import InvalidSweep, MachineError
from dynamiccl.nccl import Collective
from tests.collect.interference.processes import await_true, is_running
from tests.fakes.nccl_tests.install import install_stand_in

LOCAL = Nodes(LauncherSettings())
NOTHING = "/no/such/program"


def setting(kind: str = "none", level: float = 0.0, ranks: int = 2) -> Setting:
    return Setting(Collective.AllReduce, 1, ranks, interference=Interference(kind, level))


class Started(Nodes):
    """Local nodes that tell what was started."""

    def __init__(self) -> None:
        super().__init__(LauncherSettings())
        self.pids: list[int] = []
        self.argv: list[str] = []

    def start(self, argv, num_nodes, **more):  # type: ignore[no-untyped-def]
        process = super().start(argv, num_nodes, **more)
        self.pids.append(process.pid)
        self.argv = list(argv)
        return process


def test_setting_that_runs_alone_starts_nothing() -> None:
    nodes = Started()
    with Disturber(nodes, None).disturb(setting(), NOTHING) as disturbance:
        assert disturbance.lost is None
    assert nodes.pids == []


def test_cpu_stress_runs_while_the_launch_does_and_not_after() -> None:
    nodes = Started()
    with Disturber(nodes, None).disturb(setting("cpu", 0.1), NOTHING) as disturbance:
        assert is_running(nodes.pids[0])
        assert disturbance.lost is None
    assert not is_running(nodes.pids[0])


def test_stress_is_ended_when_the_launch_fails() -> None:
    nodes = Started()
    with (
        pytest.raises(ZeroDivisionError),
        Disturber(nodes, None).disturb(setting("cpu", 0.1), NOTHING),
    ):
        raise ZeroDivisionError
    assert not is_running(nodes.pids[0])


def test_disturbance_that_ends_before_its_time_is_told() -> None:
    nodes = Started()
    with Disturber(nodes, None).disturb(setting("cpu", 0.1), NOTHING) as disturbance:
        os.kill(nodes.pids[0], 9)
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
        assert is_running(nodes.pids[0])
    assert not is_running(nodes.pids[0])
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
