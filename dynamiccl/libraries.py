"""The plugin's libraries by name, which lie beside each other wherever there are some."""

from pathlib import Path
from typing import Final

#: NCCL's tuner in a job: agrees once when a communicator is made, then only looks up.
TUNER_NAME: Final = "libnccl-tuner-dynamiccl.so"
#: A benchmark's, never a job's: plays the schedule of a sweep.
SWEEP_NAME: Final = "libnccl-tuner-dynamiccl-sweep.so"
#: Switches tables while a job runs, records its calls, calls a vendor's plugin first.
ADAPTIVE_NAME: Final = "libnccl-tuner-dynamiccl-adaptive.so"
NAMES: Final = (TUNER_NAME, SWEEP_NAME, ADAPTIVE_NAME)
#: Where `make plugin` puts them, from the directory that it is run in.
BUILD_DIR: Final = Path("out/plugin")


def is_ours(library: str) -> bool:
    """Whether a value of NCCL_TUNER_PLUGIN or NCCL_PROFILER_PLUGIN names one of them."""
    return Path(library).name in NAMES
