"""A fake /sys with the files that describe a node's NICs."""

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
    """A 400 Gbit/s port; returns its folder."""
    port = root / "class" / "infiniband" / device / "ports" / "1"
    write(port, state=state, link_layer=layer, rate="400 Gb/sec (4X NDR)")
    return port


def efa(root: Path, device: str) -> Path:
    """An EFA device: its driver says what it is, and nothing says its link layer."""
    port = root / "class" / "infiniband" / device / "ports" / "1"
    write(port, state="4: ACTIVE", rate="100 Gb/sec (4X EDR)")
    driver = root / "bus" / "pci" / "drivers" / "efa"
    driver.mkdir(parents=True, exist_ok=True)
    (port.parents[1] / "device").mkdir(parents=True)
    (port.parents[1] / "device" / "driver").symlink_to(driver)
    return port


def ethernet(root: Path, device: str, *, speed: int | None = None, hardware: bool = False) -> Path:
    """A network device."""
    folder = root / "class" / "net" / device
    folder.mkdir(parents=True)
    if speed is not None:
        write(folder, speed=speed)
    if hardware:
        (folder / "device").mkdir()
    return folder
