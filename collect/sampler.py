"""The health sampler: one process on each node beside the trials, a reading every PERIOD_S.

    python -m dynamiccl.collect.sampler

prints one line of JSON every PERIOD_S, which the launcher brings to whoever started it:

    {"sampler": "n1:4711", "time_s": 1760000000.2, "slowed": [false, true], "ecc_errors": [0, null],
     "nics": {"mlx5_0/1": [12, 4031]}}

`sampler` is host and process, `time_s` Unix time before the readings. Of each GPU there is whether
heat or power slows it (SLOWED), and its uncorrected memory errors since the driver loaded; null =
it does not tell. Without a driver, nvidia-ml-py or permission the lists are empty. Of each port of
an RDMA device there is what it lost or sent again and what was held back for congestion, since its
driver loaded (/sys/class/infiniband/DEVICE/ports/N: Linux,
Documentation/ABI/stable/sysfs-class-infiniband). One lost packet may be counted at both ends and
under several names, so a sum says whether, and not how many.

It is a process of its own, at low priority, so that it never delays a trial.
"""

import argparse
import json
import os
import platform
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from dynamiccl import cli
from dynamiccl.errors import MachineError

SYSFS: Final = Path("/sys")
PERIOD_S: Final = 0.2
#: What a starter writes to say: end when this input does.
HELLO: Final = b"\n"
#: How often the parent is looked for, in seconds.
_LOOK_S: Final = 1.0
#: Below the trials and everything else of the user's.
_NICENESS: Final = 10
#: Arguments of nvmlDeviceGetTotalEccErrors: NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC.
_UNCORRECTED_SINCE_LOADED: Final = (1, 0)
#: Lost, out of order, sent again, or broken on the way (Linux 6.12, drivers/infiniband/hw:
#: mlx5/counters.c, and efa/efa_verbs.c in the last line). Other drivers' names count nothing.
RETRIES: Final = (
    *("out_of_sequence", "packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err"),
    *("rnr_nak_retry_err", "roce_adp_retrans", "roce_adp_retrans_to", "rx_icrc_encapsulated"),
    *("retrans_pkts", "retrans_timeout_events"),
)
#: Marked by a switch for congestion, told to the sender, heeded by it (mlx5/counters.c).
CONGESTION: Final = ("np_ecn_marked_roce_packets", "np_cnp_sent", "rp_cnp_handled")
#: Of the port itself (drivers/infiniband/core/sysfs.c): bits that fell over, links that did.
PORT_ERRORS: Final = (
    *("symbol_error", "link_error_recovery", "link_downed"),
    *("local_link_integrity_errors", "port_rcv_errors"),
)


#: Bits of NVML's reasons for a low clock (nvml.h, CUDA 13.0: nvmlClocksEventReason*) that slow a
#: config by heat or power: software's power cap, a hardware slow-down by half or more, software's
#: and hardware's thermal ones, the power supply's brake. Idle clocks and a display's are no fault.
SLOWED: Final = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


def is_slowed(reasons: int) -> bool:
    """Whether these bits say that heat or power throttles the GPU.

    >>> is_slowed(0x1 | 0x2), is_slowed(0x1 | 0x40)
    (False, True)
    """
    return bool(reasons & SLOWED)


def load_nvml() -> Any:
    """Pynvml, initialised; raises MachineError without the package, the driver or the right."""
    try:
        import pynvml
    except ImportError as error:
        raise MachineError("no package nvidia-ml-py; pip install 'dynamiccl[telemetry]'") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise MachineError(f"nvmlInit: {error}") from error
    return pynvml


def ask_gpu(nvml: Any, index: int, function: str, *arguments: Any) -> Any:
    """What a function of `load_nvml` says of GPU number `index`; None where it refuses."""
    try:
        return getattr(nvml, function)(nvml.nvmlDeviceGetHandleByIndex(index), *arguments)
    except (AttributeError, nvml.NVMLError):  # an older pynvml, or driver
        return None


