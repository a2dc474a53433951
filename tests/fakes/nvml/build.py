"""Builds the fake NVML (fake_nvml.c), and the environment that loads it."""

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml.c")
LIBRARY = "libnvidia-ml.so.1"


def build_fake_nvml(folder: Path) -> Path:
    """Compile it into `folder`; returns the folder, for LD_LIBRARY_PATH."""
    words = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run(["gcc", *words, "-o", str(folder / LIBRARY), str(SOURCE)], check=True)
    return folder


def fake_nvml_env(folder: Path, **settings: object) -> dict[str, str]:
    """Our environment with the fake in it; `gpus=8` becomes FAKE_NVML_GPUS=8."""
    fakes = {f"FAKE_NVML_{name.upper()}": str(value) for name, value in settings.items()}
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), **fakes}
