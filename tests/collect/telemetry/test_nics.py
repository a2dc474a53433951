from pathlib import Path

import pytest

from dynamiccl.collect.telemetry.collectors import Reading, Refused
from dynamiccl.collect.telemetry.nics import net_devices, nic_readings, rdma_ports
from tests.collect.telemetry import sysfs


def values(readings: tuple[Reading, ...]) -> dict[tuple[str, str], float]:
    return {(r.device, r.counters[0]): r.ask()[0] for r in readings}


def test_infiniband_counts_data_in_units_of_four_bytes(tmp_path: Path) -> None:
    sysfs.infiniband(tmp_path, "mlx5_0")
    fast, slow = nic_readings(tmp_path)
    assert values(fast) == {
        ("mlx5_0", "tx_bytes"): 4000.0,
        ("mlx5_0", "rx_bytes"): 2000.0,
        ("mlx5_0", "tx_wait_ticks"): 7.0,
    }
    assert values(slow) == {
        ("mlx5_0", "rx_errors"): 0.0,
        ("mlx5_0", "symbol_errors"): 0.0,
        ("mlx5_0", "link_downed"): 1.0,
    }


def test_efa_has_its_bytes_elsewhere(tmp_path: Path) -> None:
    sysfs.efa(tmp_path, "rdmap16s27")
    fast, slow = nic_readings(tmp_path)
    assert values(fast) == {("rdmap16s27", "tx_bytes"): 11.0, ("rdmap16s27", "rx_bytes"): 22.0}
    assert values(slow) == {("rdmap16s27", "rx_dropped"): 3.0}
    (port,) = rdma_ports(tmp_path)
    assert (port.kind, port.gbits_per_s, port.active) == ("efa", 100.0, True)


def test_a_counter_is_read_anew_each_time(tmp_path: Path) -> None:
    port = sysfs.infiniband(tmp_path, "mlx5_0")
    sent = nic_readings(tmp_path)[0][0]
    assert sent.ask() == (4000.0,)
    (port / "counters" / "port_xmit_data").write_text("1001\n")
    assert sent.ask() == (4004.0,)


@pytest.mark.parametrize("text", ["N/A (no PMA)", ""])
def test_a_counter_without_a_number_is_refused_for_good(tmp_path: Path, text: str) -> None:
    port = sysfs.infiniband(tmp_path, "mlx5_0")
    (port / "counters" / "port_xmit_data").write_text(text)
    with pytest.raises(Refused, match="port_xmit_data") as caught:
        nic_readings(tmp_path)[0][0].ask()
    assert caught.value.lasting


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
    fast, slow = nic_readings(tmp_path)
    assert values(fast) == {("eth0", "tx_bytes"): 10.0, ("eth0", "rx_bytes"): 20.0}
    assert values(slow)["eth0", "rx_dropped"] == 4.0


def test_a_node_without_nics_has_no_readings(tmp_path: Path) -> None:
    assert nic_readings(tmp_path) == ((), ())
