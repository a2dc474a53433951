"""The health sampler: one process per node beside the trials, prints a reading every PERIOD_S.

    python -m dynamiccl.collect.sampler

prints one line of JSON every PERIOD_S, which the launcher brings to whoever started it:

    {"sampler": "n1:4711", "time_s": 1760000000.2, "slowed": [false, true], "ecc_errors": [0, null],
     "nics": {"mlx5_0/1": [12, 4031]}}

`sampler` is host and process, `time_s` Unix time before the readings. Of each GPU there is whether
heat or power slows it (SLOWED), and its uncorrected memory errors since the driver loaded; null =
it does not tell. Without a driver, nvidia-ml-py or permission the lists are empty. Of each port of
an RDMA device there is what it lost or sent again and what was held back for congestion, since its
driver loaded.

    /sys/class/infiniband/DEVICE/ports/N/hw_counters/NAME      the driver's own names, below
    /sys/class/infiniband/DEVICE/ports/N/counters/NAME         the port's, InfiniBand and RoCE

(Linux, Documentation/ABI/stable/sysfs-class-infiniband). Names differ from driver to driver; those
of a driver that is not here count nothing. One lost packet may be counted at both ends and under
several names, so a sum says whether, and not how many.

It is a process of its own so that it never delays a trial: it runs at low priority and holds no
lock that a trial waits for. It ends as ending.py says.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from enum import IntFlag
from pathlib import Path
from typing import Any, Final

from dynamiccl import cli
from dynamiccl.collect.ending import Ending

SYSFS: Final = Path("/sys")
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
#: Lost, out of order, sent again, or broken on the way. Kernel 6.12, drivers/infiniband/hw.
RETRIES: Final = (
    # mlx5/counters.c; rx_icrc_encapsulated: a checksum that was wrong.
    *("out_of_sequence", "packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err"),
    *("rnr_nak_retry_err", "roce_adp_retrans", "roce_adp_retrans_to", "rx_icrc_encapsulated"),
    # bnxt_re/hw_counters.c
    *("to_retransmits", "seq_err_naks_rcvd", "rnr_naks_rcvd", "missing_resp", "oos_drop_count"),
    # irdma/verbs.c, and its names before and after 6.16
    *("tcpRetransSegs", "RetransSegs", "Nak Sequence Error", "Nak Sequence Error Implied"),
    *("RTO", "Rcvd Out of order packets", "CRC errors", "RNR received"),
    # efa/efa_verbs.c
    *("retrans_pkts", "retrans_timeout_events"),
)
#: Marked by a switch for congestion, told to the sender, heeded by it.
CONGESTION: Final = (
    *("np_ecn_marked_roce_packets", "np_cnp_sent", "rp_cnp_handled"),
    *("rx_ecn_marked_pkts", "tx_cnp_pkts", "rx_cnp_pkts"),
    *("RxECNMrkd", "cnpSent", "cnpHandled"),
)
#: Of the port itself (drivers/infiniband/core/sysfs.c): bits that fell over, links that did.
PORT_ERRORS: Final = (
    *("symbol_error", "link_error_recovery", "link_downed"),
    *("local_link_integrity_errors", "port_rcv_errors"),
)


class ClockReason(IntFlag):
    """One bit for each reason (nvml.h, `nvmlClocksEventReason*`, CUDA 12.9 and 13.0)."""

    GPU_IDLE = 0x1
    #: The user limited the clock: application clocks, or `nvidia-smi -lgc`.
    APPLICATIONS_CLOCKS_SETTING = 0x2
    #: The driver lowers the clock to keep to the power limit.
    SW_POWER_CAP = 0x4
    #: Hardware lowers it by half or more: heat, or power brake, or peak power.
    HW_SLOWDOWN = 0x8
    SYNC_BOOST = 0x10
    #: The driver lowers it to keep to the target temperature.
    SW_THERMAL_SLOWDOWN = 0x20
    HW_THERMAL_SLOWDOWN = 0x40
    #: The server's power supply asks for less (a pin of the board).
    HW_POWER_BRAKE_SLOWDOWN = 0x80
    DISPLAY_CLOCK_SETTING = 0x100


#: Slowed by heat or power, so that the same config runs slower than it does on a healthy GPU. Idle
#: clocks, clocks that the user chose and those of a display are no fault of the trial.
SLOWED: Final = (
    ClockReason.SW_POWER_CAP
    | ClockReason.HW_SLOWDOWN
    | ClockReason.SW_THERMAL_SLOWDOWN
    | ClockReason.HW_THERMAL_SLOWDOWN
    | ClockReason.HW_POWER_BRAKE_SLOWDOWN
)


def is_slowed(reasons: int) -> bool:
    """Whether these bits say that heat or power throttles the GPU.

    >>> is_slowed(0x1 | 0x2), is_slowed(0x1 | 0x40)
    (False, True)
    """
    return bool(reasons & SLOWED)


def reason_names(reasons: int) -> tuple[str, ...]:
    """The reasons in words, known ones by name and others by their bit.

    >>> reason_names(0x44 | 0x8000)
    ('sw_power_cap', 'hw_thermal_slowdown', 'bit 0x8000')
    """
    names = [reason.name.lower() for reason in ClockReason if reasons & reason and reason.name]
    known = sum(ClockReason)
    other = reasons & ~known
    names += [f"bit {1 << i:#x}" for i in range(other.bit_length()) if other >> i & 1]
    return tuple(names)


class Refused(Exception):
    """Raised when NVML is missing or returns an error; the message says why."""


class Nvml:
    """The library after `nvmlInit`."""

    def __init__(self) -> None:
        """Import and initialise; raises Refused without the package, the driver or the right."""
        try:
            import pynvml
        except ImportError as error:
            raise Refused("no package nvidia-ml-py; pip install 'dynamiccl[telemetry]'") from error
        self._lib: Any = pynvml
        self.ask("nvmlInit")
        #: GPUs that the driver shows; a broken one counts, and refuses its handle.
        self.num_gpus: int = self.ask("nvmlDeviceGetCount")

    def handle(self, index: int) -> Any:
        """NVML's handle of GPU number `index`; raises Refused."""
        return self.ask("nvmlDeviceGetHandleByIndex", index)

    def ask(self, function: str, *arguments: Any) -> Any:
        """Call a function of pynvml; raises Refused."""
        try:
            return getattr(self._lib, function)(*arguments)
        except AttributeError as error:
            raise Refused(f"nvidia-ml-py has no {function}") from error
        except self._lib.NVMLError as error:
            raise Refused(f"{function}: {error}") from error

    def close(self) -> None:
        """Call `nvmlShutdown`."""
        self.ask("nvmlShutdown")


