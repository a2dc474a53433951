"""Checks of MPI, Slurm, the container runtime, and clock agreement between nodes."""

import re
from collections.abc import Iterator
from typing import Final

from dynamiccl.checks import Check, fail, ok, unknown, warn
from dynamiccl.collect.doctor.context import Context
from dynamiccl.machine import Machine

#: What `mpirun --version` says -> whose it is.
_FLAVOURS: Final = (
    (re.compile(r"Open MPI\)?\s+(\S+)"), "Open MPI"),
    (re.compile(r"Intel\(R\) MPI Library.*?Version\s+(\S+(?: Update \d+)?)"), "Intel MPI"),
    (re.compile(r"HYDRA[\s\S]*?Version:\s+(\S+)"), "MPICH"),
)
#: scontrol(1): OverSubscribe of a job, and its values when the nodes are its own.
_ALONE: Final = frozenset({"NO", "EXCLUSIVE"})
_OVERSUBSCRIBE: Final = re.compile(r"\bOverSubscribe=(\S+)")
_PYXIS: Final = "github.com/NVIDIA/pyxis"


def check_cluster(machine: Machine, context: Context) -> Iterator[Check]:
    """Check what the sweep's launcher needs."""
    if context.launcher == "mpirun":
        yield _mpi(machine)
    if context.is_slurm:
        yield from _slurm(machine, context)
    if context.container is not None:
        yield _container(machine, context.container)
    if context.is_distributed:
        yield _time(machine)


def _mpi(machine: Machine) -> Check:
    ran = machine.run("mpirun", "--version")
    if not ran.worked:
        return fail("MPI", ran.first_line or "no output", "load or install an MPI with mpirun")
    for pattern, flavour in _FLAVOURS:
        found = pattern.search(ran.output)
        if found is None:
            continue
        if flavour == "Open MPI":
            return ok("MPI", f"{flavour} {found.group(1)}")
        return fail(
            "MPI",
            f"{flavour} {found.group(1)}",
            "the mpirun launcher writes Open MPI's options: load Open MPI, or start with Slurm "
            "(launcher.kind = 'srun')",
        )
    return unknown("MPI", ran.first_line, "the mpirun launcher writes Open MPI's options")


def _slurm(machine: Machine, context: Context) -> Iterator[Check]:
    program = context.launcher
    if machine.which(program) is None:
        yield fail(
            "Slurm", f"no {program} on PATH", "run it on a login or compute node of a cluster"
        )
        return
    ran = machine.run("sinfo", "-h", "-o", "%P|%a|%D")
    if not ran.worked:
        yield fail(
            "Slurm", f"sinfo fails: {ran.first_line or 'no output'}",
            "is the controller up (scontrol ping), and SLURM_CONF right?",
        )  # fmt: skip
        return
    yield _partition(ran.output, context.partition)
    job = machine.env.get("SLURM_JOB_ID")
    if job is not None:
        yield _allocation(machine, context, job)
        yield _exclusive(machine, job)
    elif context.launcher == "srun":
        yield fail(
            "Slurm allocation",
            "none",
            f"the srun launcher works inside one: 'salloc -N {context.num_nodes} --exclusive', or "
            "launcher.kind = 'sbatch'",
        )


def _partition(output: str, wanted: str | None) -> Check:
    rows = [line.split("|") for line in output.splitlines() if line.count("|") == 2]
    up = {name.rstrip("*"): nodes for name, state, nodes in rows if state == "up"}
    shown = ", ".join(f"{name} ({nodes} nodes)" for name, nodes in up.items()) or "none is up"
    if wanted is not None and wanted not in up:
        return fail("Slurm", f"no partition '{wanted}' that is up; {shown}", "mend --partition")
    if not up:
        return fail("Slurm", shown, "ask the administrators, or look at 'sinfo -R'")
    return ok("Slurm", f"partitions: {shown}")


def _allocation(machine: Machine, context: Context, job: str) -> Check:
    #   SLURM_JOB_NUM_NODES  Slurm: nodes of the job.
    #   SLURM_NNODES  Slurm: the old name of SLURM_JOB_NUM_NODES.
    text = machine.env.get("SLURM_JOB_NUM_NODES") or machine.env.get("SLURM_NNODES") or ""
    found = f"job {job}, {text or 'unknown'} nodes"
    if text.isdecimal() and int(text) < context.num_nodes:
        return fail(
            "Slurm allocation",
            found,
            f"the sweep wants {context.num_nodes} nodes: allocate as many, or take smaller groups",
        )
    return ok("Slurm allocation", found)


def _exclusive(machine: Machine, job: str) -> Check:
    ran = machine.run("scontrol", "show", "job", job)
    found = _OVERSUBSCRIBE.search(ran.output)
    if found is None:
        return unknown("exclusive nodes", f"scontrol does not say: {ran.first_line or 'no output'}")
    if found.group(1) in _ALONE:
        return ok("exclusive nodes", "yes")
    return warn(
        "exclusive nodes",
        f"no (OverSubscribe={found.group(1)})",
        "others may run on these nodes: rows are flagged and stay out of verdicts on the default; "
        "allocate with --exclusive",
    )


def _container(machine: Machine, runtime: str) -> Check:
    if runtime == "pyxis":
        if "--container-image" in machine.run("srun", "--help").output:
            return ok("container", "srun has Pyxis")
        return fail("container", "srun has no --container-image", f"install Pyxis ({_PYXIS})")
    path = machine.which(runtime)
    if path is None:
        return fail("container", f"no {runtime} on PATH", f"install {runtime}, or load its module")
    return ok("container", path)


def _time(machine: Machine) -> Check:
    """Check that node clocks agree: readings of several nodes are matched to trials by time."""
    name, advice = "clock", "telemetry is joined by time of day: run chrony or ntpd on all nodes"
    said = machine.run("timedatectl", "show", "-p", "NTPSynchronized", "--value")
    if said.worked:
        answer = said.output.strip()
        return (
            ok(name, "synchronised") if answer == "yes" else warn(name, "not synchronised", advice)
        )
    tracked = machine.run("chronyc", "tracking")
    leap = re.search(r"^Leap status\s*:\s*(.+)$", tracked.output, re.MULTILINE)
    if leap is None:
        return unknown(name, "neither timedatectl nor chronyc says", advice)
    synchronised = leap.group(1).strip() == "Normal"
    return ok(name, "synchronised") if synchronised else warn(name, "not synchronised", advice)