class Ending:
    """When a process that runs beside trials must end.

    It ends on SIGTERM or SIGINT (by SystemExit), when its parent is gone (PR_SET_PDEATHSIG would
    tell of the *thread* that started us, prctl(2)), or when its standard input ends after a HELLO:
    through srun and mpirun that is the only connection to the starter on another node. An input
    that ends without HELLO has no meaning: they pass such a one when they have none themselves.
    """

    def __init__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sys.exit(0))
        self._parent = os.getppid()
        self._is_greeted = False
        self._poll = select.poll()
        # A closed one answers POLLNVAL at the first look, and is dropped there.
        self._poll.register(0, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Sleep so many seconds, or until the end; returns whether it has come."""
        until, left_s = time.monotonic() + seconds, seconds
        while not self._has_come(min(max(left_s, 0.0), _LOOK_S)):
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
        return True

    def _has_come(self, patience_s: float) -> bool:
        for file, event in self._poll.poll(patience_s * 1000.0):
            try:
                heard = b"" if event & select.POLLNVAL else os.read(file, 4096)
            except OSError:
                heard = b""  # a terminal that is not ours to read (EIO), a directory
            if heard:
                self._is_greeted = True
            elif self._is_greeted:
                return True
            else:
                self._poll.unregister(file)
        return os.getppid() != self._parent


def port_counters(root: Path = SYSFS) -> dict[str, list[list[Path]]]:
    """DEVICE/PORT -> the files of its retries and of its congestion, of ports that have any."""
    found = {}
    for port in sorted((root / "class" / "infiniband").glob("*/ports/*")):
        folder = port / "hw_counters"
        retries = [
            *(folder / name for name in RETRIES),
            *(port / "counters" / e for e in PORT_ERRORS),
        ]
        both = [retries, [folder / name for name in CONGESTION]]
        files = [[path for path in some if path.is_file()] for some in both]
        if any(files):
            found[f"{port.parents[1].name}/{port.name}"] = files
    return found


def read_counters(files: Sequence[Path]) -> int | None:
    """The sum of some counters since the driver loaded; None where none can be read."""
    counts = []
    for path in files:
        # The device has just gone, or says "N/A (no PMA)".
        with suppress(OSError, ValueError):
            counts.append(int(path.read_text(encoding="ascii")))
    return sum(counts) if counts else None


def sampler_argv() -> list[str]:
    """Argument vector of a sampler."""
    return [sys.executable, "-m", "dynamiccl.collect.sampler"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print readings until the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sysfs", type=Path, default=SYSFS, help="where NICs tell what they count")
    ports = port_counters(parser.parse_args(arguments).sysfs)
    os.nice(_NICENESS)
    nvml, num_gpus = None, 0
    # What a node is, asked before a sweep and by the doctor, says why there is none.
    with suppress(MachineError):
        nvml = load_nvml()
        # A GPU that is broken counts, and refuses its handle.
        num_gpus = nvml.nvmlDeviceGetCount()
    ending = Ending()
    while True:
        line = {"sampler": f"{platform.node()}:{os.getpid()}", "time_s": round(time.time(), 4)}
        line |= _readings(nvml, num_gpus)
        line["nics"] = {port: [read_counters(one) for one in both] for port, both in ports.items()}
        print(json.dumps(line), flush=True)  # noqa: T201 - what it is for
        if ending.wait(PERIOD_S):
            return


def _readings(nvml: Any, num_gpus: int) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"slowed": [], "ecc_errors": []}
    for gpu in range(num_gpus):
        bits = ask_gpu(nvml, gpu, "nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # an older driver
            bits = ask_gpu(nvml, gpu, "nvmlDeviceGetCurrentClocksThrottleReasons")
        found["slowed"].append(None if bits is None else is_slowed(bits))
        errors = ask_gpu(nvml, gpu, "nvmlDeviceGetTotalEccErrors", *_UNCORRECTED_SINCE_LOADED)
        found["ecc_errors"].append(errors)
    return found


if __name__ == "__main__":
    cli.run(main)
