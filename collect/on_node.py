"""What runs on each node of a sweep: its facts, the health sampler, and busy cores.

    python -m dynamiccl.collect.on_node facts

prints a line of JSON by columns of a measurement; null = unknown. NICs are those of
/sys/class/infiniband (Linux Documentation/ABI/stable/sysfs-class-infiniband) and /sys/class/net
(Documentation/ABI/testing/sysfs-class-net).

    python -m dynamiccl.collect.on_node sampler

prints one every PERIOD_S, at low priority, so that it never delays a trial:

    {"sampler": "n1:4711", "time_s": 1760000000.2, "read": {
     "gpu0": {"throttled": false, "ecc_errors": 0}, "gpu1": {"throttled": true, "ecc_errors": null},
     "mlx5_0/1": {"nic_retries": 12, "nic_congestion": 4031}}}

`sampler` is host and process, `time_s` Unix time before the reading. GPUs tell of heat or power
(SLOWED), and of uncorrected memory errors since the driver loaded; RDMA ports of what they lost or
sent again, and what congestion held back. A lost packet may be counted at both ends and under
several names: a sum says whether, not how many.

    python -m dynamiccl.collect.on_node busy 0.5

keeps a share of its cores busy, and prints `ready`. The launcher must not bind it to a few
(`srun --cpu-bind=none`). Both end with their starter. No library is imported but pynvml.
"""

import json
import multiprocessing
import os
import platform
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from dynamiccl.errors import MachineError
from dynamiccl.libraries import node_part

SYSFS: Final = Path("/sys")
PERIOD_S: Final = 0.2
#: From a starter: end when this input does. srun and mpirun without input pass an empty one.
HELLO: Final = b"\n"
COUNTERS: Final = {
    "nic_retries": (
        # Lost, out of order, sent again, or broken (Linux 6.12, drivers/infiniband/hw:
        # mlx5/counters.c, efa/efa_verbs.c).
        *("hw_counters/out_of_sequence", "hw_counters/packet_seq_err"),
        *("hw_counters/implied_nak_seq_err", "hw_counters/local_ack_timeout_err"),
        *("hw_counters/rnr_nak_retry_err", "hw_counters/roce_adp_retrans"),
        *("hw_counters/roce_adp_retrans_to", "hw_counters/rx_icrc_encapsulated"),
        *("hw_counters/retrans_pkts", "hw_counters/retrans_timeout_events"),
        # Of the port (drivers/infiniband/core/sysfs.c): bits that fell over, links that did.
        *("counters/symbol_error", "counters/link_error_recovery", "counters/link_downed"),
        *("counters/local_link_integrity_errors", "counters/port_rcv_errors"),
    ),
    "nic_congestion": (
        # Marked by a switch, told to the sender, heeded by it (mlx5/counters.c).
        *("hw_counters/np_ecn_marked_roce_packets", "hw_counters/np_cnp_sent"),
        "hw_counters/rp_cnp_handled",
    ),
}
#: Of heat or power (nvml.h, CUDA 13.0: nvmlClocksEventReason*): software's power cap, a hardware
#: slow-down, software's and hardware's thermal ones, the power brake.
SLOWED: Final = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
ON_NODE: Final = (sys.executable, "-m", "dynamiccl.collect.on_node")
FACTS_ARGV: Final = (*ON_NODE, "facts")
SAMPLER_ARGV: Final = (*ON_NODE, "sampler")
READY: Final = "ready"
#: nvmlNvLinkVersion (nvml.h, NVML_NVLINK_VERSION_*).
_NVLINK_GENERATION: Final[Mapping[int, int]] = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
_CPU_VENDORS: Final = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "CPU implementer": "arm"}


def load_nvml() -> Any:
    """Pynvml. Raises MachineError without the package, the driver or the right."""
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
    """What NVML says of a GPU; None where it refuses."""
    try:
        return getattr(nvml, function)(nvml.nvmlDeviceGetHandleByIndex(index), *arguments)
    except (AttributeError, nvml.NVMLError):  # an older pynvml, or driver
        return None


