"""The plugin: built with CMake and Ninja, found, and asked what it sees of a machine.

Build it on a machine like those that will run it: it must fit the C library there.

    python -m dynamiccl.serve.build [--dir DIR]
        [--torch]     also dynamiccl-brain, for the torch that this Python has (20 s)
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dynamiccl import cli
from dynamiccl.doctor import Machine, nccl_version, on_the_loaders_path
from dynamiccl.errors import MachineError, MissingPath, PluginError
from dynamiccl.libraries import BUILD_DIR, TUNER_NAME, built
from dynamiccl.nccl import NcclVersion

#: A leader's policies in TorchScript; the arbiter looks for it beside itself.
BRAIN_NAME: Final = "dynamiccl-brain"
#: It prepares jobs, and tells us what it sees of a machine.
PROBE_NAME: Final = "dynamiccl-prepare"
LIBRARY: Final = "libnccl.so.2"
SOURCE_DIR: Final = Path(__file__).resolve().parent / "plugin"
_FACTS: Final = {"machine", "machine_problem", "systems", "artifact_problem", "key_problem"}
_SHOWN_LINES: Final = 20


def build_plugin(
    build_dir: Path, *options: str, torch: bool = False, targets: Sequence[str] = ()
) -> Path:
    """Build `targets` into `build_dir` with CMake's `options`; return the job's tuner.

    Raises PluginError with the end of what a failed tool said, and MachineError without torch.
    """
    cmake, ninja = find_tool("cmake"), find_tool("ninja")
    #   CXX  the C++ compiler of the plugin. Default: c++, g++ or clang++.
    named = os.environ.get("CXX", "").split()[:1]
    if not any(shutil.which(name) for name in named or ["c++", "g++", "clang++"]):
        tried = named[0] if named else "c++, g++ and clang++"
        raise PluginError(
            f"no C++ compiler: {tried} not found; install g++ 9 or later (or clang 10), or name "
            "one in the environment variable CXX"
        )
    options += (
        f"-DCMAKE_MAKE_PROGRAM={ninja}",
        f"-DDYNAMICCL_TORCH={find_torch() if torch else ''}",
    )
    only = ["--target", *targets] if targets else []
    for words in (
        ["-G", "Ninja", *options, "-B", str(build_dir), "-S", str(SOURCE_DIR)],
        ["--build", str(build_dir), *only],
    ):
        done = subprocess.run([cmake, *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            # Ninja shows the compiler's stderr on its stdout.
            lines = (done.stdout + done.stderr).splitlines()[-_SHOWN_LINES:]
            said = "\n".join(lines)
            raise PluginError(f"'cmake' failed with exit code {done.returncode}:\n{said}")
    return build_dir / TUNER_NAME


def find_torch() -> Path:
    """Directory of this Python's torch, not imported; raises MachineError."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise MachineError(
            "dynamiccl-brain needs torch: take a Python that has it, or leave out --torch"
        )
    return Path(spec.origin).resolve().parent


def find_tool(name: str) -> str:
    """A tool beside this Python, else on PATH; raises PluginError."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise PluginError(f"no {name} to build the plugin with; pip install '.[plugin]'")
    return found


def find_plugin(path: Path | None = None) -> Path:
    """The plugin at `path`, or of `make plugin`; raises MissingPath."""
    found = path if path is not None else built(TUNER_NAME)
    if not found.is_file():
        raise MissingPath("tuner plugin", found, "build it with 'make plugin'")
    return found.resolve()


def find_probe(plugin: Path) -> Path:
    """The program beside a plugin; raises PluginError without one."""
    folder = plugin.resolve().parent
    for place in (folder / PROBE_NAME, folder.parent / "bin" / PROBE_NAME):
        if place.is_file():
            return place
    raise PluginError(f"no {PROBE_NAME} beside {plugin}; build both with 'make plugin'")


def ask_probe(
    machine: Machine, plugin: Path, *, nccl: NcclVersion | None = None, artifact: Path | None = None
) -> dict[str, Any]:
    """What `dynamiccl-prepare --facts` says, for this NCCL; raises PluginError."""
    probe = find_probe(plugin)
    ran = machine.run(str(probe), "--facts", *([] if artifact is None else [str(artifact)]))
    line = next((text for text in ran.output.splitlines() if text.startswith("{")), "")
    try:
        said: dict[str, Any] = json.loads(line)
    except ValueError:
        raise PluginError(f"{probe} printed no facts: {ran.first_line}") from None
    if not said.keys() >= _FACTS:
        raise PluginError(f"{probe} is of another release; install it again")
    version = str(nccl.code if nccl else 0)
    said["fingerprint"] = f"{said['machine']};nccl={version}"
    said["system"] = dict(pair.split("=") for pair in said["systems"].split()).get(version)
    return said


def nccl_libraries(machine: Machine, named: Path | None = None) -> dict[str, NcclVersion | str]:
    """Each libnccl that a job may load, the likeliest first -> its version, or why unknown."""
    found = [] if named is None else [str(named)]
    if named is None:
        spec = importlib.util.find_spec("nvidia")
        for folder in spec.submodule_search_locations or () if spec is not None else ():
            found += machine.paths(f"{folder}/nccl/lib/{LIBRARY}")
        found += [path for path in [on_the_loaders_path(machine, LIBRARY)] if path]
    return {path: nccl_version(machine, path) for path in found}


def first_that_loads(libraries: dict[str, NcclVersion | str]) -> NcclVersion | None:
    """The version of the libnccl that jobs are taken to load; None: none loads."""
    return next((found for found in libraries.values() if not isinstance(found, str)), None)


def own_fingerprint(machine: Machine, plugin: Path, named: Path | None = None) -> str:
    """This machine's fingerprint with its jobs' NCCL; raises MachineError."""
    nccl = first_that_loads(nccl_libraries(machine, named))
    if nccl is None:
        raise MachineError(
            f"no {LIBRARY} that loads, so the fingerprint lacks its version; name the jobs' own "
            "with --nccl, or give the whole --fingerprint"
        )
    said = ask_probe(machine, plugin, nccl=nccl)
    if said["machine_problem"]:
        raise MachineError(f"{said['machine_problem']}; give the whole --fingerprint")
    return str(said["fingerprint"])


def main() -> None:
    """Build, and print the plugin's path."""
    parser = argparse.ArgumentParser(
        prog="python -m dynamiccl.serve.build", description="Build the tuner plugin."
    )
    parser.add_argument("--dir", type=Path, default=BUILD_DIR, help="build directory")
    parser.add_argument("--torch", action="store_true", help=f"also {BRAIN_NAME}")
    arguments = parser.parse_args()
    with cli.working(f"building the plugin in {arguments.dir}"):
        plugin = build_plugin(arguments.dir, torch=arguments.torch)
    sys.stdout.write(f"{plugin}\n")


if __name__ == "__main__":
    cli.run(main)
