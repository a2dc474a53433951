"""What the plugin finds on this machine: NCCL libraries, and the output of `dynamiccl-probe`.

`dynamiccl-probe` is built from the plugin's own code, so that its view of the machine is not
implemented twice.
"""

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamiccl.errors import MachineError, PluginError, UnknownName
from dynamiccl.machine import Machine
from dynamiccl.nccl import NcclVersion
from dynamiccl.nccl_setup import ASK_VERSION, on_the_loaders_path

PROBE_NAME: Final = "dynamiccl-probe"
LIBRARY: Final = "libnccl.so.2"


@dataclass(frozen=True, slots=True)
class NcclLibrary:
    """A libnccl that a job may load."""

    path: str
    #: Where we came across it.
    origin: str
    #: None when it does not load, with the reason in `problem`.
    version: NcclVersion | None
    problem: str = ""


def nccl_libraries(machine: Machine, named: Path | None = None) -> list[NcclLibrary]:
    """All libnccl found; first the one that a PyTorch job of this environment loads."""
    places = dict(_places(machine, named))
    return [_library(machine, path, origin) for path, origin in places.items()]


def ask_probe(
    machine: Machine, plugin: Path, *, nccl: str | None = None, artifact: Path | None = None
) -> dict[str, Any]:
    """The output of `dynamiccl-probe`; raises PluginError without one."""
    probe = find_probe(plugin)
    options = [] if nccl is None else ["--nccl", nccl]
    operands = [] if artifact is None else [str(artifact)]
    ran = machine.run(str(probe), *options, *operands)
    line = next((text for text in ran.output.splitlines() if text.startswith("{")), "")
    try:
        return dict(json.loads(line))
    except ValueError:
        printed = ran.first_line or "nothing"
        raise PluginError(f"{probe} printed no facts: {printed}") from None


def find_probe(plugin: Path) -> Path:
    """The probe built or installed with a plugin; raises PluginError without one."""
    folder = plugin.resolve().parent
    for place in (folder / PROBE_NAME, folder.parent / "bin" / PROBE_NAME):
        if place.is_file():
            return place
    raise PluginError(f"no {PROBE_NAME} beside {plugin}; build both with 'make plugin'")


def own_fingerprint(machine: Machine, plugin: Path, named: Path | None = None) -> str:
    """This machine's fingerprint with its jobs' NCCL; raises MachineError."""
    found = [library for library in nccl_libraries(machine, named) if library.version is not None]
    if not found:
        raise MachineError(
            f"no {LIBRARY} that loads, so the fingerprint lacks its version; name the jobs' own "
            "with --nccl, or give the whole --fingerprint"
        )
    return str(ask_probe(machine, plugin, nccl=found[0].path)["fingerprint"])


def _places(machine: Machine, named: Path | None) -> Iterator[tuple[str, str]]:
    """Path and origin of each candidate."""
    if named is not None:
        yield str(named), "--nccl"
        return
    for folder in _wheel_folders():
        for path in machine.paths(f"{folder}/nccl/lib/{LIBRARY}"):
            yield path, "the wheel beside PyTorch"
    found = on_the_loaders_path(machine, LIBRARY)
    if found is not None:
        yield found, "the loader's path"


def _wheel_folders() -> list[str]:
    spec = importlib.util.find_spec("nvidia")
    return list(spec.submodule_search_locations or ()) if spec is not None else []


def _library(machine: Machine, path: str, origin: str) -> NcclLibrary:
    ran = machine.run(sys.executable, "-c", ASK_VERSION, path)
    last = ran.output.strip().rpartition("\n")[2]
    if not ran.worked:
        return NcclLibrary(path, origin, None, last or "no output")
    try:
        return NcclLibrary(path, origin, NcclVersion.parse(last))
    except UnknownName:
        return NcclLibrary(path, origin, None, f"it says its version is '{last}'")
