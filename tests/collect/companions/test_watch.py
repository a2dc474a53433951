"""Real samplers of the fake NVML, through the local launcher."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pytest

from dynamiccl.collect.benchmark.runner import NcclTestsRunner
from dynamiccl.collect.companions import watch as watching
from dynamiccl.collect.companions.facts import ask_nodes
from dynamiccl.collect.companions.nodes import Nodes
from dynamiccl.collect.companions.watch import NodeWatch, NoWatch
from dynamiccl.collect.runs.run import run_sweep
from dynamiccl.collect.sweep.settings import LauncherSettings
from dynamiccl.collect.telemetry.windows import UNKNOWN, Health, Window
from dynamiccl.datasets import store
from dynamiccl.datasets.cells import comparable
from dynamiccl.datasets.schema import TELEMETRY
from tests.collect.benchmark.stand_in import site
from tests.collect.benchmark.sweeps import sweep
from tests.collect.cycles import Cycles
from tests.collect.interference.processes import await_true, is_running
from tests.fakes.nvml.build import build_fake_nvml

ROOT = Path(__file__).resolve().parents[3]
LOCAL = Nodes(LauncherSettings())
RATE_HZ = 50.0
HEALTHY = Health(throttled=False, ecc_errors=0, mig=False)


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


@contextmanager
def watched(folder: Path, num_nodes: int = 1, rate_hz: float = RATE_HZ) -> Iterator[NodeWatch]:
    with NodeWatch(LOCAL, num_nodes, rate_hz, folder) as watch:
        yield watch


def sampler_pid(folder: Path) -> int:
    [path] = folder.glob("*.samples")
    with path.open() as file:
        return int(json.loads(file.readline())["sampler"]["pid"])


def test_nobody_watches_and_nothing_is_known() -> None:
    assert NoWatch().health([(0.0, 1.0), (1.0, 2.0)]) == [UNKNOWN, UNKNOWN]
    assert NoWatch().table([Window("t", "r", "l", 0.0, 1.0)], system="s", sweep="w") is None


@pytest.mark.usefixtures("machine")
def test_healthy_gpus_are_known_to_be_so_until_the_very_end(tmp_path: Path) -> None:
    with watched(tmp_path) as watch:
        began = time.time()
        time.sleep(0.05)
        now = time.time()
        stretches = [(began, began + 0.02), (began + 0.02, now)]
        assert watch.health(stretches) == [HEALTHY, HEALTHY]
        # Shorter than the time between two readings.
        assert watch.health([(now - 0.001, now)]) == [HEALTHY]
        assert watch.health([]) == []
        assert watch.health([(1.0, 2.0)]) == [UNKNOWN]
        assert time.time() < now + 10
    assert not is_running(sampler_pid(tmp_path))


def test_slow_and_erring_gpu_is_told(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setenv("FAKE_NVML_REASONS", "0x40")
    machine.setenv("FAKE_NVML_MIG", "1")
    # The third question for errors, a second after the first reading, finds some.
    machine.setenv("FAKE_NVML_ECC", "2")
    with watched(tmp_path) as watch:
        began = time.time()
        [found] = watch.health([(began, began + 0.5)])
    assert found == Health(throttled=True, ecc_errors=2, mig=True)


def test_node_that_is_silent_makes_the_verdict_unknown(
    machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.setattr(watching, "_FIRST_READING_S", 0.5)
    machine.setattr(watching, "_NEXT_READING_S", 0.1)
    with watched(tmp_path, num_nodes=1) as one:
        two = NodeWatch(LOCAL, 2, RATE_HZ, tmp_path)
        began = time.time()
        time.sleep(0.1)
        stretch = (began, time.time())
        assert one.health([stretch])[0].throttled is False
        assert two.health([stretch]) == [UNKNOWN]


def test_machine_without_gpus_is_watched_without_a_fuss(
    machine: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.delenv("LD_LIBRARY_PATH")
    with watched(tmp_path) as watch:
        now = time.time()
        assert watch.health([(now - 0.1, now)]) == [UNKNOWN]
        # It does not wait for readings that cannot come.
        assert time.time() < now + watching._NEXT_READING_S
    assert caplog.text == ""


def test_readings_around_a_window_are_rows(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setattr(watching, "_NEXT_READING_S", 0.2)
    with watched(tmp_path) as watch:
        began = time.time()
        time.sleep(0.1)
        window = Window("AllReduce:1x8", "cycle-0", "0:x", began, time.time())
        watch.health([(window.begin_s, window.end_s)])
        table = watch.table([window], system="box", sweep="grid")
        assert watch.table([], system="box", sweep="grid") is None
        assert watch.table([Window("t", "r", "l", 1.0, 2.0)], system="s", sweep="w") is None
    assert table is not None
    assert table.schema == TELEMETRY
    frame = pl.DataFrame(table)
    assert set(frame["launch"]) == {"0:x"}
    power = frame.filter(device="gpu1", counter="power_w")
    assert set(power["value"]) == {72.2}
    assert 4 <= power.height <= 12


def test_sampler_that_does_not_start_is_told_and_no_error(
    machine: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = [sys.executable, "-c", "import sys; sys.exit('no pynvml here')"]
    machine.setattr(watching, "sampler_argv", lambda *_: broken)
    began = time.monotonic()
    with watched(tmp_path) as watch:
        now = time.time()
        assert watch.health([(now - 1, now)]) == [UNKNOWN]
        assert watch.table([Window("t", "r", "l", now - 1, now)], system="s", sweep="w") is None
    assert time.monotonic() < began + 10
    assert "no telemetry: the samplers do not write (no pynvml here)" in caplog.text


def test_sampler_that_never_writes_is_waited_for_a_while_and_ended(
    machine: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.setattr(watching, "_FIRST_READING_S", 0.2)
    mark = tmp_path / "pid"
    code = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    machine.setattr(watching, "sampler_argv", lambda *_: [sys.executable, "-c", code])
    with watched(tmp_path):
        await_true(lambda: mark.is_file() and mark.read_text() != "")
    assert "no telemetry" in caplog.text
    assert not is_running(int(mark.read_text()))


@pytest.mark.usefixtures("machine")
def test_samplers_are_ended_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), watched(tmp_path):
        raise ZeroDivisionError
    assert not is_running(sampler_pid(tmp_path))


def test_samplers_are_ended_when_their_start_is_interrupted(
    machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> bool:
        await_true(lambda: any(path.stat().st_size for path in tmp_path.glob("*.samples")))
        raise KeyboardInterrupt

    machine.setattr(NodeWatch, "_all_read", interrupted)
    with pytest.raises(KeyboardInterrupt), watched(tmp_path):
        pass
    assert not is_running(sampler_pid(tmp_path))


def test_earlier_runs_are_not_mistaken_for_this_one(
    machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.setattr(watching, "_NEXT_READING_S", 0.2)
    with watched(tmp_path):
        pass
    [old] = tmp_path.glob("*.samples")
    with watched(tmp_path) as watch:
        began = time.time()
        time.sleep(0.05)
        window = Window("t", "r", "l", began, time.time())
        assert watch.health([(window.begin_s, window.end_s)])[0].throttled is False
        table = watch.table([window], system="box", sweep="grid")
    assert table is not None
    assert min(table["timestamp"].to_pylist()).timestamp() > old.stat().st_mtime - 1
    assert len(list(tmp_path.glob("*.samples"))) == 2


HARNESS = """
import pathlib, sys, time
from dynamiccl.collect.companions.nodes import Nodes
from dynamiccl.collect.companions.watch import NodeWatch
from dynamiccl.collect.sweep.settings import LauncherSettings
with NodeWatch(Nodes(LauncherSettings()), 1, 50.0, pathlib.Path(sys.argv[1])):
    print("watching", flush=True)
    time.sleep(600)
