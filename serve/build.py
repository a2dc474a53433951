"""Builds the tuner plugin with CMake and Ninja, and finds a built one.

The plugin is compiled on the machine that will run it (or one like it) rather than shipped in the
wheel: it must fit the C library there, and a compiler is at hand wherever NCCL programs are built.

    python -m dynamiccl.serve.build [--dir DIR]
        [--torch]     also dynamiccl-brain, for the torch that this Python has (20 s)
"""

import argparse
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dynamiccl import cli
from dynamiccl.errors import MachineError, MissingPath, PluginError
from dynamiccl.libraries import BUILD_DIR, TUNER_NAME, built

#: A leader's policies in TorchScript; the arbiter looks for it beside itself.
BRAIN_NAME: Final = "dynamiccl-brain"
SOURCE_DIR: Final = Path(__file__).resolve().parent / "plugin"
SANITIZERS: Final = ("", "address,undefined", "thread")
_SHOWN_LINES: Final = 20

_log = logging.getLogger(__name__)


def build_plugin(
    build_dir: Path,
    *,
    sanitize: str = "",
    tests: bool = False,
    torch: bool = False,
    targets: Sequence[str] = (),
) -> Path:
    """Configure and build into `build_dir` (incrementally); return the job's tuner.

    `sanitize` is one of SANITIZERS; `tests` adds C++ tests and benchmarks, `torch` dynamiccl-brain;
    with `targets` CMake builds these alone. Raises PluginError when a tool is missing or the
    compiler fails, with the end of what it said, and MachineError without torch.
    """
    if sanitize not in SANITIZERS:
        raise ValueError(f"sanitize is '{sanitize}' and must be one of {SANITIZERS}")
    cmake, ninja = find_tool("cmake"), find_tool("ninja")
    _check_compiler()
    torch_dir = find_torch() if torch else ""
    _log.info("building the plugin in %s", build_dir)
    _run(
        [
            cmake,
            "-G",
            "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DDYNAMICCL_SANITIZE={sanitize}",
            f"-DDYNAMICCL_TESTS={'ON' if tests else 'OFF'}",
            f"-DDYNAMICCL_TORCH={torch_dir}",
            "-B",
            str(build_dir),
            "-S",
            str(SOURCE_DIR),
        ]
    )
    _run([cmake, "--build", str(build_dir), *(("--target", *targets) if targets else ())])
    return build_dir / TUNER_NAME


def find_plugin(path: Path | None = None) -> Path:
    """The library at `path`, or the job's tuner as `make plugin` puts it; raises MissingPath."""
    found = path if path is not None else built(TUNER_NAME)
    if not found.is_file():
        raise MissingPath("tuner plugin", found, "build it with 'make plugin'")
    return found.resolve()


def find_torch() -> Path:
    """Directory of this Python's torch package, without importing it; raises MachineError."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise MachineError(
            "dynamiccl-brain needs torch: take a Python that has it, or leave out --torch"
        )
    return Path(spec.origin).resolve().parent


def find_tool(name: str) -> str:
    """A build tool installed beside this Python, else on PATH; raises PluginError without one."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise PluginError(f"no {name} to build the plugin with; pip install '.[plugin]'")
    return found


def _check_compiler() -> None:
    #   CXX  the C++ compiler of the plugin. Default: c++, g++ or clang++.
    named = os.environ.get("CXX", "").split()[:1]
    if not any(shutil.which(name) for name in named or ["c++", "g++", "clang++"]):
        tried = named[0] if named else "c++, g++ and clang++"
        raise PluginError(
            f"no C++ compiler: {tried} not found; install g++ 9 or later (or clang 10), or name "
            "one in the environment variable CXX"
        )


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        # Ninja shows the compiler's stderr on its own stdout.
        lines = (done.stdout + done.stderr).splitlines()[-_SHOWN_LINES:]
        raise PluginError(
            f"'{Path(command[0]).name}' failed with exit code {done.returncode}:\n"
            + "\n".join(lines)
        )


def main() -> None:
    """Build, and print the plugin's path."""
    parser = argparse.ArgumentParser(
        prog="python -m dynamiccl.serve.build", description="Build the tuner plugin."
    )
    parser.add_argument("--dir", type=Path, default=BUILD_DIR, help="build directory")
    parser.add_argument("--torch", action="store_true", help=f"also {BRAIN_NAME}")
    arguments = parser.parse_args()
    cli.configure_logging(verbose=False)
    plugin = build_plugin(arguments.dir, torch=arguments.torch)
    sys.stdout.write(f"{plugin}\n")


if __name__ == "__main__":
    cli.run(main)
