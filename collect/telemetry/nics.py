"""The NICs of a node, by sysfs: InfiniBand, RoCE, EFA and Ethernet.

Where: /sys/class/infiniband/DEVICE/ports/N (Linux Documentation/ABI/stable/sysfs-class-infiniband)
and /sys/class/net/DEVICE (Documentation/ABI/testing/sysfs-class-net).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys")


@dataclass(frozen=True, slots=True)
class Port:
    """One port of an RDMA device: its kind, rate and link state."""

    #: infiniband, roce or efa.
    kind: str
    state: str
    gbits_per_s: float | None

    @property
    def active(self) -> bool:
        """Whether the link is up."""
        return self.state == "ACTIVE"


def rdma_ports(root: Path = SYSFS) -> tuple[Port, ...]:
    """The ports of all RDMA devices, sorted by name."""
    folders = sorted((root / "class" / "infiniband").glob("*/ports/*"))
    return tuple(_port(folder) for folder in folders)


def _port(folder: Path) -> Port:
    device = folder.parents[1]
    driver = device / "device" / "driver"
    layer = _word(folder / "link_layer").lower()
    if driver.exists() and driver.resolve().name == "efa":
        kind = "efa"
    else:
        kind = "roce" if layer == "ethernet" else "infiniband"
    state = _word(folder / "state").rpartition(":")[2].strip()
    rate = _word(folder / "rate").partition(" ")[0]
    return Port(
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


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        # The attribute is not there (EFA has no link_layer) or its device has just gone.
        return ""
