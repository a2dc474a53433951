"""The health sampler: one process per node beside the trials, prints a reading every PERIOD_S.

    python -m dynamiccl.collect.telemetry.sampler

prints one line of JSON every PERIOD_S, which the launcher brings to whoever started it:

    {"sampler": "n1:4711", "time_s": 1760000000.2, "slowed": [false, true], "ecc_errors": [0, null],
     "nics": {"mlx5_0/1": [12, 4031]}}

`sampler` is host and process, `time_s` Unix time before the readings. Of each GPU there is whether
heat or power slows it (throttle.SLOWED), and its uncorrected memory errors since the driver loaded;
null = it does not tell. Without a driver, nvidia-ml-py or permission the lists are empty. Of each
port of an RDMA device there is what it lost or sent again and what was held back for congestion
(nic_counters.py), since its driver loaded.

It is a process of its own so that it never delays a trial: it runs at low priority and holds no
lock that a trial waits for. It ends on SIGTERM or SIGINT, or with whoever started it (see
ending.py).
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dynamiccl import cli
from dynamiccl.collect.ending import Ending
from dynamiccl.collect.telemetry.nic_counters import port_counters
from dynamiccl.collect.telemetry.nics import SYSFS
from dynamiccl.collect.telemetry.nvml import Nvml, Refused
from dynamiccl.collect.telemetry.throttle import is_slowed

PERIOD_S: Final = 0.2
#: Below the trials and everything else of the user's.
_NICENESS: Final = 10
#: Newer drivers first.
_REASONS: Final = (
    ("nvmlDeviceGetCurrentClocksEventReasons",),
    ("nvmlDeviceGetCurrentClocksThrottleReasons",),
)
#: NVML_MEMORY_ERROR_TYPE_UNCORRECTED and NVML_VOLATILE_ECC (nvml.h).
_ECC_ERRORS: Final = (("nvmlDeviceGetTotalEccErrors", 1, 0),)


def sampler_argv() -> list[str]:
    """Argument vector of a sampler."""
    return [sys.executable, "-m", "dynamiccl.collect.telemetry.sampler"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print readings until SIGTERM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sysfs", type=Path, default=SYSFS, help="where NICs tell what they count")
    sysfs = parser.parse_args(arguments).sysfs
    os.nice(_NICENESS)
    sampler, nvml = f"{platform.node()}:{os.getpid()}", _nvml()
    ports = port_counters(sysfs)
    with Ending() as ending:
        while True:
            line = {"sampler": sampler, "time_s": round(time.time(), 4), **_readings(nvml)}
            line["nics"] = {port.name: port.read() for port in ports}
            print(json.dumps(line), flush=True)  # noqa: T201 - what it is for
            if ending.wait(PERIOD_S):
                return


def _nvml() -> Nvml | None:
    try:
        return Nvml()
    except Refused:
        # What a node is, asked before a sweep and by the doctor, says why.
        return None


def _readings(nvml: Nvml | None) -> dict[str, Any]:
    if nvml is None:
        return {"slowed": [], "ecc_errors": []}
    gpus = range(nvml.num_gpus)
    reasons = [_ask(nvml, gpu, *_REASONS) for gpu in gpus]
    return {
        "slowed": [None if bits is None else is_slowed(bits) for bits in reasons],
        "ecc_errors": [_ask(nvml, gpu, *_ECC_ERRORS) for gpu in gpus],
    }


def _ask(nvml: Nvml, gpu: int, *ways: tuple[Any, ...]) -> int | None:
    """The first answer among (function, arguments after the GPU) that NVML supports, else None."""
    for function, *arguments in ways:
        try:
            return int(nvml.ask(function, nvml.handle(gpu), *arguments))
        except Refused:
            continue
    return None


if __name__ == "__main__":
    cli.run(main)
