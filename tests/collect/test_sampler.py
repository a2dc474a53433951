"""The real sampler process, against the fake NVML."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect.ending import HELLO
from dynamiccl.collect.nodes import NodeReadings, parse_reading
from dynamiccl.collect.sampler import sampler_argv
from tests.collect import sysfs
from tests.collect.live_processes import await_true, is_running
from tests.fakes.nvml.build import fake_nvml_env

PATIENCE_S = 20.0


@contextmanager
def sampling(folder: Path, **settings: object) -> Iterator[subprocess.Popen[bytes]]:
    """A sampler that is surely gone afterwards."""
    pipe = subprocess.PIPE
    env = fake_nvml_env(folder, **settings)
    with subprocess.Popen(sampler_argv(), stdin=pipe, stdout=pipe, env=env) as child:
        try:
            yield child
        finally:
            child.kill()


def line(child: subprocess.Popen[bytes]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().decode()


def first(folder: Path, **settings: object) -> dict[str, Any]:
    """What the first line says of the GPUs."""
    with sampling(folder, **settings) as child:
        found: dict[str, Any] = json.loads(line(child))
    assert found.pop("sampler")
    assert found.pop("time_s") > 0
    found.pop("nics")  # of the machine that we run on
    return found


def test_every_gpu_is_asked(fake_nvml: Path) -> None:
    assert first(fake_nvml, gpus=3, reasons="0x40") == {
        "slowed": [True, False, False],
        "ecc_errors": [0, 0, 0],
    }


def test_every_port_of_a_nic_is_read(fake_nvml: Path, tmp_path: Path) -> None:
    port = sysfs.infiniband(tmp_path, "mlx5_0", layer="Ethernet")
    sysfs.write(port / "hw_counters", out_of_sequence=2, np_cnp_sent=5)
    argv = [*sampler_argv(), "--sysfs", str(tmp_path)]
    env = fake_nvml_env(fake_nvml)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as child:
        try:
            told = parse_reading(line(child))
        finally:
            child.kill()
    assert told is not None
    assert told[1].nics == (("mlx5_0/1", 2, 5),)


def test_what_is_denied_is_not_known(fake_nvml: Path) -> None:
    both = "nvmlDeviceGetCurrentClocksEventReasons=4,nvmlDeviceGetCurrentClocksThrottleReasons=4"
    assert first(fake_nvml, deny=both) == {"slowed": [None, None], "ecc_errors": [0, 0]}
    deny = "nvmlDeviceGetTotalEccErrors=3"
    assert first(fake_nvml, gpus=1, deny=deny) == {"slowed": [False], "ecc_errors": [None]}


def test_older_drivers_are_asked_in_their_way(fake_nvml: Path) -> None:
    deny = "nvmlDeviceGetCurrentClocksEventReasons=13"
    assert first(fake_nvml, gpus=1, deny=deny, reasons="0x40")["slowed"] == [True]


def test_gpu_that_is_lost_is_not_known(fake_nvml: Path) -> None:
    deny = "nvmlDeviceGetHandleByIndex_v2=15"
    assert first(fake_nvml, deny=deny) == {"slowed": [None] * 2, "ecc_errors": [None] * 2}


@pytest.mark.parametrize("code", [4, 9, 12])
def test_no_driver_or_no_right_is_no_gpu(fake_nvml: Path, code: int) -> None:
    found = first(fake_nvml, deny=f"nvmlInitWithFlags={code}")
    assert found == {"slowed": [], "ecc_errors": []}


def test_erring_gpu_shows_in_the_verdict(fake_nvml: Path) -> None:
    # The third question for ECC errors finds some.
    with sampling(fake_nvml, gpus=2, ecc=2) as child:
        read = [parse_reading(line(child)) for _ in range(4)]
    readings = [reading for _, reading in filter(None, read)]
    node = NodeReadings()
    for reading in readings:
        node.add(reading)
    assert node.health(readings[0].begin_s, readings[1].begin_s).ecc_errors == 0
    assert node.health(readings[0].begin_s, readings[-1].begin_s).ecc_errors == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_told(fake_nvml: Path, number: int) -> None:
    with sampling(fake_nvml) as child:
        assert line(child)
        child.send_signal(number)
        assert child.wait(PATIENCE_S) == 0


def test_it_ends_with_the_input_of_a_starter_that_greeted_it(fake_nvml: Path) -> None:
    with sampling(fake_nvml) as child:
        assert child.stdin is not None
        child.stdin.write(HELLO)
        child.stdin.close()
        assert child.wait(PATIENCE_S) == 0


def test_an_input_that_ends_without_a_word_says_nothing(fake_nvml: Path) -> None:
    with sampling(fake_nvml) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert all(line(child) for _ in range(5))
        assert child.poll() is None


def test_it_ends_when_its_parent_is_gone(fake_nvml: Path, tmp_path: Path) -> None:
    # Its output goes to a file: that nobody reads a pipe would end it, too.
    out, pid_file = tmp_path / "out", tmp_path / "pid"
    code = (
        "import subprocess, sys; "
        f"child = subprocess.Popen({sampler_argv()!r}, stdin=subprocess.DEVNULL, "
        f"stdout=open({str(out)!r}, 'wb')); "
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
