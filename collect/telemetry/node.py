"""Hardware facts of a node (GPUs, links, driver, CPU, NICs), from NVML, else from the kernel.

    python -m dynamiccl.collect.telemetry.node

prints the facts as one JSON line, so that a launcher can ask every node.
"""

import argparse
import json
import platform
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from dynamiccl import cli
from dynamiccl.collect.telemetry.nics import SYSFS, net_devices, rdma_ports
from dynamiccl.collect.telemetry.nvml import Nvml, Refused
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts of a node; None = unknown."""

    host: str
    #: Why NVML gave nothing; None when it answered.
    nvml_error: str | None
    num_gpus: int | None
    #: Names of the GPUs, each once.
    gpu_names: tuple[str, ...]
    driver_version: str | None
    compute_capability: float | None
    #: 0 = no NVLink.
    nvlink_generation: int | None
    nvlinks_per_gpu: int | None
    nvswitch: bool | None
    mig: bool | None
    cpu_vendor: str | None
    #: infiniband, roce, efa or socket: what the fastest active NICs are.
    nic_kind: str | None
    nic_gbits_per_s: float | None
    nics_per_node: int | None
    #: The node as the plugin names it (dynamiccl/fingerprint.py); None = not all of it is known.
    fingerprint: str | None

    def row_columns(self) -> dict[str, Any]:
        """The environment columns of a measurement that these facts fill; unknown ones are absent.

        `cuda_version` is not among them: a driver runs programs built with other CUDA versions.
        """
        columns = {
            "gpu": self.gpu_names[0] if len(self.gpu_names) == 1 else None,
            "driver_version": self.driver_version,
            "compute_capability": self.compute_capability,
            "nvlink_generation": self.nvlink_generation,
            "nvlinks_per_gpu": self.nvlinks_per_gpu,
            "nvswitch": self.nvswitch,
            "nic_kind": self.nic_kind,
            "nic_gbits_per_s": self.nic_gbits_per_s,
            "nics_per_node": self.nics_per_node,
            "cpu_vendor": self.cpu_vendor,
            "mig": self.mig,
            "node_fingerprint": self.fingerprint,
        }
        return {name: value for name, value in columns.items() if value is not None}

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "NodeFacts":
        """The facts that `to_json` wrote; raises CorruptFile for anything else."""
        try:
            fields = json.loads(line)
            return cls(**{**fields, "gpu_names": tuple(fields["gpu_names"])})
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptFile(f"no facts about a node, but: {line.strip()[:200]}") from error


def node_argv() -> list[str]:
    """Argument vector that prints a node's facts as one line of JSON."""
    return [sys.executable, "-m", "dynamiccl.collect.telemetry.node"]


def node_facts(sysfs: Path = SYSFS, proc: Path = PROC) -> NodeFacts:
    """The facts of this node; what cannot be read is unknown, and no error."""
    gpus: dict[str, Any] = {}
    try:
        nvml = Nvml()
        gpus = _gpu_facts(nvml)
        nvml.close()
        nvml_error = None
    except Refused as error:
        nvml_error = str(error)
    gpus.setdefault("num_gpus", _gpus_of_the_kernel(proc))
    gpus.setdefault("driver_version", _driver_of_the_kernel(proc))
    nics = _nic_facts(sysfs)
    return NodeFacts(
        **{**dict.fromkeys(_GPU_FIELDS), "gpu_names": (), **gpus},
        host=platform.node(),
        nvml_error=nvml_error,
        cpu_vendor=_cpu_vendor(proc),
        fingerprint=_fingerprint(proc, nics),
        **nics,
    )


_GPU_FIELDS: Final = (
    "num_gpus",
    "driver_version",
    "compute_capability",
    "nvlink_generation",
    "nvlinks_per_gpu",
    "nvswitch",
    "mig",
)


def _gpu_facts(nvml: Nvml) -> dict[str, Any]:
    handles = [nvml.handle(index) for index in range(nvml.num_gpus)]
    facts: dict[str, Any] = {"num_gpus": nvml.num_gpus}
    facts["driver_version"] = _maybe(lambda: nvml.ask("nvmlSystemGetDriverVersion"))
    names = _each(nvml, handles, "nvmlDeviceGetName")
    facts["gpu_names"] = tuple(dict.fromkeys(name for name in names if name))
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


def _each(nvml: Nvml, handles: Sequence[Any], function: str) -> list[Any]:
    """The answer of every GPU, in a list."""
    return [_maybe(partial(nvml.ask, function, handle)) for handle in handles]


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
    active = [port for port in rdma_ports(sysfs) if port.active]
    if active:
        kinds = Counter((port.gbits_per_s or 0.0, port.kind) for port in active)
        (rate, kind), count = max(kinds.items())
        return {"nic_kind": kind, "nic_gbits_per_s": rate or None, "nics_per_node": count}
    speeds = Counter(_gbits_per_s(device) for device in net_devices(sysfs))
    if not speeds:
        return {"nic_kind": None, "nic_gbits_per_s": None, "nics_per_node": None}
    fastest = max(speeds, key=lambda rate: rate or 0.0)
    return {
        "nic_kind": "socket",
        "nic_gbits_per_s": fastest,
        "nics_per_node": speeds[fastest],
    }


def _gbits_per_s(device: Path) -> float | None:
    try:
        megabits = int((device / "speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # a virtual device has no speed (EINVAL)
    return megabits / 1000.0 if megabits > 0 else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Print this node's facts as a line of JSON."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args(arguments)
    sys.stdout.write(node_facts().to_json() + "\n")


if __name__ == "__main__":
    cli.run(main)