def node_facts(sysfs: Path = SYSFS, proc: Path = Path("/proc")) -> dict[str, Any]:
    """The facts of this node; what cannot be read is unknown. `nvlink_generation` 0 = no NVLink."""
    nics, cpus = _nic_facts(sysfs), _text(proc / "cpuinfo")
    facts = {
        "nvml_error": None,
        "num_gpus": None,
        "cpu_vendor": next((name for word, name in _CPU_VENDORS.items() if word in cpus), None),
        "node_fingerprint": _fingerprint(proc / "driver" / "nvidia", nics),
        **nics,
    }
    try:
        return facts | _gpu_facts(load_nvml())
    except MachineError as error:
        return facts | {"nvml_error": str(error)}


def _gpu_facts(nvml: Any) -> dict[str, Any]:
    """GPU 0 stands for all in capability and NVLinks."""
    ask, num_gpus = partial(ask_gpu, nvml), nvml.nvmlDeviceGetCount()
    if not num_gpus:
        raise MachineError("NVML shows no GPU")
    # One without a name is taken to be like the others.
    names = {ask(gpu, "nvmlDeviceGetName") for gpu in range(num_gpus)} - {None}
    modes = [ask(gpu, "nvmlDeviceGetMigMode") for gpu in range(num_gpus)]
    migs = [None if mode is None else bool(mode[0]) for mode in modes]
    capability = ask(0, "nvmlDeviceGetCudaComputeCapability")
    # NVML_NVLINK_MAX_LINKS was 18 until NVLink 5.
    links = [k for k in range(36) if ask(0, "nvmlDeviceGetNvLinkState", k)]
    version = ask(0, "nvmlDeviceGetNvLinkVersion", links[0]) if links else 0
    remote = ask(0, "nvmlDeviceGetNvLinkRemoteDeviceType", links[0]) if links else 0
    return {
        "num_gpus": num_gpus,
        "driver_version": nvml.nvmlSystemGetDriverVersion(),
        "gpu": names.pop() if len(names) == 1 else None,
        "compute_capability": capability and float(f"{capability[0]}.{capability[1]}"),
        "mig": True if any(migs) else None if None in migs else False,
        "nvlink_generation": _NVLINK_GENERATION.get(version) if version else version,
        "nvlinks_per_gpu": len(links),
        "nvswitch": None if remote is None else remote == 2,  # NVML_NVLINK_DEVICE_TYPE_SWITCH
    }


def _fingerprint(driver: Path, nics: Mapping[str, Any]) -> str | None:
    """The node as the plugin names it (`serve/plugin/prepare/prepare.cpp`)."""
    models = []
    for path in (driver / "gpus").glob("*/information"):
        text = _text(path, encoding="latin-1")
        fields = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
        if fields.get("GPU Excluded") != "Yes":
            models.append(fields.get("Model", ""))
    if not models or not all(models):
        return None
    is_mig = any((driver / "capabilities").glob("gpu*/mig/gi*"))
    kind, count = nics["nic_kind"], nics["nics_per_node"] or 0
    return node_part(models, mig=is_mig, nic_kind=kind, num_nics=count)


def _nic_facts(sysfs: Path) -> dict[str, Any]:
    """The fastest active RDMA ports, which NCCL would use, else the fastest socket."""
    found: Counter[tuple[float, str]] = Counter()
    for port in (sysfs / "class" / "infiniband").glob("*/ports/*"):
        if _text(port / "state").endswith(": ACTIVE"):
            driver = (port.parents[1] / "device" / "driver").resolve().name
            layer = _text(port / "link_layer").lower()
            kind = "roce" if layer == "ethernet" else "infiniband"
            found[_number(port / "rate"), "efa" if driver == "efa" else kind] += 1
    if not found:
        paths = (sysfs / "class" / "net").glob("*")
        devices = [path for path in paths if path.is_dir() and path.name != "lo"]
        # A node may have hundreds of virtual ones: only where none has hardware.
        real = [path for path in devices if (path / "device").exists()]
        # Mbit/s; a virtual device has none (EINVAL), or -1.
        speeds = [_number(path / "speed") for path in real or devices]
        found = Counter((speed / 1000.0, "socket") for speed in speeds)
    best, count = max(found.items(), default=((0.0, None), None))
    return {"nic_kind": best[1], "nic_gbits_per_s": best[0] or None, "nics_per_node": count}


