"""File names of the plugin's libraries."""

from pathlib import Path
from typing import Final

#: NCCL's tuner in a job: agrees once when a communicator is made, then only looks up.
TUNER_NAME: Final = "libnccl-tuner-dynamiccl.so"
#: The same, with a vendor's tuner asked first.
VENDOR_NAME: Final = "libnccl-tuner-dynamiccl-vendor.so"
#: A benchmark's, never a job's: plays the schedule of a sweep.
SWEEP_NAME: Final = "libnccl-tuner-dynamiccl-sweep.so"
#: Switches tables while a job runs, and records its calls.
ADAPTIVE_NAME: Final = "libnccl-tuner-dynamiccl-adaptive.so"
#: Records a job's calls, and decides nothing.
PROFILER_NAME: Final = "libnccl-profiler-dynamiccl.so"
#: What a job may load.
JOB_NAMES: Final = (TUNER_NAME, VENDOR_NAME, ADAPTIVE_NAME, PROFILER_NAME)
NAMES: Final = (*JOB_NAMES, SWEEP_NAME)
#: Where `make plugin` puts them, from the directory that it is run in.
BUILD_DIR: Final = Path("out/plugin")


def built(name: str) -> Path:
    """Path of a library built by `make plugin`, below the current directory or our sources."""
    here = BUILD_DIR / name
    there = Path(__file__).resolve().parents[1] / here
    return there if there.is_file() and not here.is_file() else here


def is_ours(library: str) -> bool:
    """Whether a value of NCCL_TUNER_PLUGIN or NCCL_PROFILER_PLUGIN names a library of ours."""
    return Path(library).name in NAMES
