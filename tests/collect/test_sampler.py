"""The real sampler process, against the fake NVML and a /sys of files."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect.sampler import HELLO, SAMPLER_ARGV, SLOWED, read_port
from tests.collect import sysfs
from tests.collect.live_processes import await_true, is_running
from tests.fakes.nvml.build import fake_nvml_env

PATIENCE_S = 20.0


@contextmanager
def sampling(folder: Path, /, *argv: str, **settings: object) -> Iterator[subprocess.Popen[bytes]]:
    """A sampler that is surely gone afterwards."""
    pipe, env = subprocess.PIPE, fake_nvml_env(folder, **settings)
    with subprocess.Popen(argv or SAMPLER_ARGV, stdin=pipe, stdout=pipe, env=env) as child:
        try:
            yield child
        finally:
            child.kill()


def line(child: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert child.stdout is not None
    found: dict[str, Any] = json.loads(child.stdout.readline())
    return found


def first(folder: Path, **settings: object) -> tuple[list[bool | None], list[int | None]]:
    """What the first line says of the GPUs."""
    with sampling(folder, **settings) as child:
        found = line(child)
    assert found["time_s"] > 0
    gpus = [found["read"][name] for name in sorted(found["read"]) if "GPU" in name.upper()]
    return [gpu["throttled"] for gpu in gpus], [gpu["ecc_errors"] for gpu in gpus]


@pytest.mark.parametrize(
    ("bits", "verdict"),
    [
        (0x0, False),  # full speed
        (0x1, False),  # idle
        (0x2, False),  # clocks that the user chose
        (0x40, True),  # heat
        (0x4 | 0x1, True),  # power cap
        (0x8, True),
        (0x20, True),
        (0x80, True),
        (0x110, False),
    ],
)
def test_only_heat_and_power_count_as_throttling(bits: int, verdict: bool) -> None:
    assert bool(bits & SLOWED) is verdict


def test_every_gpu_and_every_port_is_read(fake_nvml: Path, tmp_path: Path) -> None:
    assert first(fake_nvml, gpus=3, reasons="0x40") == ([True, False, False], [0, 0, 0])
    port = sysfs.infiniband(tmp_path, "mlx5_0", layer="Ethernet")
    sysfs.write(port / "hw_counters", out_of_sequence=2, np_cnp_sent=5)
    sysfs.infiniband(tmp_path, "odd")
    code = "from pathlib import Path; from dynamiccl.collect import sampler; "
    code += f"sampler.main(Path({str(tmp_path)!r}))"
    with sampling(fake_nvml, sys.executable, "-c", code, gpus=1) as child:
        assert line(child)["read"] == {
            "gpu0": {"throttled": False, "ecc_errors": 0},
            "mlx5_0/1": {"nic_retries": 2, "nic_congestion": 5},
        }


def test_what_is_denied_is_not_known(fake_nvml: Path) -> None:
    newer, older = (f"nvmlDeviceGetCurrentClocks{word}Reasons" for word in ("Event", "Throttle"))
    assert first(fake_nvml, deny=f"{newer}=4,{older}=4") == ([None] * 2, [0, 0])
    assert first(fake_nvml, deny="nvmlDeviceGetTotalEccErrors=3") == ([False] * 2, [None] * 2)
    # A GPU that is lost, and an older driver.
    assert first(fake_nvml, deny="nvmlDeviceGetHandleByIndex_v2=15") == ([None] * 2, [None] * 2)
    assert first(fake_nvml, gpus=1, deny=f"{newer}=13", reasons="0x40") == ([True], [0])


@pytest.mark.parametrize("code", [4, 9])
def test_no_driver_or_no_right_is_no_gpu(fake_nvml: Path, code: int) -> None:
    assert first(fake_nvml, deny=f"nvmlInitWithFlags={code}") == ([None], [None])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_told(fake_nvml: Path, number: int) -> None:
    with sampling(fake_nvml) as child:
        assert line(child)
        child.send_signal(number)
        assert child.wait(PATIENCE_S) == 0


def test_only_the_input_of_a_starter_that_greeted_it_ends_it(fake_nvml: Path) -> None:
    with sampling(fake_nvml) as greeted, sampling(fake_nvml) as other:
        assert greeted.stdin is not None
        assert other.stdin is not None
        other.stdin.close()
        greeted.stdin.write(HELLO)
        greeted.stdin.close()
        assert greeted.wait(PATIENCE_S) == 0
        assert all(line(other) for _ in range(5))
        assert other.poll() is None


def test_it_ends_when_its_parent_is_gone(fake_nvml: Path, tmp_path: Path) -> None:
    # Its output goes to a file: that nobody reads a pipe would end it, too. Its input is closed.
    out, pid_file = tmp_path / "out", tmp_path / "pid"
    argv = ["sh", "-c", 'exec "$@" <&-', "sh", *SAMPLER_ARGV]
    code = (
        "import subprocess, sys; "
        f"child = subprocess.Popen({argv!r}, stdout=open({str(out)!r}, 'wb')); "
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); sys.stdin.read()"
    )
    env = fake_nvml_env(fake_nvml)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=env) as parent:
        try:
            await_true(lambda: out.is_file() and out.read_bytes().count(b"\n") >= 2)
        finally:
            parent.kill()
    pid = int(pid_file.read_text())
    await_true(lambda: not is_running(pid))


def test_ports_are_read_by_the_names_of_mlx5_efa_and_the_port_itself(tmp_path: Path) -> None:
    mlx5 = sysfs.infiniband(tmp_path, "mlx5_0", layer="Ethernet")
    sysfs.write(mlx5 / "hw_counters", out_of_sequence=3, np_cnp_sent=7, rp_cnp_handled=1)
    sysfs.write(sysfs.efa(tmp_path, "efa0") / "hw_counters", retrans_pkts=2)
    sysfs.write(sysfs.infiniband(tmp_path, "ib0") / "counters", symbol_error=6)
    sysfs.write(sysfs.infiniband(tmp_path, "odd") / "counters", symbol_error="N/A (no PMA)")
    sysfs.infiniband(tmp_path, "silent")
    found = {
        port.parents[1].name: [*read_port(port).values()]
        for port in tmp_path.glob("class/infiniband/*/ports/1")
    }
    assert found == {
        "efa0": [2, None],
        "ib0": [6, None],
        "mlx5_0": [3, 8],
        "odd": [None, None],
        "silent": [None, None],
    }
