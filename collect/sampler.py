"""The health sampler: one process on each node beside the trials, a reading every PERIOD_S.

    python -m dynamiccl.collect.sampler

prints one line of JSON every PERIOD_S, which the launcher brings to whoever started it:

    {"sampler": "n1:4711", "time_s": 1760000000.2, "read": {
     "gpu0": {"throttled": false, "ecc_errors": 0}, "gpu1": {"throttled": true, "ecc_errors": null},
     "mlx5_0/1": {"nic_retries": 12, "nic_congestion": 4031}}}

`sampler` is host and process, `time_s` Unix time before the reading. Of each GPU there is whether
heat or power slows it (SLOWED), and its uncorrected memory errors since the driver loaded. Of each
port of an RDMA device there is what it lost or sent again and what was held back for congestion,
since its driver loaded (/sys/class/infiniband/DEVICE/ports/N: Linux,
Documentation/ABI/stable/sysfs-class-infiniband). One lost packet may be counted at both ends and
under several names, so a sum says whether, and not how many. Null: it does not tell, or there is
none; without a driver, nvidia-ml-py or permission there are no GPUs.

It is a process of its own, at low priority, so that it never delays a trial.
"""

import json
import os
import platform
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from dynamiccl import cli
from dynamiccl.errors import MachineError

SYSFS: Final = Path("/sys")
PERIOD_S: Final = 0.2
#: What a starter writes to say: end when this input does.
HELLO: Final = b"\n"
#: What counts for which column of a measurement, in the folder of a port.
COUNTERS: Final = {
    "nic_retries": (
        # Lost, out of order, sent again, or broken on the way (Linux 6.12, drivers/infiniband/hw:
        # mlx5/counters.c, then efa/efa_verbs.c). Other drivers' names count nothing.
        *("hw_counters/out_of_sequence", "hw_counters/packet_seq_err"),
        *("hw_counters/implied_nak_seq_err", "hw_counters/local_ack_timeout_err"),
        *("hw_counters/rnr_nak_retry_err", "hw_counters/roce_adp_retrans"),
        *("hw_counters/roce_adp_retrans_to", "hw_counters/rx_icrc_encapsulated"),
        *("hw_counters/retrans_pkts", "hw_counters/retrans_timeout_events"),
        # Of the port itself (drivers/infiniband/core/sysfs.c): bits that fell over, links that did.
        *("counters/symbol_error", "counters/link_error_recovery", "counters/link_downed"),
        *("counters/local_link_integrity_errors", "counters/port_rcv_errors"),
    ),
    "nic_congestion": (
        # Marked by a switch for congestion, told to the sender, heeded by it (mlx5/counters.c).
        *("hw_counters/np_ecn_marked_roce_packets", "hw_counters/np_cnp_sent"),
        "hw_counters/rp_cnp_handled",
    ),
}
#: Bits of NVML's reasons for a low clock (nvml.h, CUDA 13.0: nvmlClocksEventReason*) that slow a
#: config by heat or power: software's power cap, a hardware slow-down by half or more, software's
#: and hardware's thermal ones, the power supply's brake. Idle clocks and a display's are no fault.
SLOWED: Final = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
SAMPLER_ARGV: Final = (sys.executable, "-m", "dynamiccl.collect.sampler")


def load_nvml() -> Any:
    """Pynvml, initialised; raises MachineError without the package, the driver or the right."""
    try:
        import pynvml
    except ImportError as error:
        raise MachineError("no package nvidia-ml-py; pip install '.[telemetry]'") from error
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


def end_with_starter() -> None:
    """End this process on SIGTERM or SIGINT, and when its standard input ends after a HELLO.

    Through srun and mpirun the input is the only connection to the starter on another node. One
    that ends without HELLO has no meaning: they pass such a one when they have none themselves.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))

    def listen() -> None:
        # It may be closed, a directory, or a terminal that is not ours to read.
        with suppress(OSError):
            if os.read(0, 1):
                while os.read(0, 4096):
                    pass
                os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=listen, daemon=True).start()


def outlives(parent: int, seconds: float) -> bool:
    """Sleep so many seconds; returns whether the process `parent`, which started us, is gone.

    PR_SET_PDEATHSIG would tell of the *thread* that started us (prctl(2)).
    """
    if seconds > 0:
        time.sleep(seconds)
    return os.getppid() != parent


def read_port(folder: Path) -> dict[str, int | None]:
    """What an RDMA port has counted since its driver loaded, by column; None = it does not tell."""
    found: dict[str, int | None] = {}
    for column, names in COUNTERS.items():
        counts = []
        for name in names:
            # It has no such counter, has just gone, or says "N/A (no PMA)".
            with suppress(OSError, ValueError):
                counts.append(int((folder / name).read_text(encoding="ascii")))
        found[column] = sum(counts) if counts else None
    return found


def read_gpu(nvml: Any, gpu: int) -> dict[str, int | None]:
    """Whether a GPU is throttled, and its memory errors."""
    bits = ask_gpu(nvml, gpu, "nvmlDeviceGetCurrentClocksEventReasons")
    if bits is None:  # an older driver
        bits = ask_gpu(nvml, gpu, "nvmlDeviceGetCurrentClocksThrottleReasons")
    # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC.
    errors = ask_gpu(nvml, gpu, "nvmlDeviceGetTotalEccErrors", 1, 0)
    return {"throttled": None if bits is None else bool(bits & SLOWED), "ecc_errors": errors}


def main(sysfs: Path = SYSFS) -> None:
    """Print readings until the end."""
    folders = sorted(sysfs.glob("class/infiniband/*/ports/*"))
    # Those of which we know no counter say nothing about the others.
    known = [port for port in folders if {*read_port(port).values()} != {None}]
    ports = {f"{port.parents[1].name}/{port.name}": port for port in known}
    os.nice(10)  # below the trials and everything else of the user's
    nvml, num_gpus = None, 0
    # What a node is, asked before a sweep and by the doctor, says why there is none.
    with suppress(MachineError):
        nvml = load_nvml()
        # A GPU that is broken counts, and refuses its handle.
        num_gpus = nvml.nvmlDeviceGetCount()
    parent = os.getppid()
    end_with_starter()
    while True:
        line = {"sampler": f"{platform.node()}:{os.getpid()}", "time_s": round(time.time(), 4)}
        gpus = {f"gpu{gpu}": read_gpu(nvml, gpu) for gpu in range(num_gpus)}
        nics = {name: read_port(port) for name, port in ports.items()}
        gpus = gpus or {"no GPU": {"throttled": None, "ecc_errors": None}}
        read = gpus | (nics or {"no NIC": dict.fromkeys(COUNTERS)})
        print(json.dumps(line | {"read": read}), flush=True)  # noqa: T201 - what it is for
        if outlives(parent, PERIOD_S):
            return


if __name__ == "__main__":
    cli.run(main)
