"""NCCL's set-up on a machine: settings, library, and the plugins that NCCL would load.

NCCL loads one tuner and one profiler: what NCCL_TUNER_PLUGIN names, else libnccl-tuner.so from the
loader's path, else symbols in the network plugin (`src/plugin/tuner.cc`, v2.30.7), as AWS's
aws-ofi-nccl has them. Nothing here loads a library into this process.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from dynamiccl.libraries import is_ours
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
    """The two kinds of plugin."""

    name: str
    variable: str
    library: str
    symbol: str


#   NCCL_TUNER_PLUGIN  the tuner that NCCL loads: a path, a file name, or NAME for
#                      libnccl-tuner-NAME.so.
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
    """A tuner or profiler of another vendor that NCCL would load, or that is switched off."""

    origin: Origin
    #: The library by the name that NCCL would open, so that each node looks for its own; empty
    #: when there is none.
    library: str
    #: Where it was found, in words.
    place: str


def find_other_plugin(machine: Machine, role: Role) -> OtherPlugin | None:
    """The plugin that NCCL would load in `role` now; None without one."""
    settings = nccl_settings(machine)
    value, place = settings.get(role.variable, ("", ""))
    if value.lower() == "none":
        return OtherPlugin(Origin.SWITCHED_OFF, "", f"{role.variable}={value}")
    if value:
        return OtherPlugin(Origin.VARIABLE, value, f"{role.variable}={value} ({place})")
    return _found_unasked(machine, role, settings)


def find_displaced(machine: Machine, role: Role) -> OtherPlugin | None:
    """The plugin that NCCL would load in `role` if none of our libraries were set."""
    found = find_other_plugin(machine, role)
    if found is None or not is_ours(found.library):
        return found
    return _found_unasked(machine, role, nccl_settings(machine))


def _found_unasked(
    machine: Machine, role: Role, settings: Mapping[str, tuple[str, str]]
) -> OtherPlugin | None:
    stray = on_the_loaders_path(machine, role.library)
    if stray is not None:
        return OtherPlugin(Origin.LOADERS_PATH, role.library, f"{stray}, which NCCL loads unasked")
    for name, path in _net_plugins(machine, settings.get("NCCL_NET_PLUGIN", ("", ""))[0]):
        if machine.run("grep", "-aqE", f"{role.symbol}[0-9]", path).worked:
            return OtherPlugin(Origin.NET_PLUGIN, name, f"inside the network plugin {path}")
    return None


def _net_plugins(machine: Machine, value: str) -> Iterator[tuple[str, str]]:
    """Name and path of each library that NCCL_NET_PLUGIN=`value` (a list) opens."""
    if value.lower() == "none":
        return
    for one in (value or "libnccl-net.so").split(","):
        if "/" in one:
            yield one, one
            continue
        tried = [name for name in (one, f"libnccl-net-{one}.so") if name.endswith(".so")]
        found = ((name, on_the_loaders_path(machine, name)) for name in tried)
        yield from ((name, path) for name, path in found if path)


def on_the_loaders_path(machine: Machine, library: str) -> str | None:
    """Path that dlopen(library) would open, ignoring the program's run paths; or None."""
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
    """NCCL_* setting -> (value, source), with NCCL's own precedence."""
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
    """NCCL's configuration files, highest precedence first."""
    return (env.get("NCCL_CONF_FILE") or USER_FILE, SYSTEM_FILE)


def is_efficiency_policy(value: str) -> bool:
    """Whether an NCCL_CTA_POLICY has NCCL_CTA_POLICY_EFFICIENCY: bit 0 (nccl.h.in, v2.30.7)."""
    return int(value) & 1 == 1 if value.isdecimal() else "EFFICIENCY" in value.upper()


def is_new_enqueue(value: str) -> bool:
    """Whether a value of NCCL_ENQUEUE_REARCH_ENABLE switches it on (an NCCL_PARAM: any but 0)."""
    return value not in {"", "0"}