def _number(path: Path) -> float:
    found = re.match(r"[0-9]+(\.[0-9]+)?(?=\s|$)", _text(path))
    return float(found[0]) if found else 0.0


def _text(path: Path, encoding: str = "utf-8") -> str:
    """Empty where a file is not there (EFA has no link_layer) or cannot be read."""
    try:
        return path.read_text(encoding=encoding, errors="replace").strip()
    except OSError:
        return ""


def end_with_starter() -> None:
    """End on SIGTERM or SIGINT, and when standard input ends after a HELLO."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))

    def listen() -> None:
        # It may be closed, a directory, or no terminal of ours.
        with suppress(OSError):
            if os.read(0, 1):
                while os.read(0, 4096):
                    pass
                os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=listen, daemon=True).start()


def outlives(parent: int, seconds: float) -> bool:
    """Sleep; whether `parent` is gone. PR_SET_PDEATHSIG would tell of its *thread* (prctl(2))."""
    if seconds > 0:
        time.sleep(seconds)
    return os.getppid() != parent


def read_port(folder: Path) -> dict[str, int | None]:
    """Counts since the driver loaded, by column; None = it does not tell."""
    found: dict[str, int | None] = {}
    for column, names in COUNTERS.items():
        counts = []
        for name in names:
            # No such counter, just gone, or "N/A (no PMA)".
            with suppress(OSError, ValueError):
                counts.append(int((folder / name).read_text(encoding="ascii")))
        found[column] = sum(counts) if counts else None
    return found


def read_gpu(nvml: Any, gpu: int) -> dict[str, int | None]:
    """Whether it is throttled, and its memory errors."""
    bits = ask_gpu(nvml, gpu, "nvmlDeviceGetCurrentClocksEventReasons")
    if bits is None:  # an older driver
        bits = ask_gpu(nvml, gpu, "nvmlDeviceGetCurrentClocksThrottleReasons")
    # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC.
    errors = ask_gpu(nvml, gpu, "nvmlDeviceGetTotalEccErrors", 1, 0)
    return {"throttled": None if bits is None else bool(bits & SLOWED), "ecc_errors": errors}


def sample(sysfs: Path = SYSFS) -> None:
    """Print readings until the end."""
    folders = sorted(sysfs.glob("class/infiniband/*/ports/*"))
    # Ports without a known counter say nothing about the others.
    known = [port for port in folders if {*read_port(port).values()} != {None}]
    ports = {f"{port.parents[1].name}/{port.name}": port for port in known}
    os.nice(10)  # below the trials and everything else of the user's
    nvml, num_gpus = None, 0
    with suppress(MachineError):
        nvml = load_nvml()
        # A broken GPU counts, and refuses its handle.
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


def keep_busy(level: float) -> None:
    """Keep a share of the cores busy until the end."""
    fork, parent = multiprocessing.get_context("fork"), os.getppid()
    whole, part = divmod(level * len(os.sched_getaffinity(0)) + 1e-9, 1.0)
    for share in [1.0] * int(whole) + ([part] if part > 1e-6 else []):
        # Given our number, they end with us, even when we are killed.
        fork.Process(target=_stress, args=(share, os.getpid()), daemon=True).start()
    end_with_starter()
    print(READY, flush=True)  # noqa: T201 - for whoever started it
    while not outlives(parent, 1.0):
        pass


def _stress(level: float, parent: int) -> None:
    rest_s = 0.0
    while not outlives(parent, rest_s):
        began = time.perf_counter()
        # Shorter than a launch, longer than the clock's grain.
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        rest_s = (time.perf_counter() - began) * (1.0 / level - 1.0)


def main() -> None:
    """Run the named program."""
    with suppress(BrokenPipeError):  # nobody listens any more
        match sys.argv[1:]:
            case ["facts"]:
                print(json.dumps(node_facts()))  # noqa: T201 - what it is for
            case ["sampler"]:
                sample()
            case ["busy", level]:
                keep_busy(float(level))
            case _:
                raise SystemExit("usage: ... on_node facts | sampler | busy LEVEL")


if __name__ == "__main__":
    main()
