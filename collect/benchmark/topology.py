"""NCCL's topology and graph dumps of a machine, kept once for each group, and columns from them.

`NCCL_TOPO_DUMP_FILE` and `NCCL_GRAPH_DUMP_FILE` are XML (`src/graph/xml.cc`, v2.30.7), the inputs
of NCCL's cost model; the log's TUNING section holds the cost tables it made of them. All three are
kept as they are beside the data: OUT/topology/system=NAME/GROUP/.
"""

import re
import shutil
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from dynamiccl.collect.grid import Setting

#: PCI class of an NVSwitch as NVLink target (`src/graph/xml.h`).
_NVSWITCH_CLASS: Final = "0x068000"
#: NVLink generation by the GPU's compute capability: Volta 2, Ampere 3, Hopper 4, Blackwell 5.
_NVLINK_GENERATION: Final[Mapping[int, int]] = {7: 2, 8: 3, 9: 4, 10: 5}
_CPU_VENDORS: Final = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "": "arm"}
#: NCCL writes a NIC's speed in Mbit/s.
_MBITS_PER_GBIT: Final = 1000.0
_CALL: Final = re.compile(r" Bytes -> ")


def topology_features(xml: str) -> dict[str, Any]:
    """Topology columns of an XML dump; unknown ones are left out, {} if it is no dump."""
    try:
        system = ET.fromstring(xml.strip())
    except ET.ParseError:
        return {}
    if system.tag != "system":
        return {}
    found: dict[str, Any] = {}
    gpus = list(system.iter("gpu"))
    if gpus:
        found |= _gpu_features(gpus)
    nets = list(system.iter("net"))
    if nets:
        speeds = Counter(_whole(net, "speed") for net in nets)
        found["nic_gbits_per_s"] = speeds.most_common(1)[0][0] / _MBITS_PER_GBIT or None
        found["nics_per_node"] = len(nets)
        found["nic_kind"] = _nic_kind(net.get("name", "") for net in nets)
    vendors = {cpu.get("vendor") for cpu in system.iter("cpu")} - {None}
    if len(vendors) == 1:
        vendor = _CPU_VENDORS.get(str(vendors.pop()))
        if vendor is not None:
            found["cpu_vendor"] = vendor
    return {name: value for name, value in found.items() if value is not None}


def _gpu_features(gpus: list[ET.Element]) -> dict[str, Any]:
    links = list(gpus[0].iter("nvlink"))
    count = sum(_whole(link, "count") for link in links)
    sm = _whole(gpus[0], "sm")
    return {
        "compute_capability": sm / 10 if sm else None,
        "nvlinks_per_gpu": count,
        "nvlink_generation": _NVLINK_GENERATION.get(sm // 10) if count else 0,
        "nvswitch": any(link.get("tclass") == _NVSWITCH_CLASS for link in links),
    }


def _whole(element: ET.Element, name: str) -> int:
    """A non-negative count, else 0: the file may come from a user's NCCL_TOPO_FILE."""
    text = element.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else 0


def _nic_kind(names: Iterable[str]) -> str | None:
    """NIC kind by NCCL's device names; an mlx5 port (InfiniBand or RoCE) is not told apart."""
    kinds = {"efa" if "efa" in name or "rdmap" in name else _plain_kind(name) for name in names}
    return kinds.pop() if len(kinds) == 1 else None


def _plain_kind(name: str) -> str | None:
    return "socket" if re.match(r"(eth|en|lo|bond|ib\d)", name) else None


def set_up_lines(log: Iterable[str]) -> list[str]:
    """NCCL's log without the per-call lines: set-up and cost tables."""
    return [line for line in log if not _CALL.search(line)]


def keep_dumps(out: Path, system: str, setting: Setting, folder: Path, log: Iterable[str]) -> None:
    """Copy a launch's dumps and the head of NCCL's log beside the data, unless already there."""
    shape = f"{setting.num_nodes}x{setting.ranks_per_node}"
    words = [setting.collective.wire.lower(), shape, setting.profile.name]
    place = out / "topology" / f"system={system}" / "-".join(words)
    lines = set_up_lines(log)
    # A failed launch may leave no dump: keep nothing, so that the next launch's dump is kept.
    if place.is_dir() or not lines:
        return
    hidden = place.with_name(f".writing-{place.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    for name in ("topology.xml", "graph.xml"):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, hidden / name)
    head = "".join(f"{line}\n" for line in lines)
    (hidden / "nccl.log").write_text(head, encoding="utf-8")
    hidden.rename(place)
