"""Counters of a node's NIC ports: retries (packets lost or resent), and congestion.

    /sys/class/infiniband/DEVICE/ports/N/hw_counters/NAME      the driver's own names, below
    /sys/class/infiniband/DEVICE/ports/N/counters/NAME         the port's, InfiniBand and RoCE

(Linux, Documentation/ABI/stable/sysfs-class-infiniband). Names differ from driver to driver; those
of a driver that is not here count nothing. One lost packet may be counted at both ends and under
several names, so a sum says whether, and not how many.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamiccl.collect.telemetry.nics import SYSFS

#: Lost, out of order, sent again, or broken on the way. Kernel 6.12, drivers/infiniband/hw.
RETRIES: Final = (
    # mlx5/counters.c; rx_icrc_encapsulated: a checksum that was wrong.
    *("out_of_sequence", "packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err"),
    *("rnr_nak_retry_err", "roce_adp_retrans", "roce_adp_retrans_to", "rx_icrc_encapsulated"),
    # bnxt_re/hw_counters.c
    *("to_retransmits", "seq_err_naks_rcvd", "rnr_naks_rcvd", "missing_resp", "oos_drop_count"),
    # irdma/verbs.c, and its names before and after 6.16
    *("tcpRetransSegs", "RetransSegs", "Nak Sequence Error", "Nak Sequence Error Implied"),
    *("RTO", "Rcvd Out of order packets", "CRC errors", "RNR received"),
    # efa/efa_verbs.c
    *("retrans_pkts", "retrans_timeout_events"),
)
#: Marked by a switch for congestion, told to the sender, heeded by it.
CONGESTION: Final = (
    *("np_ecn_marked_roce_packets", "np_cnp_sent", "rp_cnp_handled"),
    *("rx_ecn_marked_pkts", "tx_cnp_pkts", "rx_cnp_pkts"),
    *("RxECNMrkd", "cnpSent", "cnpHandled"),
)
#: Of the port itself (drivers/infiniband/core/sysfs.c): bits that fell over, links that did.
PORT_ERRORS: Final = (
    *("symbol_error", "link_error_recovery", "link_downed"),
    *("local_link_integrity_errors", "port_rcv_errors"),
)


@dataclass(frozen=True, slots=True)
class PortCounters:
    """The counter files of one port."""

    #: DEVICE/PORT.
    name: str
    retries: tuple[Path, ...]
    congestion: tuple[Path, ...]

    def read(self) -> tuple[int | None, int | None]:
        """(retries, congestion) since the driver loaded; None where no counter exists."""
        return _sum(self.retries), _sum(self.congestion)


def port_counters(root: Path = SYSFS) -> tuple[PortCounters, ...]:
    """The ports that have counters, sorted by name."""
    found = []
    for folder in sorted((root / "class" / "infiniband").glob("*/ports/*")):
        retries = _there(folder / "hw_counters", RETRIES) + _there(folder / "counters", PORT_ERRORS)
        congestion = _there(folder / "hw_counters", CONGESTION)
        if retries or congestion:
            name = f"{folder.parents[1].name}/{folder.name}"
            found.append(PortCounters(name, retries, congestion))
    return tuple(found)


def _there(folder: Path, names: Sequence[str]) -> tuple[Path, ...]:
    return tuple(path for name in names if (path := folder / name).is_file())


def _sum(paths: Sequence[Path]) -> int | None:
    counts = [count for path in paths if (count := _count(path)) is not None]
    return sum(counts) if counts else None


def _count(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        # The device has just gone, or says "N/A (no PMA)".
        return None