"""


@pytest.mark.usefixtures("machine")
def test_killed_harness_leaves_no_sampler_behind(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", HARNESS, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=ROOT) as harness:
        assert harness.stdout is not None
        assert harness.stdout.readline() == b"watching\n"
        pid = sampler_pid(tmp_path)
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
    with watched(folder / "telemetry") as watch:
        runner = NcclTestsRunner(made.file, where, watch=watch, facts=facts)
        strategy = Cycles(made.trials, 1)
        run_sweep(made, strategy, runner, where.out, resume=False, watch=watch)
    return store.read(where.out)


def test_verdicts_and_readings_of_a_slow_machine_reach_the_data(
    machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.setenv("FAKE_NVML_REASONS", "0x40")
    machine.setenv("FAKE_NVML_MIG", "1")
    # That it is slow is known without the reading after the end.
    machine.setattr(watching, "_NEXT_READING_S", 0.0)
    rows = measured(tmp_path)
    assert set(rows["status"]) == {"ok"}
    assert rows["throttled"].all()
    assert rows["mig"].all()
    assert comparable(rows).is_empty()
    assert set(rows["driver_version"]) == {"999.10.fake"}
    readings = store.read(tmp_path / "out", "telemetry")
    assert set(readings["launch"]) == set(rows["launch"])
    reasons = readings.filter(device="gpu0", counter="clock_event_reasons")
    assert set(reasons["value"]) == {64.0}


@pytest.mark.usefixtures("machine")
def test_every_row_of_a_healthy_machine_is_known_to_be_good(tmp_path: Path) -> None:
    rows = measured(tmp_path)
    assert set(rows["throttled"]) == {False}
    assert set(rows["ecc_errors"]) == {0}
    assert set(rows["mig"]) == {False}
    assert comparable(rows).height == rows.height
