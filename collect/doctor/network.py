"""Checks of NICs and the path from NIC to GPU: link state, GPUDirect RDMA, locked memory."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dynamiccl.checks import Check, fail, ok, warn
from dynamiccl.collect.doctor.context import Context
from dynamiccl.machine import Machine

_PORTS: Final = "/sys/class/infiniband/*/ports/*/state"
#: Kernel modules that let a NIC read GPU memory: NVIDIA's, its older name, and GDRCopy's (which is
#: for small copies by the CPU, and no substitute).
_PEER_MEMORY: Final = ("nvidia_peermem", "nv_peer_mem")
_GDRCOPY: Final = "gdrdrv"


@dataclass(frozen=True, slots=True)
class _Link:
    device: str
    port: str
    #: "4: ACTIVE" is ACTIVE.
    state: str
    #: "400 Gb/sec (4X NDR)".
    rate: str

    @property
    def name(self) -> str:
        return self.device if self.port == "1" else f"{self.device}:{self.port}"


def check_network(machine: Machine, context: Context) -> Iterator[Check]:
    """Check RDMA ports and what they need to reach GPU memory; nothing without RDMA."""
    links = [_link(machine, path) for path in machine.paths(_PORTS)]
    if not links:
        yield _no_rdma(context)
        return
    yield _links(links)
    yield _gdr(machine)
    yield _locked_memory(machine)


def _link(machine: Machine, path: str) -> _Link:
    folder = path.rpartition("/")[0]
    device, port = folder.split("/")[4], folder.split("/")[6]
    state = (machine.read(path) or "unknown").rpartition(":")[2].strip()
    return _Link(device, port, state, (machine.read(f"{folder}/rate") or "unknown").strip())


def _no_rdma(context: Context) -> Check:
    found = "no InfiniBand, RoCE or EFA device"
    if context.num_nodes > 1:
        return warn(
            "NICs",
            found,
            "NCCL takes TCP sockets between nodes; is a driver missing (ls /sys/class/infiniband), "
            "or are the devices not in the container?",
        )
    return ok("NICs", f"{found}; one node needs none")


def _links(links: list[_Link]) -> Check:
    up = [link for link in links if link.state == "ACTIVE"]
    rates = dict.fromkeys(link.rate for link in up)
    down = ", ".join(f"{link.name} is {link.state}" for link in links if link not in up)
    found = f"{len(up)} of {len(links)} ports are up ({'; '.join(rates) or 'no rate'})"
    if not up:
        return fail("NICs", f"{found}: {down}", "no link: check cables and the subnet manager")
    if down:
        return warn(
            "NICs", f"{found}: {down}", "NCCL goes without them: leave it if they are not cabled"
        )
    if len(rates) > 1:
        shown = ", ".join(f"{link.name} {link.rate}" for link in up)
        return warn(
            "NICs",
            f"{found}: {shown}",
            "a link below its rate slows the whole group; keep storage NICs out with NCCL_IB_HCA",
        )
    return ok("NICs", found)


def _gdr(machine: Machine) -> Check:
    text = machine.read("/proc/modules") or ""
    loaded = {line.split()[0] for line in text.splitlines() if line.strip()}
    peer = [module for module in _PEER_MEMORY if module in loaded]
    copy = f", {_GDRCOPY}" if _GDRCOPY in loaded else ""
    if peer:
        return ok("GPUDirect RDMA", f"{', '.join(peer)}{copy} loaded")
    if "efa" in loaded:
        return ok("GPUDirect RDMA", f"EFA, whose driver brings it{copy}")
    return warn(
        "GPUDirect RDMA",
        f"no {_PEER_MEMORY[0]}{copy and f' (only{copy[1:]})'}",
        "without it data between nodes goes through host memory, unless DMA-BUF works (open kernel "
        "modules, Linux 5.12): 'modprobe nvidia_peermem', or look for 'GDRDMA' in NCCL's log",
    )


def _locked_memory(machine: Machine) -> Check:
    limits = machine.read("/proc/self/limits") or ""
    found = re.search(r"^Max locked memory\s+(\S+)", limits, re.MULTILINE)
    value = found.group(1) if found else "unknown"
    if value == "unlimited":
        return ok("locked memory", "unlimited")
    shown = f"limit of {value} bytes" if value.isdecimal() else value
    return warn(
        "locked memory",
        shown,
        "RDMA pins its buffers and fails when it may not: 'ulimit -l unlimited', in containers "
        "'--ulimit memlock=-1'; under Slurm PropagateResourceLimitsExcept=MEMLOCK",
    )
