"""NICs from sysfs: byte and error counters of InfiniBand, RoCE, EFA and Ethernet ports.

Where: /sys/class/infiniband/DEVICE/ports/N/counters (Linux Documentation/ABI/stable/
sysfs-class-infiniband), .../hw_counters (EFA has its bytes there) and
/sys/class/net/DEVICE/statistics (Documentation/ABI/testing/sysfs-class-net-statistics).
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamiccl.collect.telemetry.collectors import Reading, Refused

SYSFS: Final = Path("/sys")

#: File -> (counter, factor). InfiniBand counts data in units of four bytes.
_IB_FAST: Final[Mapping[str, tuple[str, int]]] = {
    "port_xmit_data": ("tx_bytes", 4),
    "port_rcv_data": ("rx_bytes", 4),
    "port_xmit_wait": ("tx_wait_ticks", 1),
}
_IB_SLOW: Final[Mapping[str, tuple[str, int]]] = {
    "port_xmit_discards": ("tx_dropped", 1),
    "port_rcv_errors": ("rx_errors", 1),
    "symbol_error": ("symbol_errors", 1),
    "link_downed": ("link_downed", 1),
}
_EFA_FAST: Final = {"tx_bytes": ("tx_bytes", 1), "rx_bytes": ("rx_bytes", 1)}
_EFA_SLOW: Final = {"rx_drops": ("rx_dropped", 1)}
_NET_FAST: Final = {"tx_bytes": ("tx_bytes", 1), "rx_bytes": ("rx_bytes", 1)}
_NET_SLOW: Final = {
    name: (name, 1) for name in ("tx_errors", "rx_errors", "tx_dropped", "rx_dropped")
}


@dataclass(frozen=True, slots=True)
class Port:
    """One port of an RDMA device: what it is and whether its link is up."""

    #: mlx5_0, or mlx5_0:2 for a port other than the first.
    device: str
    folder: Path
    #: infiniband, roce or efa.
    kind: str
    state: str
    gbits_per_s: float | None

    @property
    def active(self) -> bool:
        """Whether data can flow."""
        return self.state == "ACTIVE"


def rdma_ports(root: Path = SYSFS) -> tuple[Port, ...]:
    """The ports of all RDMA devices, sorted by name."""
    folders = sorted((root / "class" / "infiniband").glob("*/ports/*"))
    return tuple(_port(folder) for folder in folders)


def _port(folder: Path) -> Port:
    device, number = folder.parents[1], folder.name
    driver = device / "device" / "driver"
    layer = _word(folder / "link_layer").lower()
    if driver.exists() and driver.resolve().name == "efa":
        kind = "efa"
    else:
        kind = "roce" if layer == "ethernet" else "infiniband"
    state = _word(folder / "state").rpartition(":")[2].strip()
    rate = _word(folder / "rate").partition(" ")[0]
    return Port(
        device=device.name if number == "1" else f"{device.name}:{number}",
        folder=folder,
        kind=kind,
        state=state or "unknown",
        gbits_per_s=float(rate) if rate.replace(".", "", 1).isdecimal() else None,
    )


def net_devices(root: Path = SYSFS) -> tuple[Path, ...]:
    """Network devices that may carry data: those with hardware, or, where none has, all but lo.

    A node of a container platform has hundreds of virtual ones, which say nothing.
    """
    found = sorted(p for p in (root / "class" / "net").glob("*") if p.name != "lo" and p.is_dir())
    return tuple(p for p in found if (p / "device").exists()) or tuple(found)


def nic_readings(root: Path = SYSFS) -> tuple[tuple[Reading, ...], tuple[Reading, ...]]:
    """What is read every tick and every second."""
    fast: list[Reading] = []
    slow: list[Reading] = []
    for port in rdma_ports(root):
        efa = port.kind == "efa"
        folder = port.folder / ("hw_counters" if efa else "counters")
        fast += _readings(port.device, folder, _EFA_FAST if efa else _IB_FAST)
        slow += _readings(port.device, folder, _EFA_SLOW if efa else _IB_SLOW)
    for device in net_devices(root):
        fast += _readings(device.name, device / "statistics", _NET_FAST)
        slow += _readings(device.name, device / "statistics", _NET_SLOW)
    return tuple(fast), tuple(slow)


def _readings(device: str, folder: Path, files: Mapping[str, tuple[str, int]]) -> Iterator[Reading]:
    for name, (counter, factor) in files.items():
        if (folder / name).exists():
            yield Reading(device, (counter,), _NumberFile(folder / name, factor))


class _NumberFile:
    """A sysfs file with one number, kept open: the kernel writes it anew for each read from 0."""

    def __init__(self, path: Path, factor: int) -> None:
        self._path = path
        self._factor = factor
        self._file: int | None = None

    def __call__(self) -> tuple[float, ...]:
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            return (float(self._factor * int(os.pread(self._file, 64, 0))),)
        except (OSError, ValueError) as error:
            # Gone, or there but not answered for (EINVAL, "N/A (no PMA)"): it will not come back.
            raise Refused(f"{self._path}: {error}", lasting=True) from error

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        # The attribute is not there (EFA has no link_layer) or its device has just gone.
        return ""
