"""A made-up /sys with the files that NIC readings come from."""

from pathlib import Path


def write(root: Path, **files: object) -> None:
    """Write files whose paths have '__' in place of '/'."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="ascii")


def infiniband(
    root: Path, device: str, *, state: str = "4: ACTIVE", layer: str = "InfiniBand"
) -> Path:
    """A 400 Gbit/s port with counters; returns its folder."""
    port = root / "class" / "infiniband" / device / "ports" / "1"
    write(port, state=state, link_layer=layer, rate="400 Gb/sec (4X NDR)")
    write(port / "counters", port_xmit_data=1000, port_rcv_data=500, port_xmit_wait=7)
    write(port / "counters", port_rcv_errors=0, link_downed=1, symbol_error=0)
    return port


def efa(root: Path, device: str) -> Path:
    """An EFA device: its bytes are in hw_counters, and nothing says its link layer."""
    port = root / "class" / "infiniband" / device / "ports" / "1"
    write(port, state="4: ACTIVE", rate="100 Gb/sec (4X EDR)")
    write(port / "hw_counters", tx_bytes=11, rx_bytes=22, rx_drops=3)
    driver = root / "bus" / "pci" / "drivers" / "efa"
    driver.mkdir(parents=True, exist_ok=True)
    (port.parents[1] / "device").mkdir(parents=True)
    (port.parents[1] / "device" / "driver").symlink_to(driver)
    return port


def ethernet(root: Path, device: str, *, speed: int | None = None, hardware: bool = False) -> Path:
    """A network device."""
    folder = root / "class" / "net" / device
    write(folder / "statistics", tx_bytes=10, rx_bytes=20, tx_errors=0, rx_errors=0)
    write(folder / "statistics", tx_dropped=0, rx_dropped=4)
    if speed is not None:
        write(folder, speed=speed)
    if hardware:
        (folder / "device").mkdir()
    return folder
