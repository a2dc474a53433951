"""Checks of nccl-tests: binaries present, able to start, and the features of their release."""

import re
from collections.abc import Iterator
from typing import Final

from dynamiccl.checks import Check, fail, ok
from dynamiccl.collect.doctor.context import Context
from dynamiccl.collect.launch import BINARIES
from dynamiccl.machine import Machine, ProgramResult
from dynamiccl.nccl import Collective

_OPTION: Final = re.compile(r"\[-(\w),--\w+")
#: What a sweep needs: cycles (-N, nccl-tests 2.13) and JSON (-J, 2.17.3) among them.
_NEEDED: Final = frozenset("benwNJ")


def find_binary(machine: Machine, context: Context, collective: Collective) -> str | None:
    """Path of the binary that a runner would use; MPI builds first where ranks are processes."""
    name = BINARIES.get(collective)
    if name is None:
        return None
    names = (f"{name}_mpi", name) if context.is_distributed else (name, f"{name}_mpi")
    found = (machine.which(name, context.nccl_tests_dir) for name in names)
    return next((path for path in found if path), None)


def first_binary(machine: Machine, context: Context) -> str | None:
    """Any binary, as a sample for all: they are built together."""
    found = (find_binary(machine, context, collective) for collective in context.collectives)
    return next((path for path in found if path), None)


def check_benchmark(machine: Machine, context: Context) -> Iterator[Check]:
    """Check the binaries of the sweep's collectives, their options, and MPI support."""
    if context.container is not None:
        return  # they are looked at inside of it
    missing = [
        collective.wire
        for collective in context.collectives
        if find_binary(machine, context, collective) is None
    ]
    place = context.nccl_tests_dir or "PATH"
    if missing:
        yield fail(
            "nccl-tests",
            f"no binary for {', '.join(missing)} in {place}",
            "build nccl-tests (make MPI=1 for several nodes) and give its build directory with "
            "--nccl-tests-dir",
        )
    path = first_binary(machine, context)
    if path is None:
        return
    if not missing:
        yield ok("nccl-tests", path)
    yield _options(machine.run(path, "-h"), path, context)
    if context.is_distributed:
        yield _mpi(machine.run("ldd", path), path)


def _options(ran: ProgramResult, path: str, context: Context) -> Check:
    name = "nccl-tests options"
    options = frozenset(_OPTION.findall(ran.output))
    wanted = _NEEDED | {"I"} if context.wants_iteration_times else _NEEDED
    if lacks := sorted(wanted - options):
        return fail(
            name,
            f"{path} -h lists no -{', -'.join(lacks)} (exit status {ran.returncode}): "
            f"{ran.first_line or 'no output'}",
            "build nccl-tests 2.17.3 or later (2.19.2 for per_iteration); 'error while loading "
            "shared libraries' wants LD_LIBRARY_PATH",
        )
    return ok(name, f"{path} has all that a sweep needs")


def _mpi(ran: ProgramResult, path: str) -> Check:
    name = "nccl-tests with MPI"
    linked = re.search(r"libmpi\w*\.so\S*", ran.output)
    if linked:
        return ok(name, f"{path} is linked to {linked.group()}")
    return fail(
        name,
        f"{path} is not linked to an MPI library",
        "without MPI each process is a group of its own: build nccl-tests with MPI=1, or set "
        "launcher.kind = 'local'",
    )
