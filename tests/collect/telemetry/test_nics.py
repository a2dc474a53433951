from pathlib import Path

from dynamiccl.collect.telemetry.nics import net_devices, rdma_ports
from tests.collect.telemetry import sysfs


def test_efa_is_known_by_its_driver(tmp_path: Path) -> None:
    sysfs.efa(tmp_path, "rdmap16s27")
    (port,) = rdma_ports(tmp_path)
    assert (port.kind, port.gbits_per_s, port.active) == ("efa", 100.0, True)


def test_a_port_that_is_down_and_a_roce_port_are_told_apart(tmp_path: Path) -> None:
    sysfs.infiniband(tmp_path, "mlx5_0", state="1: DOWN")
    sysfs.infiniband(tmp_path, "mlx5_1", layer="Ethernet")
    down, roce = rdma_ports(tmp_path)
    assert (down.kind, down.state, down.active) == ("infiniband", "DOWN", False)
    assert (roce.kind, roce.state, roce.active) == ("roce", "ACTIVE", True)


def test_virtual_devices_count_only_where_no_real_one_is(tmp_path: Path) -> None:
    for name in ("lo", "veth0"):
        sysfs.ethernet(tmp_path, name)
    assert [p.name for p in net_devices(tmp_path)] == ["veth0"]
    sysfs.ethernet(tmp_path, "eth0", hardware=True)
    assert [p.name for p in net_devices(tmp_path)] == ["eth0"]


def test_a_node_without_nics_has_none(tmp_path: Path) -> None:
    assert (rdma_ports(tmp_path), net_devices(tmp_path)) == ((), ())
