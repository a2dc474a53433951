"""NCCL as it is set up on a machine: its settings, its library, and the plugins that it would load.

NCCL loads one tuner and one profiler: what NCCL_TUNER_PLUGIN names, else libnccl-tuner.so from the
loader's path, else symbols in the network plugin (`src/plugin/plugin_open.cc`, v2.30.7). Nothing
here loads a library into this process.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from dynamiccl.machine import Machine

#: Read by NCCL at start, where the environment does not say otherwise (env.rst, v2.30.7).
SYSTEM_FILE: Final = "/etc/nccl.conf"
USER_FILE: Final = "~/.nccl.conf"
_ASSIGNED: Final = re.compile(r"^\s*(NCCL_\w+)\s*=\s*(.*?)\s*$", re.MULTILINE)
#: Run in a process of its own, since loading NCCL loads CUDA with it.
ASK_VERSION: Final = (
    "import ctypes, sys; number = ctypes.c_int(); "
    "ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number)); print(number.value)"
)
#: Loads a plugin as NCCL does (RTLD_NOW | RTLD_LOCAL, src/os/linux.cc) and says what it exports.
ASK_TUNER: Final = (
    "import ctypes, os, sys; so = ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW | os.RTLD_LOCAL); "
    "print(*[k for k in range(2, 8) if hasattr(so, f'ncclTunerPlugin_v{k}')])"
)


@dataclass(frozen=True, slots=True)
class Role:
    """One of the two things that a plugin can be."""

    name: str
    variable: str
    library: str
    symbol: str


ROLES: Final = (
    Role("tuner", "NCCL_TUNER_PLUGIN", "libnccl-tuner.so", "ncclTunerPlugin_v"),
    Role("profiler", "NCCL_PROFILER_PLUGIN", "libnccl-profiler.so", "ncclProfiler_v"),
)


class Origin(StrEnum):
    """How NCCL comes to load a plugin."""

    SWITCHED_OFF = "switched off"
    VARIABLE = "variable"
    LOADERS_PATH = "loader's path"
    NET_PLUGIN = "network plugin"


@dataclass(frozen=True, slots=True)
class OtherPlugin:
    """A tuner or profiler that NCCL would load without us, or that it is told not to look for."""

    origin: Origin
    #: The library, as NCCL would be given it; empty when there is none.
    library: str
    #: Where it was found, in words.
    place: str


def find_other_plugin(machine: Machine, role: Role) -> OtherPlugin | None:
    """What NCCL would load in `role` as things are; None when it finds nothing."""
    settings = nccl_settings(machine)
    value, place = settings.get(role.variable, ("", ""))
    if value.lower() == "none":
        return OtherPlugin(Origin.SWITCHED_OFF, "", f"{role.variable}={value}")
    if value:
        return OtherPlugin(Origin.VARIABLE, value, f"{role.variable}={value} ({place})")
    stray = on_the_loaders_path(machine, role.library)
    if stray is not None:
        return OtherPlugin(Origin.LOADERS_PATH, stray, f"{stray}, which NCCL loads unasked")
    net = net_plugin(machine, settings.get("NCCL_NET_PLUGIN", ("", ""))[0])
    if net is not None and machine.run("grep", "-aqE", f"{role.symbol}[0-9]", net).worked:
        return OtherPlugin(Origin.NET_PLUGIN, net, f"inside the network plugin {net}")
    return None


def net_plugin(machine: Machine, value: str) -> str | None:
    """The network plugin that NCCL_NET_PLUGIN=`value` opens; None where there is none."""
    if value.lower() == "none":
        return None
    if "/" in value:
        return value
    tried = (value, f"libnccl-net-{value}.so") if value else ("libnccl-net.so",)
    found = (on_the_loaders_path(machine, name) for name in tried if name.endswith(".so"))
    return next((path for path in found if path), None)


def on_the_loaders_path(machine: Machine, library: str) -> str | None:
    """Where dlopen(library) would find it, run paths of the program aside."""
    for folder in machine.env.get("LD_LIBRARY_PATH", "").split(":"):
        found = machine.paths(f"{folder}/{library}") if folder else []
        if found:
            return found[0]
    ldconfig = machine.which("ldconfig") or "/sbin/ldconfig"
    cached = re.search(
        rf"^\s*{re.escape(library)} \(.*\) => (\S+)",
        machine.run(ldconfig, "-p").output,
        re.MULTILINE,
    )
    return cached.group(1) if cached else None


def nccl_settings(machine: Machine) -> dict[str, tuple[str, str]]:
    """Every NCCL_* setting -> its value, and where it comes from; as NCCL ranks the places."""
    found = {
        name: (value, "environment")
        for name, value in sorted(machine.env.items())
        if name.startswith("NCCL_")
    }
    for path in configuration_files(machine.env):
        for name, value in _ASSIGNED.findall(machine.read(path) or ""):
            found.setdefault(name, (value, path))
    return found


def configuration_files(env: Mapping[str, str]) -> tuple[str, ...]:
    """The files that NCCL reads, the one that counts first."""
    return (env.get("NCCL_CONF_FILE") or USER_FILE, SYSTEM_FILE)


def is_efficiency_policy(value: str) -> bool:
    """Whether an NCCL_CTA_POLICY has NCCL_CTA_POLICY_EFFICIENCY: bit 0 (nccl.h.in, v2.30.7)."""
    return int(value) & 1 == 1 if value.isdecimal() else "EFFICIENCY" in value.upper()
