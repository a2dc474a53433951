"""Network interference: an endless second nccl-tests on GPUs that the trial leaves free.

The level is the share of 32 channels that it may use (NCCL_MAX_CTAS): with Ring, bandwidth at large
sizes grows about linearly with them. Measured on eight B300 at 128 MiB (eunomia-bpf/nccl-eBPF
@14f9bca): 29, 59, 117, 231, 427 and 625 GB/s with 1, 2, 4, 8, 16 and 32 channels. It has GPUs,
ranks and a communicator of its own, and meets the trial on NVSwitch, PCIe and NICs only.

The launcher starts it, like a trial, but in the user's environment without our tuner.
"""

import re
from dataclasses import dataclass
from typing import Final

from dynamiccl.errors import InvalidSweep

#: Channels at level 1; NCCL takes fewer where the communicator has fewer.
_ALL_CHANNELS: Final = 32
#: Large enough that bandwidth, not latency, is what is taken away.
_SIZE: Final = "64M"
#: A row of results: size, count, type, ... (nccl-tests writes comments with '#').
_ROW: Final = re.compile(r"(?:^|[>:\]\s])\d+\s+\d+\s+[a-z]\w*\s+\w+\s+-?\d+\s+[\d.]")


@dataclass(frozen=True, slots=True)
class Traffic:
    """The second nccl-tests: its binary, and the first free GPU of a node."""

    binary: str
    first_device: int
    #: GPUs of one process: 1 when a launcher starts one rank each.
    gpus_per_process: int = 1


def spare_gpus(num_gpus: int, ranks_per_node: int) -> int:
    """How many GPUs a trial leaves free on each node; raises InvalidSweep when none is left."""
    spare = num_gpus - ranks_per_node
    if spare < 1:
        raise InvalidSweep(
            f"interference 'traffic' needs GPUs that the trial leaves free, and {ranks_per_node} "
            f"ranks per node use all {num_gpus}; take groups with fewer ranks_per_node"
        )
    return spare


def traffic_argv(traffic: Traffic, level: float) -> list[str]:
    """Argument vector of the traffic (pure); it is under way with its first result row.

    `-N 0` never ends; `-c 0` since checking would pause the traffic.
    """
    channels = max(1, round(level * _ALL_CHANNELS))
    return [
        *("env", "-u", "NCCL_MIN_CTAS", f"NCCL_MAX_CTAS={channels}"),
        f"NCCL_TESTS_DEVICE={traffic.first_device}",
        traffic.binary,
        *("-b", _SIZE, "-e", _SIZE, "-g", str(traffic.gpus_per_process)),
        *("-n", "100", "-w", "5", "-c", "0", "-N", "0"),
    ]


def is_under_way(line: str) -> bool:
    """Whether a line of its output is a result row.

    >>> is_under_way("    67108864      16777216     float     sum      -1   274.2  244.7  428.3")
    True
    >>> is_under_way("#       size         count      type   redop    root     time   algbw")
    False
    """
    return not line.lstrip().startswith("#") and _ROW.search(line) is not None
