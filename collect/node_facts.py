"""Hardware facts of a node (GPUs, links, driver, CPU, NICs), from NVML, else from the kernel.

    python -m dynamiccl.collect.node_facts

prints the facts as one JSON line, so that a launcher can ask every node. They are named as the
columns of a measurement that they fill; null = unknown.

NICs (InfiniBand, RoCE, EFA and Ethernet) are read from /sys/class/infiniband/DEVICE/ports/N (Linux
Documentation/ABI/stable/sysfs-class-infiniband) and /sys/class/net/DEVICE
(Documentation/ABI/testing/sysfs-class-net).
"""

import argparse
import json
import platform
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from dynamiccl import cli
from dynamiccl.collect.sampler import SYSFS, Nvml, Refused
from dynamiccl.errors import CorruptFile
from dynamiccl.fingerprint import node_part

PROC: Final = Path("/proc")
#: nvmlNvLinkVersion (nvml.h, NVML_NVLINK_VERSION_*) -> generation.
_NVLINK_GENERATION: Final[Mapping[int, int]] = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
#: NVML_NVLINK_DEVICE_TYPE_SWITCH.
_SWITCH: Final = 2
#: NVML_NVLINK_MAX_LINKS was 18 until NVLink 5; a driver refuses a link that it does not have.
_MAX_LINKS: Final = 36
#: `vendor_id` of /proc/cpuinfo; ARM has "CPU implementer" instead.
_CPU_VENDORS: Final[Mapping[str, str]] = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}


#: Facts that are no column of a measurement.
_OTHER: Final = ("host", "nvml_error", "num_gpus")
#: What NVML alone knows.
_GPU_FACTS: Final = (
    "gpu",
    "compute_capability",
    "nvlink_generation",
    "nvlinks_per_gpu",
    "nvswitch",
    "mig",
)
#: What NVML is not needed for.
_KERNEL_FACTS: Final = (
    *("driver_version", "cpu_vendor", "node_fingerprint"),
    *("nic_kind", "nic_gbits_per_s", "nics_per_node"),
)


def node_argv() -> list[str]:
    """Argument vector that prints a node's facts as one line of JSON."""
    return [sys.executable, "-m", "dynamiccl.collect.node_facts"]


def parse_facts(line: str) -> dict[str, Any]:
    """The facts in a line that the program wrote; raises CorruptFile for anything else."""
    try:
        facts: dict[str, Any] = json.loads(line)
        is_whole = facts.keys() == {*_OTHER, *_GPU_FACTS, *_KERNEL_FACTS}
    except (ValueError, AttributeError):
        is_whole = False
    if not is_whole:
        raise CorruptFile(f"no facts about a node, but: {line.strip()[:200]}")
    return facts


