"""Checks of NCCL: which library the benchmarks load, and whether it supports the sweep."""

import re
import sys
from collections.abc import Iterator
from typing import Final

from dynamiccl.checks import Check, fail, ok, unknown, warn
from dynamiccl.collect.doctor.benchmark import first_binary
from dynamiccl.collect.doctor.context import Context
from dynamiccl.errors import UnknownName
from dynamiccl.machine import Machine
from dynamiccl.nccl import TUNER_ABI_SINCE, NcclVersion
from dynamiccl.nccl_setup import ASK_VERSION

_NAME: Final = "libnccl"
_INSTALL: Final = "install NCCL (libnccl2), or put its folder into LD_LIBRARY_PATH"


def check_library(machine: Machine, context: Context) -> Iterator[Check]:
    """Find libnccl as the benchmark's loader does, and check its version."""
    if context.container is not None:
        return  # it is looked at inside of it
    binary = first_binary(machine, context)
    path = "libnccl.so.2"
    if binary is not None:
        linked = re.search(r"libnccl\.so\S*\s+=>\s+(.+)", machine.run("ldd", binary).output)
        if linked is None:
            yield _inside(machine, context, binary)
            return
        path = linked.group(1).split(" (")[0].strip()
        if path == "not found":
            yield fail(_NAME, f"{binary} does not find libnccl.so.2", _INSTALL)
            return
    ran = machine.run(sys.executable, "-c", ASK_VERSION, path)
    if not ran.worked:
        last = ran.output.strip().rpartition("\n")[2]
        yield fail(_NAME, f"{path} does not load: {last or 'no output'}", _INSTALL)
        return
    yield _compatible(ran.output.strip(), path, context)


def _inside(machine: Machine, context: Context, binary: str) -> Check:
    """The version of NCCL that is linked statically into the binary, found as a string."""
    ran = machine.run("grep", "-aoEm1", r"NCCL version [0-9]+\.[0-9]+\.[0-9]+", binary)
    if ran.worked:
        return _compatible(ran.first_line.rpartition(" ")[2], f"inside {binary}", context)
    return unknown(
        _NAME,
        f"{binary} is not linked to libnccl.so.2, and shows no NCCL of its own",
        "is it an nccl-tests binary? run 'ldd' on it",
    )


def _compatible(text: str, path: str, context: Context) -> Check:
    try:
        version = NcclVersion.parse(text)
    except UnknownName:
        return unknown(_NAME, f"{path} says its version is '{text}'")
    found = f"NCCL {version}, {path}"
    chunks = TUNER_ABI_SINCE[6]
    if context.wants_chunk_sizes and version < chunks:
        return fail(_NAME, found, f"chunk_sizes need NCCL {chunks}; leave them at [0]")
    if context.wants_sweep_mode and version < TUNER_ABI_SINCE[3]:
        advice = f"the sweep mode needs a tuner with a cost table: NCCL {TUNER_ABI_SINCE[3]}"
        if context.mode == "sweep":
            return fail(_NAME, found, advice)
        return warn(_NAME, found, f"one process for each config: {advice}")
    return ok(_NAME, found)
