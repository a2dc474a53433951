"""What NICs count: which files, what a stretch of time adds to them, and who is named."""

import json
from pathlib import Path

import pytest

from dynamiccl.collect.health import lossy_ports
from dynamiccl.collect.nodes import (
    Health,
    NodeReadings,
    Window,
    parse_reading,
    worst_of,
)
from dynamiccl.collect.sampler import port_counters, read_counters
from tests.collect import sysfs
from tests.rows import default, frame


def counting(root: Path, device: str, folder: str, **counts: object) -> None:
    port = sysfs.infiniband(root, device, layer="Ethernet")
    sysfs.write(port / folder, **counts)


def read(root: Path) -> dict[str, tuple[int | None, int | None]]:
    return {
        port: (read_counters(retries), read_counters(congestion))
        for port, (retries, congestion) in port_counters(root).items()
    }


def test_each_driver_is_read_by_its_own_names(tmp_path: Path) -> None:
    counting(tmp_path, "mlx5_0", "hw_counters", out_of_sequence=3, np_cnp_sent=7, rp_cnp_handled=1)
    counting(tmp_path, "bnxt_re0", "hw_counters", to_retransmits=2, rx_ecn_marked_pkts=9)
    counting(tmp_path, "irdma0", "hw_counters", RTO=4, cnpHandled=5)
    sysfs.write(sysfs.infiniband(tmp_path, "ib0") / "counters", symbol_error=6)
    assert read(tmp_path) == {
        "bnxt_re0/1": (2, 9),
        "ib0/1": (6, None),
        "irdma0/1": (4, 5),
        "mlx5_0/1": (3, 8),
    }


def test_counters_with_spaces_in_their_names_are_read(tmp_path: Path) -> None:
    port = sysfs.infiniband(tmp_path, "irdma0")
    sysfs.write(port / "hw_counters", **{"Rcvd Out of order packets": 8})
    assert read(tmp_path) == {"irdma0/1": (8, None)}


def test_what_is_no_number_or_has_gone_is_not_known(tmp_path: Path) -> None:
    counting(tmp_path, "mlx5_0", "hw_counters", out_of_sequence="N/A (no PMA)", np_cnp_sent=1)
    [(retries, congestion)] = port_counters(tmp_path).values()
    assert (read_counters(retries), read_counters(congestion)) == (None, 1)
    congestion[0].unlink()
    assert read_counters(congestion) is None


def test_port_that_counts_nothing_is_none(tmp_path: Path) -> None:
    sysfs.infiniband(tmp_path, "mlx5_0")
    sysfs.efa(tmp_path, "rdmap16s27")
    assert port_counters(tmp_path) == {}


def node(*readings: tuple[float, int | None, int | None], host: str = "n1") -> NodeReadings:
    found = NodeReadings(host)
    for time_s, retries, congestion in readings:
        found.add(Window(time_s, time_s, (), (), (("mlx5_0/1", retries, congestion),)))
    return found


def test_a_stretch_has_what_was_counted_in_it() -> None:
    counted = node((0.0, 5, 100), (1.0, 5, 160), (2.0, 7, 160), (3.0, 7, 200))
    (port,) = counted.health(0.5, 1.5).ports
    assert port == ("n1 mlx5_0/1", 2, 60)
    (quiet,) = counted.health(2.2, 2.8).ports
    assert quiet[1:] == (0, 40)


def test_counter_that_began_anew_counts_what_it_shows() -> None:
    (port,) = node((0.0, 900, 0), (1.0, 4, 0)).health(0.2, 0.8).ports
    assert port[1] == 4


def test_port_of_which_nothing_is_known_is_null_in_the_row() -> None:
    assert node((0.0, None, 3)).health(5.0, 6.0).row_columns()["nic_retries"] is None
    columns = Health(throttled=None, ecc_errors=None).row_columns()
    assert (columns["nic_retries"], columns["nic_congestion"], columns["nic_worst"]) == (None,) * 3


def test_row_has_the_sum_of_all_ports_and_names_the_worst() -> None:
    ports = (("n1 a/1", 0, 90), ("n2 b/1", 3, 5), ("n2 c/1", 0, None))
    both = worst_of([Health(False, 0, ports[:1]), Health(False, 0, ports[1:])])
    columns = both.row_columns()
    assert (columns["nic_retries"], columns["nic_congestion"]) == (3, 95)
    assert columns["nic_worst"] == "n2 b/1"
    quiet = Health(False, 0, (("n1 a/1", 0, 0),)).row_columns()
    assert (quiet["nic_retries"], quiet["nic_worst"]) == (0, None)


def test_reading_without_counters_of_nics_is_none_of_ours() -> None:
    line = {"sampler": "n1:7", "time_s": 1.0, "slowed": [], "ecc_errors": []}
    assert parse_reading(json.dumps(line)) is None
    assert parse_reading(json.dumps({**line, "nics": [1]})) is None
    found = parse_reading(json.dumps({**line, "nics": {"mlx5_0/1": [1, None]}}))
    assert found is not None
    assert found[1].nics == (("mlx5_0/1", 1, None),)


@pytest.mark.parametrize(
    ("bad_rows", "all_rows", "is_named"), [(6, 20, True), (2, 20, False), (6, 6, True)]
)
def test_port_is_named_when_it_is_the_worst_again_and_again(
    bad_rows: int, all_rows: int, is_named: bool
) -> None:
    rows = [
        default(run=f"r{n}", nic_retries=int(n < bad_rows), nic_worst="n3 mlx5_1/1")
        for n in range(all_rows)
    ]
    assert [count for _, count, _ in lossy_ports(frame(*rows))] == [bad_rows] * is_named


def test_rows_of_older_data_name_nobody() -> None:
    assert lossy_ports(frame(default())) == []
