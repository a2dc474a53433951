"""Health of nodes: verdicts on a stretch of time, and real samplers of the fake NVML and /sys."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect import nodes as watching
from dynamiccl.collect.launchers import LauncherSettings
from dynamiccl.collect.nodes import (
    MAX_GAP_S,
    UNKNOWN,
    Nodes,
    add_reading,
    ask_nodes,
    health_of,
    watch_health,
)
from dynamiccl.collect.on_node import HELLO, SAMPLER_ARGV, SLOWED, read_port
from dynamiccl.datasets.cells import comparable, usable
from tests.collect import sysfs
from tests.collect.benchmark.stand_in import Lab, sweep
from tests.collect.live_processes import PATIENCE_S, await_true, is_running
from tests.fakes.nvml.build import fake_nvml_env

LOCAL = Nodes(LauncherSettings())
Row = dict[str, Any]


Heard = dict[str, list[Row]]
#: What it has in place of ports, and of GPUs.
NO_NIC = {"no NIC": {"nic_retries": None, "nic_congestion": None}}
NO_GPU = {"no GPU": {"throttled": None, "ecc_errors": None}}


def reading(time_s: float, slowed: Sequence[object], ecc_errors: Sequence[object] = ()) -> Row:
    """Of some GPUs: whether each is throttled, and its memory errors (0)."""
    gpus = zip(slowed, ecc_errors or [0] * len(slowed), strict=True)
    read = {f"gpu{k}": {"throttled": s, "ecc_errors": e} for k, (s, e) in enumerate(gpus)}
    return {"time_s": time_s, "read": (read or NO_GPU) | NO_NIC}


def node(*readings: Row, host: str = "n1") -> Heard:
    found: Heard = {}
    for one in readings:
        add_reading(found, json.dumps({"sampler": f"{host}:7", **one}))
    return found


def slowed(*values: bool | None, host: str = "n1") -> Heard:
    """One GPU, read once a second."""
    return node(*(reading(float(t), [value]) for t, value in enumerate(values)), host=host)


def erring(*totals: int) -> Heard:
    """One GPU that has had so many memory errors, read once a second."""
    return node(*(reading(float(t), [False], [total]) for t, total in enumerate(totals)))


COOLING, GOOD, BEYOND = slowed(False, True, False, False), slowed(False, False), MAX_GAP_S + 9
LATER, ERRING = node(reading(9.0, [True])), erring(5, 5, 7, 7, 8)
STALLED = node(*(reading(t, [False]) for t in (0.0, 1.0, 9.0, 10.0)))


def test_stretch_is_judged_by_the_readings_around_it() -> None:
    for heard, begin_s, end_s, found in (
        # A stretch between two readings is judged by both.
        (COOLING, 1.2, 1.3, True),
        (COOLING, 0.2, 0.3, True),
        (COOLING, 2.2, 2.3, False),
        (COOLING, 2.0, 3.0, False),
        # What lies in a hole or beyond the readings is not known.
        (slowed(True), MAX_GAP_S, BEYOND, True),
        (slowed(True), MAX_GAP_S + 0.1, BEYOND, None),
        (LATER, 5.0, 9.0 - MAX_GAP_S, True),
        (LATER, 5.0, 8.9 - MAX_GAP_S, None),
        (GOOD, 0.5, 5.0, None),
        (GOOD, -3.0, 0.5, None),
        (STALLED, 0.5, 9.5, None),
        (STALLED, 9.2, 9.8, False),
        # Of errors those count that came inside the stretch.
        (ERRING, 1.5, 2.5, 2),
        (ERRING, 2.5, 2.9, 0),
        (ERRING, 0.1, 3.9, 3),
        # A counter that began anew has counted what it shows.
        (erring(5, 5, 1, 1), 0.5, 2.5, 1),
    ):
        column = "ecc_errors" if type(found) is int else "throttled"
        assert health_of(heard, 1, begin_s, end_s)[column] is found, (begin_s, end_s)


def test_what_a_node_does_not_tell_is_unknown() -> None:
    died_hot = node(reading(0.0, [False]), reading(1.0, [True], [2]))
    assert health_of(died_hot, 1, 0.5, 50.0) == {**UNKNOWN, "throttled": True, "ecc_errors": 2}
    # One GPU of a node is enough; one that does not answer leaves the others unknown.
    both = node(reading(0.0, [False, False]), reading(1.0, [False, True], [0, 1]))
    assert health_of(both, 1, 0.2, 0.8) == {**UNKNOWN, "throttled": True, "ecc_errors": 1}
    silent = node(*(reading(float(t), [False, None], [None, 0]) for t in range(3)))
    assert health_of(silent, 1, 0.5, 1.5) == UNKNOWN
    fine = GOOD | slowed(False, False, host="n2")
    bad = node(reading(0.0, [False]), reading(1.0, [True], [3]), host="n3")
    assert health_of(fine, 2, 0.2, 0.8)["throttled"] is False
    found = health_of(fine | bad, 4, 0.2, 0.8)
    assert (found["throttled"], found["ecc_errors"]) == (True, 3)
    without_gpu = node(*(reading(float(t), []) for t in range(3)), host="n2")
    for heard, num_nodes in ((fine, 3), (fine | without_gpu, 2), (without_gpu, 1), ({}, 1)):
        assert health_of(heard, num_nodes, 0.2, 0.8) == UNKNOWN


def ports(host: str, *readings: dict[str, list[int | None]]) -> Heard:
    names = ("nic_retries", "nic_congestion")
    nics = [{p: dict(zip(names, n, strict=True)) for p, n in one.items()} for one in readings]
    return node(*({"time_s": float(t), "read": NO_GPU | n} for t, n in enumerate(nics)), host=host)


def test_row_has_what_all_ports_counted_and_names_the_worst() -> None:
    one = ports("n1", {"a/1": [5, 100]}, {"a/1": [5, 190]}, {"a/1": [9, 190]})
    other = ports("n2", {"b/1": [0, 0], "c/1": [7, None]}, {"b/1": [3, 5], "c/1": [7, None]})
    found = health_of(one | other, 2, 0.2, 0.8)
    assert (found["nic_retries"], found["nic_congestion"]) == (3, 95)
    assert found["nic_worst"] == "n2 b/1"
    later = health_of(one, 1, 1.2, 1.8)
    assert (later["nic_retries"], later["nic_worst"]) == (4, "n1 a/1")
    quiet = health_of(ports("n1", {"a/1": [9, 1]}, {"a/1": [9, 1]}), 1, 0.2, 0.8)
    assert (quiet["nic_retries"], quiet["nic_congestion"], quiet["nic_worst"]) == (0, 0, None)
    assert health_of(one, 1, 5.0, 6.0)["nic_retries"] is None
    assert health_of(one, 2, 2.0, 2.0)["nic_congestion"] is None


@pytest.fixture
def machine(fake_nvml: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two healthy GPUs, until a test says otherwise."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_nvml))
    return monkeypatch


def of_gpus(healths: list[Row]) -> list[tuple[object, object]]:
    return [(health["throttled"], health["ecc_errors"]) for health in healths]


@pytest.mark.usefixtures("machine")
def test_healthy_gpus_are_known_to_be_so_until_the_very_end() -> None:
    with watch_health(LOCAL, 1) as health:
        began = time.time()
        time.sleep(0.05)
        now = time.time()
        # The last is shorter than the time between two readings.
        stretches = [(began, began + 0.02), (began + 0.02, now), (now - 0.001, now)]
        assert of_gpus(health(stretches)) == [(False, 0)] * 3
        assert health([]) == []
        assert health([(1.0, 2.0)]) == [UNKNOWN]


def test_no_sampler_is_told(machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    broken = [sys.executable, "-c", "import sys; sys.exit('no pynvml here')"]
    machine.setattr(watching, "SAMPLER_ARGV", broken)
    # What has ended is not waited for.
    machine.setattr(watching, "_FIRST_READING_S", 1e6)
    machine.setattr(watching, "_NEXT_READING_S", 1e6)
    with watch_health(LOCAL, 1) as health:
        now = time.time()
        assert health([(now - 1, now)]) == [UNKNOWN]
    assert "no telemetry: the samplers do not write (no pynvml here)" in caplog.text


def test_verdicts_on_a_slow_machine_reach_the_data(
    machine: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.setenv("FAKE_NVML_REASONS", "0x40")
    machine.setenv("FAKE_NVML_MIG", "1")
    # That it is slow is known without the reading after the end.
    machine.setattr(watching, "_NEXT_READING_S", 0.0)
    small = {"sizes": '{ min = "1M", max = "2M" }', "algorithms": "[]", "cycles": "1"}
    made, lab = sweep(**small, runner="{ read_back = false }"), Lab(tmp_path, None)
    with watch_health(LOCAL, 1) as health:
        lab.run(made, health=health, facts=ask_nodes(LOCAL, 1, {}))
    rows = lab.rows
    # NCCL's own choice needs no plugin.
    assert rows.select("status", "default_scope").unique().rows() == [("ok", "untouched")]
    assert rows["throttled"].all()
    assert usable(rows).is_empty()
    assert "heat, power or memory errors of GPUs in 4 of 4 blocks" in caplog.text
    assert rows["mig"].all()
    assert comparable(rows).is_empty()
    assert set(rows["driver_version"]) == {"999.10.fake"}


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


def test_what_a_gpu_or_port_denies_is_not_known(fake_nvml: Path, tmp_path: Path) -> None:
    assert first(fake_nvml, gpus=3, reasons="0x40") == ([True, False, False], [0, 0, 0])
    port = sysfs.infiniband(tmp_path, "mlx5_0", layer="Ethernet")
    sysfs.write(port / "hw_counters", out_of_sequence=2, np_cnp_sent=5)
    sysfs.infiniband(tmp_path, "odd")
    code = "from pathlib import Path; from dynamiccl.collect import on_node; "
    code += f"on_node.sample(Path({str(tmp_path)!r}))"
    with sampling(fake_nvml, sys.executable, "-c", code, gpus=1) as child:
        assert line(child)["read"] == {
            "gpu0": {"throttled": False, "ecc_errors": 0},
            "mlx5_0/1": {"nic_retries": 2, "nic_congestion": 5},
        }
    newer, older = (f"nvmlDeviceGetCurrentClocks{word}Reasons" for word in ("Event", "Throttle"))
    assert first(fake_nvml, deny=f"{newer}=4,{older}=4") == ([None] * 2, [0, 0])
    # A GPU that is lost, an older driver, and none.
    assert first(fake_nvml, deny="nvmlDeviceGetHandleByIndex_v2=15") == ([None] * 2, [None] * 2)
    assert first(fake_nvml, gpus=1, deny=f"{newer}=13", reasons="0x40") == ([True], [0])
    assert first(fake_nvml, deny="nvmlInitWithFlags=9") == ([None], [None])
    # Power caps and brakes slow a config; idle clocks, and those that a user chose, are no fault.
    slow = (0x4 | 0x1, 0x8, 0x20, 0x80)
    assert [bits for bits in (*slow, 0x1, 0x2, 0x110) if bits & SLOWED] == [*slow]


def test_it_ends_by_a_signal_or_a_greeters_input(fake_nvml: Path) -> None:
    with sampling(fake_nvml) as greeted, sampling(fake_nvml) as other:
        assert greeted.stdin is not None
        assert other.stdin is not None
        other.stdin.close()
        greeted.stdin.write(HELLO)
        greeted.stdin.close()
        assert greeted.wait(PATIENCE_S) == 0
        assert all(line(other) for _ in range(5))
        other.send_signal(signal.SIGTERM)
        assert other.wait(PATIENCE_S) == 0


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


def test_ports_are_read_by_their_drivers_names(tmp_path: Path) -> None:
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
