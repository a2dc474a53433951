"""The fingerprint as `dynamiccl-prepare` takes it on made-up machines, and its facts."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect.on_node import node_facts
from dynamiccl.libraries import check_fingerprint
from dynamiccl.serve.build import PROBE_NAME
from tests.collect import sysfs

H100 = "NVIDIA H100 80GB HBM3"
NODE = f"gpu={H100}*8;mig=0;nic=infiniband*8"
#: What is said of a machine where there is no artifact, or none that knows it.
NOTHING = dict.fromkeys(
    ("machine", "machine_problem", "systems", "artifact_problem", "key_problem"), ""
)
Build = Callable[[Path], None]


@pytest.fixture(name="probe", scope="module")
def probe_fixture(plugin_path: Path) -> Path:
    return plugin_path.parent / PROBE_NAME


def ask(probe: Path, root: Path, key: str = "") -> tuple[int, dict[str, Any]]:
    """Exit code and facts."""
    env = {"DYNAMICCL_TEST_ROOT": str(root), "DYNAMICCL_KEY_FILE": key}
    done = subprocess.run([probe, "--facts"], env=env, stdout=subprocess.PIPE, check=False)
    return done.returncode, json.loads(done.stdout)


def gpu(root: Path, number: int, model: str = H100, *, excluded: str = "No") -> None:
    folder = root / "proc" / "driver" / "nvidia" / "gpus" / f"0000:{number:02x}:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text(
        f"Model: \t\t {model}\nIRQ:   \t\t 42\nGPU UUID: \t GPU-1\nBus Type: \t PCIe\n"
        f"GPU Excluded:\t {excluded}\n"
    )


def dgx(root: Path) -> None:
    for number in range(8):
        gpu(root, number)
        sysfs.infiniband(root / "sys", f"mlx5_{number}")


def two_models(root: Path) -> None:
    gpu(root, 1, "NVIDIA L4")
    gpu(root, 2, "NVIDIA A10")
    gpu(root, 3, "NVIDIA L4")
    gpu(root, 4, "NVIDIA B200", excluded="Yes")
    sysfs.efa(root / "sys", "rdmap0")


def mig(root: Path) -> None:
    dgx(root)
    (root / "proc/driver/nvidia/capabilities/mig/config").mkdir(parents=True)
    (root / "proc/driver/nvidia/capabilities/gpu3/mig/gi2/ci0").mkdir(parents=True)


def mig_off(root: Path) -> None:
    dgx(root)
    (root / "proc/driver/nvidia/capabilities/mig/config").mkdir(parents=True)
    (root / "proc/driver/nvidia/capabilities/gpu3/mig").mkdir(parents=True)


def slow_and_dead_ports(root: Path) -> None:
    gpu(root, 0)
    sysfs.infiniband(root / "sys", "mlx5_0", layer="Ethernet")
    sysfs.infiniband(root / "sys", "mlx5_1", layer="Ethernet")
    sysfs.infiniband(root / "sys", "mlx5_2", state="1: DOWN")
    storage = sysfs.infiniband(root / "sys", "mlx5_3")
    (storage / "rate").write_text("2.5 Gb/sec (1X SDR)\n")
    odd = sysfs.infiniband(root / "sys", "mlx5_4")
    (odd / "rate").write_text("unknown\n")


def sockets(root: Path) -> None:
    gpu(root, 0, 'Odd; "na\\me" = 1*2+3')
    sysfs.ethernet(root / "sys", "eth0", speed=25000, hardware=True)
    sysfs.ethernet(root / "sys", "eth1", speed=100000, hardware=True)
    sysfs.ethernet(root / "sys", "eth2", speed=100000, hardware=True)
    sysfs.ethernet(root / "sys", "docker0", speed=400000)
    sysfs.ethernet(root / "sys", "lo", speed=800000, hardware=True)
    (root / "sys/class/net/bonding_masters").write_text("bond0\n")


def container(root: Path) -> None:
    gpu(root, 0)
    sysfs.ethernet(root / "sys", "eth0")
    sysfs.ethernet(root / "sys", "eth1")


def no_network(root: Path) -> None:
    gpu(root, 0)


@pytest.mark.parametrize(
    ("build", "wanted"),
    [
        (dgx, NODE),
        (two_models, "gpu=NVIDIA A10*1+NVIDIA L4*2;mig=0;nic=efa*1"),
        (mig, NODE.replace("mig=0", "mig=1")),
        (mig_off, NODE),
        (slow_and_dead_ports, f"gpu={H100}*1;mig=0;nic=roce*2"),
        (sockets, "gpu=Odd_ _na_me_ _ 1_2_3*1;mig=0;nic=socket*2"),
        (container, f"gpu={H100}*1;mig=0;nic=socket*2"),
        (no_network, f"gpu={H100}*1;mig=0;nic=none*0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_plugin_and_sweep_name_a_machine_alike(
    build: Build, wanted: str, probe: Path, tmp_path: Path
) -> None:
    build(tmp_path)
    assert node_facts(tmp_path / "sys", tmp_path / "proc")["node_fingerprint"] == wanted
    assert ask(probe, tmp_path) == (0, NOTHING | {"machine": wanted})
    check_fingerprint(f"{wanted};nccl=22809")


def test_gpu_without_a_usable_name_gives_no_fingerprint(probe: Path, tmp_path: Path) -> None:
    assert ask(probe, tmp_path)[1]["machine"] == "gpu=none*0;mig=0;nic=none*0"  # no driver
    for number, model in enumerate(("", "x" * 120)):
        root = tmp_path / str(number)
        dgx(root)
        gpu(root, 9, model)
        swept = node_facts(root / "sys", root / "proc")["node_fingerprint"]
        assert swept is None or model
        why = "a GPU or NIC of this machine cannot be read in /proc or /sys"
        problems = {"machine_problem": why, "key_problem": "there is no such file"}
        assert ask(probe, root, "/gone") == (4, NOTHING | problems)
