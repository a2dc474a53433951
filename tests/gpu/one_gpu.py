"""The environment of ranks that share one GPU, each a node of its own to NCCL."""

import os
from pathlib import Path
from typing import Final

#: Whether the stand-in runs in place of nccl-tests, to check a test itself without a GPU.
#   NCCL_TESTS_STAND_IN  tests/gpu: anything: the stand-in for nccl-tests runs, without a GPU.
STAND_IN: Final = bool(os.environ.get("NCCL_TESTS_STAND_IN"))
#: Sockets on the loopback are all that NCCL may use between them.
SOCKETS_ONLY: Final = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MNNVL_ENABLE": "0",
}


def plain_environment() -> dict[str, str]:
    """This process's environment without settings of NCCL or of ours."""
    ours = ("NCCL", "DYNAMICCL")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def python_path() -> str:
    """PYTHONPATH of a process that imports our packages, beside what this one finds by it."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
