"""NCCL's topology and graph dumps of a made-up node.

Eight GPUs on four NVSwitches, a network card beside each: the shape of a DGX H100 (`src/graph/
xml.cc` writes the elements, `src/graph/search.cc` the graphs). The bus ids and addresses are ours.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dynamiccl.simulator.group import GPUS_PER_NODE
from tests.fakes.nccl_tests.debug import DebugLog

_SWITCHES: Final = ((0xE0, 5), (0xE1, 5), (0xE2, 4), (0xE3, 4))
_GPU: Final = 'class="0x030200" vendor="0x10de" device="0x2330"'
_NIC: Final = 'class="0x020000" vendor="0x15b3" device="0x1021"'
_LINK: Final = 'link_speed="32.0 GT/s PCIe" link_width="16"'
#: Ring, tree, CollNet and NVLS graphs: pattern, and channels as a share of the communicator's.
_GRAPHS: Final = ((0, 4), (1, 1), (2, 3), (3, 5))


def write_dumps(environment: Mapping[str, str], log: DebugLog, channels: int) -> None:
    """Write what the environment asks for; `channels` is the communicator's number."""
    for name, text in (
        ("NCCL_TOPO_DUMP_FILE", topology_xml()),
        ("NCCL_GRAPH_DUMP_FILE", graph_xml(max(channels // 2, 1))),
    ):
        path = environment.get(name)
        if path:
            log.say(f"{name} set by environment to {path}", "ENV")
            Path(path).write_text(text, encoding="utf-8")


def topology_xml() -> str:
    """One node as NCCL's XML, version 1."""
    halves = [
        f'  <cpu numaid="{numa}" affinity="{mask}" arch="x86_64" vendor="GenuineIntel" '
        f'familyid="6" modelid="143">\n'
        + "".join(_pair(device) for device in range(4 * numa, 4 * numa + 4))
        + "  </cpu>\n"
        for numa, mask in ((0, "00000000,ffffffff"), (1, "ffffffff,00000000"))
    ]
    return f'<system version="1">\n{"".join(halves)}</system>\n'


def graph_xml(channels: int) -> str:
    """Search results as NCCL's XML, version 1."""
    return f'<graphs version="1">\n{"".join(_graph(*g, channels) for g in _GRAPHS)}</graphs>\n'


def _bus(device: int) -> int:
    return 0x10 * (device + 1)


def _pair(device: int) -> str:
    links = "".join(
        f'          <nvlink target="0000:{switch:02x}:00.0" count="{count}" tclass="0x068000"/>\n'
        for switch, count in _SWITCHES
    )
    bus = _bus(device)
    return (
        f'    <pci busid="0000:{bus:02x}:00.0" class="0x060400" {_LINK}>\n'
        f'      <pci busid="0000:{bus + 1:02x}:00.0" {_GPU} {_LINK}>\n'
        f'        <gpu dev="{device}" sm="90" rank="{device}" gdr="1">\n{links}'
        f"        </gpu>\n      </pci>\n"
        f'      <pci busid="0000:{bus + 2:02x}:00.0" {_NIC} {_LINK}>\n        <nic>\n'
        f'          <net name="mlx5_{device}" dev="{device}" speed="400000" port="1" '
        f'latency="0.000000" guid="0x{0xFA4E0000 + device:x}" maxconn="131072" gdr="1"/>\n'
        f"        </nic>\n      </pci>\n    </pci>\n"
    )


def _graph(number: int, pattern: int, channels: int) -> str:
    order = "".join(f'      <gpu dev="{device}"/>\n' for device in range(GPUS_PER_NODE))
    channel = f"    <channel>\n{order}    </channel>\n"
    return (
        f'  <graph id="{number}" pattern="{pattern}" crossnic="0" nchannels="{channels}" '
        'speedintra="30" speedinter="30" latencyinter="0" typeintra="NVL" typeinter="PIX" '
        f'samechannels="0">\n{channel * channels}  </graph>\n'
    )
