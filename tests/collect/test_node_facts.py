import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect.node_facts import node_argv, node_facts, parse_facts, row_columns
from dynamiccl.datasets.schema import MEASUREMENTS
from dynamiccl.errors import CorruptFile
from tests.collect import sysfs
from tests.fakes.nvml.build import fake_nvml_env


def ask(folder: Path, **settings: object) -> dict[str, Any]:
    done = subprocess.run(
        node_argv(), env=fake_nvml_env(folder, **settings), capture_output=True, check=True
    )
    return parse_facts(done.stdout.decode())


def test_nvml_says_what_the_gpus_are(fake_nvml: Path) -> None:
    facts = ask(fake_nvml, gpus=8)
    assert facts["nvml_error"] is None
    assert (facts["num_gpus"], facts["gpu"]) == (8, "FAKE H100")
    assert facts["driver_version"] == "999.10.fake"
    assert facts["compute_capability"] == 9.0
    assert (facts["nvlink_generation"], facts["nvlinks_per_gpu"], facts["nvswitch"]) == (
        4,
        18,
        True,
    )
    assert facts["mig"] is False


def test_a_gpu_in_mig_mode_shows(fake_nvml: Path) -> None:
    assert ask(fake_nvml, mig=1)["mig"] is True


def test_what_is_denied_is_not_known_and_what_is_not_supported_is_not_there(
    fake_nvml: Path,
) -> None:
    facts = ask(fake_nvml, deny="nvmlDeviceGetMigMode=4,nvmlDeviceGetName=4")
    assert (facts["mig"], facts["gpu"]) == (None, None)
    facts = ask(fake_nvml, deny="nvmlDeviceGetMigMode=3,nvmlDeviceGetNvLinkState=3")
    assert facts["mig"] is False
    assert (facts["nvlink_generation"], facts["nvlinks_per_gpu"], facts["nvswitch"]) == (
        0,
        0,
        False,
    )


def test_without_the_right_to_ask_the_kernel_is_asked(fake_nvml: Path) -> None:
    facts = ask(fake_nvml, deny="nvmlInitWithFlags=4")
    assert facts["nvml_error"] is not None
    assert "Insufficient Permissions" in facts["nvml_error"]
    assert facts["gpu"] is None


def test_facts_fill_only_columns_that_a_measurement_has(fake_nvml: Path) -> None:
    columns = row_columns(ask(fake_nvml))
    assert columns.keys() <= set(MEASUREMENTS.names)
    assert columns["gpu"] == "FAKE H100"
    assert columns["nvlinks_per_gpu"] == 18
    assert None not in columns.values()


