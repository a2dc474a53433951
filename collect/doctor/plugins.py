"""Tuners and profilers: ours, and a vendor's that ours would displace.

NCCL loads one tuner and one profiler: what NCCL_TUNER_PLUGIN names, else libnccl-tuner.so from the
loader's path, else symbols in the network plugin (`src/plugin/plugin_open.cc`, v2.30.7). The
reference default is measured with theirs; inside a sweep ours takes its place.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dynamiccl.collect.doctor.check import Check, fail, ok, unknown, warn
from dynamiccl.collect.doctor.context import Context
from dynamiccl.collect.doctor.machine import Machine
from dynamiccl.collect.doctor.settings import nccl_settings

#: Loads a plugin as NCCL does (RTLD_NOW | RTLD_LOCAL, src/os/linux.cc) and says what it exports.
ASK_TUNER: Final = (
    "import ctypes, os, sys; so = ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW | os.RTLD_LOCAL); "
    "print(*[k for k in range(2, 8) if hasattr(so, f'ncclTunerPlugin_v{k}')])"
)


@dataclass(frozen=True, slots=True)
class _Role:
    """One of the two things that a plugin can be."""

    name: str
    variable: str
    library: str
    symbol: str


_ROLES: Final = (
    _Role("tuner", "NCCL_TUNER_PLUGIN", "libnccl-tuner.so", "ncclTunerPlugin_v"),
    _Role("profiler", "NCCL_PROFILER_PLUGIN", "libnccl-profiler.so", "ncclProfiler_v"),
)


def check_plugins(machine: Machine, context: Context) -> Iterator[Check]:
    """Other people's plugins, and ours where the sweep wants it."""
    yield from (_other(machine, role) for role in _ROLES)
    if context.wants_sweep_mode:
        yield _ours(machine, context)


def _other(machine: Machine, role: _Role) -> Check:
    name = f"other {role.name}"
    settings = nccl_settings(machine)
    value, place = settings.get(role.variable, ("", ""))
    if value.lower() == "none":
        return ok(name, f"none ({role.variable}={value})")
    if value:
        return _displaced(name, f"{role.variable}={value} ({place})")
    stray = _on_the_loaders_path(machine, role.library)
    if stray is not None:
        return _displaced(name, f"{stray}, which NCCL loads unasked")
    net_name = settings.get("NCCL_NET_PLUGIN", ("", ""))[0]
    net = _net_library(machine, net_name)
    if net is not None and machine.run("grep", "-aqE", f"{role.symbol}[0-9]", net).worked:
        return _displaced(name, f"inside the network plugin {net}")
    return ok(name, "none")


def _displaced(name: str, found: str) -> Check:
    return warn(
        name,
        found,
        "it is part of the untouched default, and ours takes its place inside a sweep: what it "
        "does shows in the difference of the two defaults",
    )


def _net_library(machine: Machine, value: str) -> str | None:
    if value.lower() == "none":
        return None
    if "/" in value:
        return value
    tried = (value, f"libnccl-net-{value}.so") if value else ("libnccl-net.so",)
    found = (_on_the_loaders_path(machine, name) for name in tried if name.endswith(".so"))
    return next((path for path in found if path), None)


def _on_the_loaders_path(machine: Machine, library: str) -> str | None:
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


def _ours(machine: Machine, context: Context) -> Check:
    name = "our plugin"
    bad = fail if context.mode == "sweep" else warn
    otherwise = "" if context.mode == "sweep" else "; without it one process measures one config"
    if not machine.paths(context.plugin):
        return bad(
            name,
            f"none at {context.plugin}",
            f"build it with 'make plugin', or name it in runner.plugin{otherwise}",
        )
    ran = machine.run(sys.executable, "-c", ASK_TUNER, context.plugin)
    last = ran.output.strip().rpartition("\n")[2]
    if not ran.worked:
        return bad(
            name,
            f"{context.plugin} does not load: {last or 'no output'}",
            f"build it on a machine like the compute nodes, with 'make plugin'{otherwise}",
        )
    if not last:
        return bad(
            name, f"{context.plugin} exports no tuner", f"build it with 'make plugin'{otherwise}"
        )
    if not all(word.isdecimal() for word in last.split()):
        return unknown(name, f"{context.plugin} loads and says: {last}")
    return ok(name, f"{context.plugin} exports tuner {', '.join(f'v{k}' for k in last.split())}")
