"""The real sampler process, against the fake NVML."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dynamiccl.collect.telemetry.companion import HELLO
from dynamiccl.collect.telemetry.cost import sampler_cpu_share
from dynamiccl.collect.telemetry.sampler import sampler_argv
from dynamiccl.collect.telemetry.samples import Samples, read_samples
from dynamiccl.collect.telemetry.windows import Window, health, telemetry_table
from dynamiccl.errors import MachineError
from tests.collect.telemetry import sysfs
from tests.fakes.nvml.build import fake_nvml_env

PATIENCE_S = 20.0
RATE_HZ = 50.0


@contextmanager
def sampling(
    folder: Path, out: Path, *options: str, **settings: object
) -> Iterator[subprocess.Popen[bytes]]:
    """A sampler that is surely gone afterwards."""
    argv = [*sampler_argv(out, RATE_HZ), "--sysfs", str(out.parent / "sys"), *options]
    env = fake_nvml_env(folder, **settings)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=env) as child:
        try:
            yield child
        finally:
            child.kill()


def await_lines(path: Path, enough: Callable[[bytes], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not (path.is_file() and enough(path.read_bytes())):
        assert time.monotonic() < until, path.read_bytes() if path.is_file() else "no file"
        time.sleep(0.01)


def ticks(count: int) -> Callable[[bytes], bool]:
    return lambda text: text.count(b'"fast":[') > count


def sampled(folder: Path, out: Path, *, count: int = 10, **settings: object) -> Samples:
    with sampling(folder, out, **settings) as child:
        await_lines(out, ticks(count))
        child.terminate()
        assert child.wait(PATIENCE_S) == 0
    return read_samples(out)


def test_every_gpu_and_nic_is_read_every_tick(fake_nvml: Path, tmp_path: Path) -> None:
    sysfs.infiniband(tmp_path / "sys", "mlx5_0")
    samples = sampled(fake_nvml, tmp_path / "s", gpus=2)
    assert samples.errors == ()
    assert samples.rate_hz == RATE_HZ
    latest = {key: series.values[-1] for key, series in samples.series.items()}
    assert latest["gpu0", "sm_clock_mhz"] == 1980
    assert latest["gpu1", "sm_clock_mhz"] == 1965
    assert latest["gpu1", "power_w"] == 72.2
    assert latest["gpu0", "temperature_c"] == 31
    assert latest["gpu0", "utilization_percent"] == 97
    assert latest["gpu0", "memory_utilization_percent"] == 12
    assert latest["gpu1", "mig_mode"] == 0
    assert latest["gpu1", "nvlink_replay_errors"] == 0
    assert latest["mlx5_0", "tx_bytes"] == 4000
    assert latest["mlx5_0", "link_downed"] == 1
    sent = samples.series["gpu0", "nvlink_tx_bytes"]
    rate = (sent.values[-1] - sent.values[0]) / (sent.times_s[-1] - sent.times_s[0])
    assert rate == pytest.approx(100e9 * 1.024, rel=0.5)


def test_ticks_keep_their_rate(fake_nvml: Path, tmp_path: Path) -> None:
    times = sampled(fake_nvml, tmp_path / "s", count=40).series["gpu0", "power_w"].times_s
    assert np.median(np.diff(times)) == pytest.approx(1 / RATE_HZ, rel=0.25)


def test_what_is_denied_is_recorded_once_and_not_asked_again(
    fake_nvml: Path, tmp_path: Path
) -> None:
    denied = tmp_path / "denied"
    deny = "nvmlDeviceGetPowerUsage=4,nvmlDeviceGetMigMode=3,field:160=3,field:138=3,field:202=3"
    samples = sampled(fake_nvml, tmp_path / "s", gpus=1, deny=deny, denied=denied)
    said = {(e.device, e.counter): e.error for e in samples.errors}
    assert said.keys() == {
        ("gpu0", "power_w"),
        ("gpu0", "mig_mode"),
        ("gpu0", "nvlink_ecc_data_errors"),
        ("gpu0", "nvlink_tx_bytes"),
    }
    assert said["gpu0", "power_w"] == "nvmlDeviceGetPowerUsage: Insufficient Permissions"
    assert said["gpu0", "nvlink_tx_bytes"] == "field 138: Not Supported"
    assert ("gpu0", "power_w") not in samples.series
    assert ("gpu0", "nvlink_rx_bytes") in samples.series
    asked = denied.read_text().split()
    assert sorted(asked) == sorted(
        ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetMigMode", "field:160", "field:138", "field:202"]
    )


def test_older_and_newer_drivers_are_asked_in_their_way(fake_nvml: Path, tmp_path: Path) -> None:
    deny = "nvmlDeviceGetCurrentClocksEventReasons=13,nvmlDeviceGetTemperature=26,field:138=3"
    samples = sampled(fake_nvml, tmp_path / "s", gpus=1, deny=deny, reasons="0x40")
    assert samples.errors == ()
    assert samples.series["gpu0", "clock_event_reasons"].values[-1] == 0x40
    assert samples.series["gpu0", "temperature_c"].values[-1] == 41
    assert ("gpu0", "nvlink_tx_bytes") in samples.series


def test_a_throttled_and_erring_gpu_shows_in_the_verdict(fake_nvml: Path, tmp_path: Path) -> None:
    # The second question for ECC errors comes with the first tick, the third a second later.
    settings = {"gpus": 2, "reasons": "0x41", "ecc": 2, "mig": 1}
    samples = sampled(fake_nvml, tmp_path / "s", count=60, **settings)
    times = samples.series["gpu0", "ecc_uncorrected_errors"].times_s
    found = health(samples, times[0], times[-1])
    assert (found.throttled, found.ecc_errors, found.mig) == (True, 2, True)
    window = Window("t", "cycle-0", "launch-0", times[0], times[-1])
    table = telemetry_table(samples, [window], system="lab", sweep="night")
    assert table.num_rows > 60


@pytest.mark.parametrize("code", [4, 9, 12])
def test_no_driver_or_no_right_is_a_fact(fake_nvml: Path, tmp_path: Path, code: int) -> None:
    sysfs.ethernet(tmp_path / "sys", "eth0", hardware=True)
    samples = sampled(fake_nvml, tmp_path / "s", deny=f"nvmlInitWithFlags={code}")
    (error,) = samples.errors
    assert (error.device, error.counter) == ("gpu", "nvml")
    assert {device for device, _ in samples.series} == {"eth0"}


def test_a_lost_gpu_does_not_silence_the_others(fake_nvml: Path, tmp_path: Path) -> None:
    samples = sampled(fake_nvml, tmp_path / "s", gpus=2, deny="nvmlDeviceGetUtilizationRates=15")
    assert {e.device for e in samples.errors} == {"gpu0", "gpu1"}
    assert ("gpu1", "power_w") in samples.series


def test_a_killed_sampler_leaves_a_readable_file(fake_nvml: Path, tmp_path: Path) -> None:
    out = tmp_path / "s"
    with sampling(fake_nvml, out) as child:
        await_lines(out, ticks(5))
        child.kill()
        child.wait(PATIENCE_S)
    assert len(read_samples(out).series["gpu0", "power_w"].values) >= 5


def test_a_file_on_a_shared_disk_is_named_by_host(fake_nvml: Path, tmp_path: Path) -> None:
    with sampling(fake_nvml, tmp_path / "nodes" / "{host}.jsonl"):
        until = time.monotonic() + PATIENCE_S
        while not list(tmp_path.glob("nodes/*.jsonl")):
            assert time.monotonic() < until
            time.sleep(0.01)
    (path,) = tmp_path.glob("nodes/*.jsonl")
    assert path.stem == read_samples(path).host


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_told(fake_nvml: Path, tmp_path: Path, number: int) -> None:
    with sampling(fake_nvml, tmp_path / "s") as child:
        await_lines(tmp_path / "s", ticks(1))
        child.send_signal(number)
        assert child.wait(PATIENCE_S) == 0


def test_it_ends_with_the_input_of_a_starter_that_greeted_it(
    fake_nvml: Path, tmp_path: Path
) -> None:
    with sampling(fake_nvml, tmp_path / "s") as child:
        assert child.stdin is not None
        child.stdin.write(HELLO)
        child.stdin.close()
        assert child.wait(PATIENCE_S) == 0


def test_an_input_that_ends_without_a_word_says_nothing(fake_nvml: Path, tmp_path: Path) -> None:
    with sampling(fake_nvml, tmp_path / "s") as child:
        assert child.stdin is not None
        child.stdin.close()
        await_lines(tmp_path / "s", ticks(20))
        assert child.poll() is None


def test_it_ends_when_its_parent_is_gone(fake_nvml: Path, tmp_path: Path) -> None:
    out, pid_file = tmp_path / "s", tmp_path / "pid"
    argv = sampler_argv(out, RATE_HZ)
    code = (
        "import os, subprocess, sys; "
        f"child = subprocess.Popen({argv!r}, stdin=subprocess.DEVNULL); "
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); sys.stdin.read()"
    )
    env = fake_nvml_env(fake_nvml)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=env) as parent:
        try:
            await_lines(out, ticks(2))
        finally:
            parent.kill()
    pid = int(pid_file.read_text())
    until = time.monotonic() + PATIENCE_S
    while _is_sampler(pid):
        assert time.monotonic() < until
        time.sleep(0.02)


def _is_sampler(pid: int) -> bool:
    """Whether the process still runs; one that ended may wait for ever for a parent to reap it."""
    try:
        return b"sampler" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate-hz", "0"], "--rate-hz is 0"),
        (["--rate-hz", "1000"], "at most 100"),
        (["--pcie-period-s", "1"], "at least 10"),
    ],
)
def test_rates_that_would_disturb_are_refused(
    tmp_path: Path, options: list[str], message: str
) -> None:
    argv = [*sampler_argv(tmp_path / "s"), *options]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_it_costs_less_than_a_hundredth_of_a_core_for_each_gpu(fake_nvml: Path) -> None:
    cost = sampler_cpu_share(2.0, env=fake_nvml_env(fake_nvml, gpus=8))
    assert cost.num_gpus == 8
    assert 0 < cost.cpu_share_per_gpu < 0.01
    assert cost.ticks_per_s == pytest.approx(10.0, rel=0.5)


def test_the_cost_of_a_sampler_that_does_not_start_is_no_figure(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(MachineError, match="did not begin to read"):
        sampler_cpu_share(1.0, env={"PYTHONPATH": str(tmp_path)})