PROC_VERSION = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)
"""


def test_without_nvml_the_kernel_still_says_a_little(tmp_path: Path) -> None:
    """In a process whose NVML cannot be loaded, as on a machine without a driver."""
    proc, sys_folder = tmp_path / "proc", tmp_path / "sys"
    (proc / "driver" / "nvidia" / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (proc / "driver" / "nvidia" / "version").write_text(PROC_VERSION)
    (proc / "cpuinfo").write_text("processor\t: 0\nvendor_id\t: GenuineIntel\n")
    sysfs.infiniband(sys_folder, "mlx5_0")
    sysfs.infiniband(sys_folder, "mlx5_1")
    sysfs.infiniband(sys_folder, "mlx5_2", state="1: DOWN")
    code = (
        "import sys; sys.modules['pynvml'] = None; from pathlib import Path; "
        "import json; from dynamiccl.collect.node_facts import node_facts; "
        f"print(json.dumps(node_facts(Path({str(sys_folder)!r}), Path({str(proc)!r}))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    facts = parse_facts(done.stdout.decode())
    assert facts["nvml_error"] == "no package nvidia-ml-py; pip install 'dynamiccl[telemetry]'"
    assert (facts["num_gpus"], facts["driver_version"]) == (1, "580.65.06")
    assert facts["cpu_vendor"] == "intel"
    assert (facts["nic_kind"], facts["nic_gbits_per_s"], facts["nics_per_node"]) == (
        "infiniband",
        400.0,
        2,
    )
    assert (facts["mig"], facts["compute_capability"]) == (None, None)


@pytest.mark.parametrize(
    ("cpuinfo", "vendor"),
    [
        ("vendor_id\t: AuthenticAMD\n", "amd"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", "arm"),
        ("vendor_id\t: CentaurHauls\n", None),
        ("", None),
    ],
)
def test_cpu_vendors(tmp_path: Path, cpuinfo: str, vendor: str | None) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert node_facts(tmp_path / "sys", tmp_path)["cpu_vendor"] == vendor


def test_sockets_are_the_nics_of_a_node_without_rdma(tmp_path: Path) -> None:
    sysfs.ethernet(tmp_path, "eth0", speed=25000, hardware=True)
    sysfs.ethernet(tmp_path, "eth1", speed=100000, hardware=True)
    sysfs.ethernet(tmp_path, "eth2", speed=-1, hardware=True)
    facts = node_facts(tmp_path, tmp_path)
    assert (facts["nic_kind"], facts["nic_gbits_per_s"], facts["nics_per_node"]) == (
        "socket",
        100.0,
        1,
    )
    none = node_facts(tmp_path / "empty", tmp_path)
    assert (none["nic_kind"], none["nics_per_node"]) == (None, None)


@pytest.mark.parametrize("line", ["", "no json", "[]", json.dumps({"host": "n1"})])
def test_what_is_no_facts_is_refused(line: str) -> None:
    with pytest.raises(CorruptFile, match="no facts about a node"):
        parse_facts(line)


def gpu(proc: Path, number: int, model: str, *lines: str) -> None:
    folder = proc / "driver" / "nvidia" / "gpus" / f"0000:{number:02x}:00.0"
    folder.mkdir(parents=True)
    text = "\n".join((f"Model: \t\t {model}", "IRQ:   \t\t 42", *lines))
    (folder / "information").write_text(f"{text}\n")


def test_fingerprint_says_what_the_kernel_shows(tmp_path: Path) -> None:
    for number in range(4):
        gpu(tmp_path, number, "NVIDIA H100 80GB HBM3", "GPU Excluded:\t No")
    gpu(tmp_path, 4, "NVIDIA H100 80GB HBM3", "GPU Excluded:\t Yes")
    for name in ("mlx5_0", "mlx5_1"):
        sysfs.infiniband(tmp_path, name)
    sysfs.infiniband(tmp_path, "mlx5_2", state="1: DOWN")
    wanted = "gpu=NVIDIA H100 80GB HBM3*4;mig=0;nic=infiniband*2"
    facts = node_facts(tmp_path, tmp_path)
    assert facts["node_fingerprint"] == row_columns(facts)["node_fingerprint"] == wanted
    (tmp_path / "driver/nvidia/capabilities/gpu2/mig/gi3").mkdir(parents=True)
    gpu(tmp_path, 5, "A; model+of=*odd")
    parted = "gpu=A_ model_of__odd*1+NVIDIA H100 80GB HBM3*4;mig=1;nic=infiniband*2"
    assert node_facts(tmp_path, tmp_path)["node_fingerprint"] == parted


def test_node_whose_gpus_are_not_all_named_has_no_fingerprint(tmp_path: Path) -> None:
    assert node_facts(tmp_path, tmp_path)["node_fingerprint"] is None
    gpu(tmp_path, 0, "NVIDIA H100 80GB HBM3")
    gpu(tmp_path, 1, "")
    assert node_facts(tmp_path, tmp_path)["node_fingerprint"] is None


def active_nics(root: Path) -> tuple[Any, ...]:
    facts = node_facts(root, root)
    return facts["nic_kind"], facts["nic_gbits_per_s"], facts["nics_per_node"]


def test_efa_is_known_by_its_driver(tmp_path: Path) -> None:
    sysfs.efa(tmp_path, "rdmap16s27")
    assert active_nics(tmp_path) == ("efa", 100.0, 1)


def test_a_port_that_is_down_and_a_roce_port_are_told_apart(tmp_path: Path) -> None:
    sysfs.infiniband(tmp_path, "mlx5_0", state="1: DOWN")
    assert active_nics(tmp_path) == (None, None, None)
    sysfs.infiniband(tmp_path, "mlx5_1", layer="Ethernet")
    assert active_nics(tmp_path) == ("roce", 400.0, 1)


def test_virtual_devices_count_only_where_no_real_one_is(tmp_path: Path) -> None:
    for name in ("lo", "veth0", "veth1"):
        sysfs.ethernet(tmp_path, name)
    assert active_nics(tmp_path) == ("socket", None, 2)
    sysfs.ethernet(tmp_path, "eth0", hardware=True)
    assert active_nics(tmp_path) == ("socket", None, 1)
