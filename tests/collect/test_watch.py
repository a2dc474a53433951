"""Real samplers of the fake NVML, through the local launcher."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest

from dynamiccl.collect import nodes as watching
from dynamiccl.collect.launch import NcclTestsRunner
from dynamiccl.collect.launchers import LauncherSettings
from dynamiccl.collect.nodes import UNKNOWN, Health, Nodes, NodeWatch, NoWatch, ask_nodes
from dynamiccl.collect.run import run_sweep
from dynamiccl.datasets import store
from dynamiccl.datasets.cells import comparable, usable
from tests.collect.benchmark.stand_in import site
from tests.collect.benchmark.sweeps import sweep
from tests.collect.cycles import Cycles
from tests.collect.live_processes import await_true, is_running
from tests.fakes.nvml.build import build_fake_nvml

ROOT = Path(__file__).resolve().parents[2]
LOCAL = Nodes(LauncherSettings())
HEALTHY = Health(throttled=False, ecc_errors=0)


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(nvml: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two healthy GPUs, until a test says otherwise."""
    for name in [name for name in os.environ if name.startswith(("NCCL_", "FAKE_", "DYNAMICCL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return monkeypatch


def watched() -> NodeWatch:
    return NodeWatch(LOCAL, 1)


def sampler_pid(watch: NodeWatch) -> int:
    assert watch._process is not None
    return watch._process.pid


def test_nobody_watches_and_nothing_is_known() -> None:
    assert NoWatch().health([(0.0, 1.0), (1.0, 2.0)]) == [UNKNOWN, UNKNOWN]


@pytest.mark.usefixtures("machine")
def test_healthy_gpus_are_known_to_be_so_until_the_very_end() -> None:
    with watched() as watch:
        began = time.time()
        time.sleep(0.05)
        now = time.time()
        stretches = [(began, began + 0.02), (began + 0.02, now)]
        assert watch.health(stretches) == [HEALTHY, HEALTHY]
        # Shorter than the time between two readings.
        assert watch.health([(now - 0.001, now)]) == [HEALTHY]
        assert watch.health([]) == []
        assert watch.health([(1.0, 2.0)]) == [UNKNOWN]
    assert not is_running(sampler_pid(watch))


def test_slow_and_erring_gpu_is_told(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("FAKE_NVML_REASONS", "0x40")
    # The third question for errors, after the first reading, finds some.
    machine.setenv("FAKE_NVML_ECC", "2")
    with watched() as watch:
        began = time.time()
        [found] = watch.health([(began, began + 0.5)])
    assert found == Health(throttled=True, ecc_errors=2)


class OneOfTwo(Nodes):
    """Two nodes, of which one is never heard of."""

    def start(
        self, argv: Sequence[str], num_nodes: int, *, ranks_per_node: int = 1
    ) -> subprocess.Popen[bytes]:
        return super().start(argv, num_nodes - 1, ranks_per_node=ranks_per_node)


def test_node_that_is_silent_makes_the_verdict_unknown(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(watching, "_FIRST_READING_S", 0.5)
    with watched() as one, NodeWatch(OneOfTwo(LauncherSettings()), 2) as two:
        began = time.time()
        time.sleep(0.1)
        stretch = (began, time.time())
        assert one.health([stretch]) == [HEALTHY]
        assert two.health([stretch]) == [UNKNOWN]


def test_machine_without_gpus_is_watched_without_a_fuss(
    machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine.delenv("LD_LIBRARY_PATH")
    with watched() as watch:
        now = time.time()
        assert watch.health([(now - 0.1, now)]) == [UNKNOWN]
    assert caplog.text == ""


def test_sampler_that_does_not_start_is_told_and_no_error(
    machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = [sys.executable, "-c", "import sys; sys.exit('no pynvml here')"]
    machine.setattr(watching, "sampler_argv", lambda: broken)
    # What has ended is not waited for.
    machine.setattr(watching, "_FIRST_READING_S", 1e6)
    machine.setattr(watching, "_NEXT_READING_S", 1e6)
    with watched() as watch:
        now = time.time()
        assert watch.health([(now - 1, now)]) == [UNKNOWN]
    assert "no telemetry: the samplers do not write (no pynvml here)" in caplog.text


def test_sampler_that_never_writes_is_waited_for_a_while_and_ended(
    machine: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.setattr(watching, "_FIRST_READING_S", 0.2)
    mark = tmp_path / "pid"
    code = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    machine.setattr(watching, "sampler_argv", lambda: [sys.executable, "-c", code])
    with watched():
        await_true(lambda: mark.is_file() and mark.read_text() != "")
    assert "no telemetry" in caplog.text
    assert not is_running(int(mark.read_text()))


@pytest.mark.usefixtures("machine")
def test_samplers_are_ended_when_the_run_fails() -> None:
    with pytest.raises(ZeroDivisionError), watched() as watch:
        raise ZeroDivisionError
    assert not is_running(sampler_pid(watch))


def test_samplers_are_ended_when_their_start_is_interrupted(machine: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    machine.setattr(NodeWatch, "_await_readings", interrupted)
    watch = watched()
    with pytest.raises(KeyboardInterrupt), watch:
        pass
    assert not is_running(sampler_pid(watch))


HARNESS = """
import time
from dynamiccl.collect.launchers import LauncherSettings
from dynamiccl.collect.nodes import Nodes, NodeWatch
with NodeWatch(Nodes(LauncherSettings()), 1) as watch:
    print(watch._process.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.usefixtures("machine")
def test_killed_harness_leaves_no_sampler_behind() -> None:
    argv = [sys.executable, "-c", HARNESS]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=ROOT) as harness:
        assert harness.stdout is not None
        pid = int(harness.stdout.readline())
        assert is_running(pid)
        harness.send_signal(signal.SIGKILL)
        harness.wait(timeout=20)
    await_true(lambda: not is_running(pid))


SMALL = {
    "sizes": '{ min = "1M", max = "2M" }',
    "algorithms": '["Ring"]',
    "protocols": '["LL"]',
    "num_channels": "[0]",
    "cycles": "1",
    "runner": '{ mode = "processes", read_back = false }',
}


def measured(folder: Path) -> pl.DataFrame:
    """Rows of a small sweep of the stand-in, watched and with the node's facts."""
    made = sweep(**SMALL)
    where = site(made, folder, None)
    facts = ask_nodes(LOCAL, 1, {})
    with watched() as watch:
        runner = NcclTestsRunner(made.file, where, watch=watch, facts=facts)
        run_sweep(made, Cycles(made.trials, 1), runner, where.out, resume=False)
    return store.read(where.out)


def test_verdicts_on_a_slow_machine_reach_the_data(
    machine: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.setenv("FAKE_NVML_REASONS", "0x40")
    machine.setenv("FAKE_NVML_MIG", "1")
    # That it is slow is known without the reading after the end.
    machine.setattr(watching, "_NEXT_READING_S", 0.0)
    rows = measured(tmp_path)
    assert set(rows["status"]) == {"ok"}
    assert rows["throttled"].all()
    assert usable(rows).is_empty()
    assert "heat, power or memory errors of GPUs in 2 of 2 blocks" in caplog.text
    assert rows["mig"].all()
    assert comparable(rows).is_empty()
    assert set(rows["driver_version"]) == {"999.10.fake"}
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {
        ".journal",
        "measurements",
        "choices",
        "topology",
    }


@pytest.mark.usefixtures("machine")
def test_every_row_of_a_healthy_machine_is_known_to_be_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = measured(tmp_path)
    assert set(rows["throttled"]) == {False}
    assert set(rows["ecc_errors"]) == {0}
    assert set(rows["mig"]) == {False}
    assert usable(comparable(rows)).height == rows.height
    assert "heat" not in caplog.text