def port_counters(root: Path = SYSFS) -> dict[str, tuple[list[Path], list[Path]]]:
    """DEVICE/PORT -> the files of its retries and of its congestion, of ports that have any."""

    def present(folder: Path, names: Sequence[str]) -> list[Path]:
        return [path for name in names if (path := folder / name).is_file()]

    found = {}
    for port in sorted((root / "class" / "infiniband").glob("*/ports/*")):
        retries = present(port / "hw_counters", RETRIES) + present(port / "counters", PORT_ERRORS)
        congestion = present(port / "hw_counters", CONGESTION)
        if retries or congestion:
            found[f"{port.parents[1].name}/{port.name}"] = (retries, congestion)
    return found


def read_counters(files: Sequence[Path]) -> int | None:
    """The sum of some counters since the driver loaded; None where none can be read."""
    counts = []
    for path in files:
        try:
            counts.append(int(path.read_text(encoding="ascii")))
        except (OSError, ValueError):
            # The device has just gone, or says "N/A (no PMA)".
            continue
    return sum(counts) if counts else None


def sampler_argv() -> list[str]:
    """Argument vector of a sampler."""
    return [sys.executable, "-m", "dynamiccl.collect.sampler"]


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
            line["nics"] = {
                port: [read_counters(files) for files in both] for port, both in ports.items()
            }
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
