"""What the plugin goes by: file names of its libraries, and the fingerprint of a machine.

    gpu=NVIDIA H100 80GB HBM3*8;mig=0;nic=infiniband*8;nccl=22809

Equal texts are the same kind of machine. Jobs take it in `serve/plugin/prepare/prepare.cpp`.
"""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dynamiccl.errors import UserError
from dynamiccl.nccl import NcclVersion

#: Agrees once when a communicator is made, then only looks up.
TUNER_NAME: Final = "libnccl-tuner-dynamiccl.so"
#: The same, with a vendor's tuner asked first.
VENDOR_NAME: Final = "libnccl-tuner-dynamiccl-vendor.so"
#: Never a job's: plays the schedule of a sweep.
SWEEP_NAME: Final = "libnccl-tuner-dynamiccl-sweep.so"
#: Switches tables while a job runs, and records its calls.
ADAPTIVE_NAME: Final = "libnccl-tuner-dynamiccl-adaptive.so"
#: Records a job's calls, and decides nothing.
PROFILER_NAME: Final = "libnccl-profiler-dynamiccl.so"
JOB_NAMES: Final = (TUNER_NAME, VENDOR_NAME, ADAPTIVE_NAME, PROFILER_NAME)
NAMES: Final = (*JOB_NAMES, SWEEP_NAME)
#: Of `make plugin`, from where it is run.
BUILD_DIR: Final = Path("out/plugin")
#: What the plugin has room for.
MAX_FINGERPRINT: Final = 200
_ODD: Final = re.compile(r"[^ -~]|[;*+=\"\\]")
_MODEL: Final = r"[^;*+=]+\*\d+"
_SHAPE: Final = re.compile(rf"gpu={_MODEL}(\+{_MODEL})*;mig=[01];nic=[a-z]+\*\d+;nccl=\d+")


def built(name: str) -> Path:
    """A library built by `make plugin`, below the current directory or our sources."""
    here = BUILD_DIR / name
    there = Path(__file__).resolve().parents[1] / here
    return there if there.is_file() and not here.is_file() else here


def is_ours(library: str) -> bool:
    """Whether a value of NCCL_TUNER_PLUGIN or NCCL_PROFILER_PLUGIN names a library of ours."""
    return Path(library).name in NAMES


def node_part(gpu_models: Iterable[str], *, mig: bool, nic_kind: str | None, num_nics: int) -> str:
    """The fingerprint without NCCL's version.

    >>> node_part(["H100", "H100"], mig=False, nic_kind="roce", num_nics=8)
    'gpu=H100*2;mig=0;nic=roce*8'
    """
    counts = Counter(_ODD.sub("_", model) for model in gpu_models)
    gpus = "+".join(f"{model}*{counts[model]}" for model in sorted(counts)) or "none*0"
    return f"gpu={gpus};mig={int(mig)};nic={nic_kind or 'none'}*{num_nics}"


def with_nccl(node: str, version: NcclVersion) -> str:
    """The whole fingerprint."""
    return f"{node};nccl={version.code}"


def check_fingerprint(text: str) -> str:
    """Raises UserError for no fingerprint."""
    if not _SHAPE.fullmatch(text) or not text.isprintable() or len(text) > MAX_FINGERPRINT:
        raise UserError(
            f"'{text}' is no fingerprint; one looks like 'gpu=NVIDIA H100 80GB HBM3*8;mig=0;"
            "nic=infiniband*8;nccl=22809', and 'dynamiccl-deploy doctor' shows a machine's own"
        )
    return text
