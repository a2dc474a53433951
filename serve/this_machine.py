"""What jobs find on this machine: NCCL libraries, and what `dynamiccl-prepare --facts` says.

`dynamiccl-prepare` is what prepares jobs, so that its view of the machine is not implemented twice.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any, Final

from dynamiccl.doctor import Machine, nccl_version, on_the_loaders_path
from dynamiccl.errors import MachineError, PluginError
from dynamiccl.nccl import NcclVersion

PROBE_NAME: Final = "dynamiccl-prepare"
LIBRARY: Final = "libnccl.so.2"


def nccl_libraries(machine: Machine, named: Path | None = None) -> dict[str, NcclVersion | str]:
    """Each libnccl that a job may load -> its version, or why it is not known.

    The one that is named alone; else first that of the wheel beside PyTorch, then the loader's.
    """
    found = [] if named is None else [str(named)]
    if named is None:
        spec = importlib.util.find_spec("nvidia")
        for folder in spec.submodule_search_locations or () if spec is not None else ():
            found += machine.paths(f"{folder}/nccl/lib/{LIBRARY}")
        found += [path for path in [on_the_loaders_path(machine, LIBRARY)] if path]
    return {path: nccl_version(machine, path) for path in found}


def first_that_loads(libraries: dict[str, NcclVersion | str]) -> NcclVersion | None:
    """The version of the libnccl that jobs are taken to load; None where none does."""
    return next((found for found in libraries.values() if not isinstance(found, str)), None)


def own_fingerprint(machine: Machine, plugin: Path, named: Path | None = None) -> str:
    """This machine's fingerprint with its jobs' NCCL; raises MachineError."""
    nccl = first_that_loads(nccl_libraries(machine, named))
    if nccl is None:
        raise MachineError(
            f"no {LIBRARY} that loads, so the fingerprint lacks its version; name the jobs' own "
            "with --nccl, or give the whole --fingerprint"
        )
    return str(ask_probe(machine, plugin, nccl=nccl)["fingerprint"])


def ask_probe(
    machine: Machine, plugin: Path, *, nccl: NcclVersion | None = None, artifact: Path | None = None
) -> dict[str, Any]:
    """What `dynamiccl-prepare --facts` says, for jobs with this NCCL; raises PluginError."""
    probe = find_probe(plugin)
    ran = machine.run(str(probe), "--facts", *([] if artifact is None else [str(artifact)]))
    line = next((text for text in ran.output.splitlines() if text.startswith("{")), "")
    try:
        said: dict[str, Any] = json.loads(line)
    except ValueError:
        raise PluginError(f"{probe} printed no facts: {ran.first_line}") from None
    version = str(nccl.code if nccl else 0)
    said["fingerprint"] = f"{said['machine']};nccl={version}"
    said["system"] = dict(pair.split("=") for pair in said["systems"].split()).get(version)
    return said


def find_probe(plugin: Path) -> Path:
    """The program built or installed with a plugin; raises PluginError without one."""
    folder = plugin.resolve().parent
    for place in (folder / PROBE_NAME, folder.parent / "bin" / PROBE_NAME):
        if place.is_file():
            return place
    raise PluginError(f"no {PROBE_NAME} beside {plugin}; build both with 'make plugin'")
