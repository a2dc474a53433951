"""Checks of the host: CPU clocks, shared memory, disk, and system programs that a run needs."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath
from typing import Final

from dynamiccl.checks import Check, fail, ok, unknown, warn
from dynamiccl.collect.doctor.context import Context
from dynamiccl.machine import Machine

_GOVERNORS: Final = "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
_NODE_FACTS: Final = ("-m", "dynamiccl.collect.nodes")
#: What finds torch and a GPU for it, without the cost of a GEMM.
ASK_TORCH: Final = "import torch; print(torch.__version__, torch.cuda.is_available())"
_GIB: Final = 1 << 30
_MIB: Final = 1 << 20


def check_host(machine: Machine, context: Context) -> Iterator[Check]:
    """All host checks."""
    yield _governor(machine)
    yield _shared_memory(machine)
    yield _disk(machine, context)
    yield _file_system(machine, context)
    if context.wants_telemetry:
        yield _telemetry(machine)
    if "gemm" in context.interference:
        yield _torch(machine)


def _governor(machine: Machine) -> Check:
    texts = (machine.read(path) for path in machine.paths(_GOVERNORS))
    governors = Counter(text.strip() for text in texts if text)
    if not governors:
        return unknown(
            "CPU governor",
            "the kernel does not show it",
            "usual in virtual machines; nothing to do",
        )
    shown = ", ".join(f"{name} on {count} CPUs" for name, count in governors.most_common())
    if set(governors) == {"performance"}:
        return ok("CPU governor", shown)
    return warn(
        "CPU governor",
        shown,
        "small messages wait for the CPU to wake up: 'cpupower frequency-set -g performance' "
        "(root)",
    )


def _shared_memory(machine: Machine) -> Check:
    free = machine.free_bytes("/dev/shm")
    if free is None:
        return fail("/dev/shm", "not there", "NCCL's SHM transport needs it: mount a tmpfs there")
    if free < _GIB:
        return warn(
            "/dev/shm",
            f"{free // _MIB} MiB free",
            "NCCL's SHM transport takes about 10 MiB a channel and peer, and fails without: give a "
            "container '--shm-size=1g' or more, or remove what earlier runs left (/dev/shm/nccl-*)",
        )
    return ok("/dev/shm", f"{free / _GIB:.1f} GiB free")


def _disk(machine: Machine, context: Context) -> Check:
    free = machine.free_bytes(context.out)
    name, advice = "disk", "a full disk stops a run; take another --out, or make room"
    if free is None:
        return unknown(name, f"{context.out} cannot be asked", advice)
    shown = f"{free / _GIB:.1f} GiB free for {context.out}"
    if free < 100 * _MIB:
        return fail(name, shown, advice)
    return warn(name, shown, advice) if free < 2 * _GIB else ok(name, shown)


def _file_system(machine: Machine, context: Context) -> Check:
    """Check the file system of the data: its type, and whether `flock`, which a run uses, works."""
    out = PurePath(context.out)
    for place in (out, *out.parents):  # it may have to be made yet
        found = machine.run("stat", "--file-system", "--format=%T", str(place))
        if found.worked:
            break
    else:
        return unknown("file system", f"{context.out} cannot be asked: {found.first_line}")
    locked = machine.run("flock", "--nonblock", str(place), "true")
    if locked.worked:
        return ok("file system", f"{found.first_line}, which knows file locks")
    return warn(
        "file system",
        f"{found.first_line}, no file locks ({locked.first_line})",
        "a run is known by a file 'owner' then: after a node died Slurm is asked whether its job "
        "is over, and elsewhere 'run --take-over' is needed",
    )


def _telemetry(machine: Machine) -> Check:
    """Ask NVML as a sampler would, in a process of its own."""
    ran = machine.run(sys.executable, *_NODE_FACTS)
    try:
        error = json.loads(ran.output)["nvml_error"]
    except (ValueError, KeyError, TypeError):
        last = ran.output.strip().rpartition("\n")[2]
        return unknown("telemetry", f"no facts about this node: {last or 'no output'}")
    if error is None:
        return ok("telemetry", "NVML answers")
    return warn(
        "telemetry",
        f"no GPU readings ({error})",
        "throttling and memory errors will not be noticed",
    )


def _torch(machine: Machine) -> Check:
    ran = machine.run(sys.executable, "-c", ASK_TORCH)
    last = ran.output.strip().rpartition("\n")[2]
    advice = "interference 'gemm' needs a torch built for CUDA: pip install 'dynamiccl[train]'"
    if not ran.worked:
        return fail("torch", last or "no output", advice)
    version, _, sees_gpu = last.partition(" ")
    if sees_gpu != "True":
        return fail("torch", f"torch {version} sees no GPU", advice)
    return ok("torch", f"torch {version}")