def row_columns(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The environment columns of a measurement that facts fill; unknown ones are absent.

    `cuda_version` is not among them: a driver runs programs built with other CUDA versions.
    """
    return {name: fact for name, fact in facts.items() if fact is not None and name not in _OTHER}


def node_facts(sysfs: Path = SYSFS, proc: Path = PROC) -> dict[str, Any]:
    """The facts of this node; what cannot be read is unknown, and no error.

    `nvml_error` says why NVML gave nothing, `nvlink_generation` 0 = no NVLink, `nic_kind`
    (infiniband, roce, efa, socket) what the fastest active NICs are, `node_fingerprint` the node as
    the plugin names it (dynamiccl/fingerprint.py), null where not all of it is known.
    """
    gpus: dict[str, Any] = {}
    nvml_error = None
    try:
        nvml = Nvml()
        gpus = _gpu_facts(nvml)
        nvml.close()
    except Refused as error:
        nvml_error = str(error)
    gpus.setdefault("num_gpus", _gpus_of_the_kernel(proc))
    gpus.setdefault("driver_version", _driver_of_the_kernel(proc))
    nics = _nic_facts(sysfs)
    return {
        "host": platform.node(),
        "nvml_error": nvml_error,
        **dict.fromkeys(_GPU_FACTS),
        **gpus,
        "cpu_vendor": _cpu_vendor(proc),
        "node_fingerprint": _fingerprint(proc, nics),
        **nics,
    }


def _gpu_facts(nvml: Nvml) -> dict[str, Any]:
    handles = [nvml.handle(index) for index in range(nvml.num_gpus)]
    facts: dict[str, Any] = {"num_gpus": nvml.num_gpus}
    facts["driver_version"] = _maybe(lambda: nvml.ask("nvmlSystemGetDriverVersion"))
    names = {_maybe(partial(nvml.ask, "nvmlDeviceGetName", handle)) for handle in handles}
    # One that the driver does not name is taken to be like the others.
    known = [name for name in names if name]
    facts["gpu"] = known[0] if len(known) == 1 else None
    if not handles:
        return facts
    first = handles[0]
    capability = _maybe(lambda: nvml.ask("nvmlDeviceGetCudaComputeCapability", first))
    facts["compute_capability"] = capability and float(f"{capability[0]}.{capability[1]}")
    facts["mig"] = _mig(nvml, handles)
    return facts | _link_facts(nvml, first)


def _mig(nvml: Nvml, handles: Sequence[Any]) -> bool | None:
    modes = []
    for handle in handles:
        try:
            modes.append(nvml.ask("nvmlDeviceGetMigMode", handle)[0])
        except Refused as error:
            # A GPU that knows no MIG says "Not Supported"; anything else is not an answer.
            modes.append(0 if "Not Supported" in str(error) else None)
    return True if any(modes) else None if None in modes else False


def _link_facts(nvml: Nvml, handle: Any) -> dict[str, Any]:
    """NVLink facts of GPU 0, which stands for all."""
    active = []
    for link in range(_MAX_LINKS):
        try:
            if nvml.ask("nvmlDeviceGetNvLinkState", handle, link):
                active.append(link)
        except Refused:
            # The driver's way to say that there are no more links, or none at all.
            break
    if not active:
        return {"nvlink_generation": 0, "nvlinks_per_gpu": 0, "nvswitch": False}
    version = _maybe(lambda: nvml.ask("nvmlDeviceGetNvLinkVersion", handle, active[0]))
    remote = _maybe(lambda: nvml.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, active[0]))
    return {
        "nvlink_generation": _NVLINK_GENERATION.get(version) if version is not None else None,
        "nvlinks_per_gpu": len(active),
        "nvswitch": None if remote is None else remote == _SWITCH,
    }


def _maybe(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Refused:
        return None


def _fingerprint(proc: Path, nics: Mapping[str, Any]) -> str | None:
    """The node's fingerprint, as `serve/plugin/identity/fingerprint.cpp` computes it."""
    models = _models_of_the_kernel(proc)
    if not models:
        return None
    instances = (proc / "driver" / "nvidia" / "capabilities").glob("gpu*/mig/gi*")
    return node_part(
        models,
        mig=any(instances),
        nic_kind=nics["nic_kind"],
        num_nics=nics["nics_per_node"] or 0,
    )


def _models_of_the_kernel(proc: Path) -> list[str]:
    """The model of every visible GPU, by /proc/driver; empty unless all are listed."""
    models = []
    for path in (proc / "driver" / "nvidia" / "gpus").glob("*/information"):
        try:
            text = path.read_text(encoding="latin-1")  # byte by byte, as the plugin does
        except OSError:
            return []
        fields = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
        if fields.get("GPU Excluded") == "Yes":
            continue
        if not fields.get("Model"):
            return []
        models.append(fields["Model"])
    return models


def _gpus_of_the_kernel(proc: Path) -> int | None:
    folder = proc / "driver" / "nvidia" / "gpus"
    return len(list(folder.iterdir())) if folder.is_dir() else None


def _driver_of_the_kernel(proc: Path) -> str | None:
    try:
        text = (proc / "driver" / "nvidia" / "version").read_text(encoding="utf-8")
    except OSError:
        return None  # no NVIDIA driver is loaded
    # The first line ends like "NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release".
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found.group(1) if found else None


def _cpu_vendor(proc: Path) -> str | None:
    try:
        text = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    if re.search(r"^CPU implementer", text, re.MULTILINE):
        return "arm"
    found = re.search(r"^vendor_id\s*:\s*(\S+)", text, re.MULTILINE)
    return _CPU_VENDORS.get(found.group(1)) if found else None


def _nic_facts(sysfs: Path) -> dict[str, Any]:
    """Facts of the fastest active RDMA ports, which NCCL would use, else of the fastest socket."""
    ports = sorted((sysfs / "class" / "infiniband").glob("*/ports/*"))
    found = Counter(_rdma_nic(port) for port in ports if _is_active(port))
    if not found:
        found = Counter(_socket(device) for device in _net_devices(sysfs))
    (rate, kind), count = max(found.items(), default=((0.0, None), None))
    return {"nic_kind": kind, "nic_gbits_per_s": rate or None, "nics_per_node": count}


def _is_active(port: Path) -> bool:
    return _word(port / "state").rpartition(":")[2].strip() == "ACTIVE"


def _rdma_nic(port: Path) -> tuple[float, str]:
    """Rate in Gbit/s (0 = unknown) and kind of a port of an RDMA device."""
    driver = port.parents[1] / "device" / "driver"
    rate = _word(port / "rate").partition(" ")[0]
    if driver.exists() and driver.resolve().name == "efa":
        kind = "efa"
    else:
        kind = "roce" if _word(port / "link_layer").lower() == "ethernet" else "infiniband"
    return float(rate) if rate.replace(".", "", 1).isdecimal() else 0.0, kind


def _net_devices(root: Path) -> list[Path]:
    """Network devices that may carry data: those with hardware, or, where none has, all but lo.

    A node of a container platform has hundreds of virtual ones, which say nothing.
    """
    found = sorted(p for p in (root / "class" / "net").glob("*") if p.name != "lo" and p.is_dir())
    return [p for p in found if (p / "device").exists()] or found


def _socket(device: Path) -> tuple[float, str]:
    try:
        megabits = int((device / "speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        megabits = 0  # a virtual device has no speed (EINVAL)
    return max(megabits, 0) / 1000.0, "socket"


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        # The attribute is not there (EFA has no link_layer) or its device has just gone.
        return ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print this node's facts as a line of JSON."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args(arguments)
    sys.stdout.write(json.dumps(node_facts()) + "\n")


if __name__ == "__main__":
    cli.run(main)
