"""What `dynamiccl-collect doctor` checks before a sweep, in the order in which a sweep needs it.

What the start of a sweep refuses by itself, with the fix, is not repeated here.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from dynamiccl.collect.launch import BINARIES
from dynamiccl.collect.nodes import node_argv
from dynamiccl.collect.sampler import is_slowed
from dynamiccl.collect.sweep import GroupShape, Sizes, SweepFile
from dynamiccl.doctor import (
    ROLES,
    Check,
    CheckStatus,
    Examine,
    Machine,
    check_plugin,
    check_settings,
    find_other_plugin,
    judge,
    nccl_version,
)
from dynamiccl.libraries import SWEEP_NAME, built
from dynamiccl.nccl import TUNER_ABI_SINCE, Collective

OK, WARN, FAIL, UNKNOWN = CheckStatus
_GIB: Final = 1 << 30
#: The sweep that is meant where none is named.
ANY_SWEEP: Final = SweepFile(
    name="any",
    system="any",
    collectives=(Collective.AllReduce.wire,),
    groups=(GroupShape(num_nodes=1, ranks_per_node=1),),
    sizes=Sizes(list=(_GIB,)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What is to run here."""

    sweep: SweepFile = ANY_SWEEP
    #: Folder of the nccl-tests binaries; None = PATH.
    nccl_tests_dir: Path | None = None
    #: Whether we are in the sweep's container already.
    inside: bool = False

    @property
    def is_distributed(self) -> bool:
        """Whether ranks are processes of their own, started by MPI or Slurm."""
        return self.sweep.launcher.is_distributed

    @property
    def is_outside(self) -> bool:
        """Whether nccl-tests and NCCL are in a container that we are not in."""
        return self.sweep.launcher.container is not None and not self.inside

    @property
    def plays(self) -> bool:
        """Whether configs are to be measured, which our plugin plays."""
        tuned = any(Collective.parse(name).tunable for name in self.sweep.collectives)
        return tuned and bool(self.sweep.algorithms)


def sweep_checks(needs: Needs) -> list[Examine]:
    """The checks of a machine for a sweep."""
    software = (_benchmark, _library, _plugins)
    hardware = (_gpus, _clocks, _other_processes, _network, _launcher, _host)
    return [partial(examine, needs) for examine in (*software, *hardware)]


# --- nccl-tests and NCCL ---


def _binary(needs: Needs, machine: Machine, collective: str) -> str | None:
    """Path of the binary that a launch would use."""
    name = BINARIES.get(Collective.parse(collective))
    folder = None if needs.nccl_tests_dir is None else str(needs.nccl_tests_dir)
    return None if name is None else machine.which(name, folder)


def _benchmark(needs: Needs, machine: Machine) -> Iterator[Check]:
    """Check the binaries of the sweep's collectives, one of them for its options and for MPI."""
    name = "nccl-tests"
    if needs.is_outside:
        advice = "start this doctor in the container, with --inside"
        yield Check(name, UNKNOWN, "it is the container's, and so is NCCL", advice)
        return
    found = {each: _binary(needs, machine, each) for each in needs.sweep.collectives}
    missing = [each for each, path in found.items() if path is None]
    path = next(iter(found.values()))
    if missing or path is None:
        where = f"no binary for {', '.join(missing)} in {needs.nccl_tests_dir or 'PATH'}"
        advice = "build nccl-tests (make MPI=1 for several nodes) and name it by --nccl-tests-dir"
        yield Check(name, FAIL, where, advice)
        return
    ran = machine.run(path, "-h")
    lacks = [option for option in ("-N", "-J") if f"[{option}," not in ran.output]
    yield judge(
        name,
        f"{path} -h has no {', '.join(lacks)}: {ran.first_line}" if lacks else path,
        ("[-b," not in ran.output, FAIL, "run it by hand: does LD_LIBRARY_PATH lack a library?"),
        (bool(lacks), FAIL, "build nccl-tests 2.17.3 or later"),
    )
    if needs.is_distributed and "libmpi" not in machine.run("ldd", path).output:
        advice = "each process is a group of its own: build with MPI=1, or launcher.kind = 'local'"
        yield Check(f"{name} with MPI", FAIL, f"{path} is not linked to an MPI library", advice)


def _library(needs: Needs, machine: Machine) -> Iterator[Check]:
    """Check the libnccl that the benchmark's loader finds."""
    if needs.is_outside:
        return
    name, path = "libnccl", "libnccl.so.2"
    binary = _binary(needs, machine, needs.sweep.collectives[0])
    if binary is not None:
        listed = machine.run("ldd", binary).output
        linked = re.search(r"libnccl\.so\S*\s+=>\s+(not found|\S+)", listed)
        if linked is None:
            found = f"{binary} is not linked to libnccl.so.2"
            yield Check(name, UNKNOWN, found, "is NCCL built into it?")
            return
        path = linked.group(1)
    version = nccl_version(machine, path)
    if isinstance(version, str):
        advice = "install NCCL (libnccl2), or put its folder into LD_LIBRARY_PATH"
        yield Check(name, FAIL, version, advice)
        return
    chunks, costs = TUNER_ABI_SINCE[6], TUNER_ABI_SINCE[3]
    too_old = needs.plays and version < costs
    no_chunks = any(needs.sweep.chunk_sizes) and version < chunks
    yield judge(
        name,
        f"NCCL {version}, {path}",
        (no_chunks, FAIL, f"chunk_sizes need NCCL {chunks}; leave them at [0]"),
        (too_old, FAIL, f"a sweep of configs needs NCCL {costs} or later"),
    )


def _plugins(needs: Needs, machine: Machine) -> Iterator[Check]:
    """Check for our plugin, for others that it displaces, and for settings that overrule it."""
    for role in ROLES:
        other = find_other_plugin(machine, role)
        advice = "it is part of the untouched default alone: inside a sweep ours takes its place"
        displaced = other is not None and bool(other.library)
        found = other.place if other is not None else "none"
        yield judge(f"other {role.name}", found, (displaced, WARN, advice))
    if needs.plays:
        plugin = needs.sweep.runner.plugin or str(built(SWEEP_NAME))
        check = check_plugin(machine, plugin, [f"ncclTunerPlugin_v{k}" for k in TUNER_ABI_SINCE])
        advice = f"{check.advice} as runner.plugin; a sweep of configs needs it"
        yield check if check.status is OK else replace(check, status=FAIL, advice=advice)
    for check in check_settings(machine):
        forced = needs.plays and check.name in {"NCCL_ALGO", "NCCL_PROTO"}
        yield replace(check, status=FAIL) if forced else check


# --- GPUs, by nvidia-smi (--help-query-gpu, --help-query-compute-apps) ---

GPU_FACTS: Final = (
    *("name", "driver_version", "mig.mode.current"),
    "ecc.errors.uncorrected.volatile.total",
)
CLOCKS: Final = ("clocks.sm", "clocks.max.sm", "clocks_throttle_reasons.active")
PROCESSES: Final = ("pid", "process_name", "used_memory")
#: Shares GPUs for us, and is no job.
_SERVER: Final = "nvidia-cuda-mps-server"


def smi(kind: str, facts: Sequence[str]) -> tuple[str, ...]:
    """The argument vector of an nvidia-smi query."""
    return ("nvidia-smi", f"--query-{kind}={','.join(facts)}", "--format=csv,noheader,nounits")


def _ask(machine: Machine, kind: str, facts: Sequence[str]) -> tuple[list[tuple[str, ...]], str]:
    """The rows of a query, and why it failed or ""."""
    ran = machine.run(*smi(kind, facts))
    split = [tuple(cell.strip() for cell in line.split(",")) for line in ran.output.splitlines()]
    if not ran.worked:
        return [], ran.first_line
    return [row for row in split if len(row) == len(facts)], ""


def _gpus(needs: Needs, machine: Machine) -> Iterator[Check]:
    """Check that there are enough GPUs, alike and healthy."""
    rows, problem = _ask(machine, "gpu", GPU_FACTS)
    names, drivers, mig, errors = zip(*rows, strict=True) if rows else [()] * 4
    broken = [f"gpu{i}: {e}" for i, e in enumerate(errors) if e.isdecimal() and int(e)]
    found = f"{len(rows)} x {', '.join(dict.fromkeys(names))}, driver {', '.join({*drivers})}"
    found += f", uncorrected memory errors ({', '.join(broken)})" if broken else ""
    wanted = max(group.ranks_per_host for group in needs.sweep.groups)
    login = not rows and needs.is_distributed and "SLURM_JOB_ID" not in machine.env
    yield judge(
        "GPUs",
        found if rows else problem or "none",
        (login, UNKNOWN, "on a login node? use 'srun -N1 dynamiccl-collect doctor'"),
        (not rows, FAIL, "install the NVIDIA driver, or start on a node with GPUs"),
        (bool(broken), FAIL, "have the node drained and these GPUs reset or replaced"),
        (len(rows) < wanted, FAIL, f"the sweep wants {wanted} ranks per node: smaller groups?"),
        (len(set(names)) > 1, WARN, "unlike GPUs: each group is as slow as its slowest"),
        ("Enabled" in mig, WARN, "MIG: rows are flagged and not judged; 'nvidia-smi -mig 0'"),
    )


def _clocks(_: Needs, machine: Machine) -> Iterator[Check]:
    """Check that neither heat nor power slows a GPU."""
    rows, problem = _ask(machine, "gpu", CLOCKS)
    bits = [int(row[2], 16) if row[2].startswith("0x") else 0 for row in rows]
    slowed = [f"gpu{i}" for i, reasons in enumerate(bits) if is_slowed(reasons)]
    shown = ", ".join(f"{row[0]} of {row[1]} MHz" for row in rows)
    yield judge(
        "clocks",
        problem or (f"{shown}; slowed by heat or power: {', '.join(slowed)}" if slowed else shown),
        (not rows, UNKNOWN, "look at 'nvidia-smi -q -d PERFORMANCE' by hand"),
        (bool(slowed), WARN, "see to cooling and power: rows measured like this are flagged"),
    )


def _other_processes(_: Needs, machine: Machine) -> Iterator[Check]:
    rows, problem = _ask(machine, "compute-apps", PROCESSES)
    found = [f"{pid} ({name}, {mib} MiB)" for pid, name, mib in rows if not name.endswith(_SERVER)]
    yield judge(
        "other jobs on the GPUs",
        problem or ", ".join(found) or "none",
        (bool(problem), UNKNOWN, "look at 'nvidia-smi' by hand"),
        (bool(found), FAIL, "not the machine alone would be measured: wait, or take --exclusive"),
    )


# --- Between nodes ---

#: Kernel modules that let a NIC read GPU memory: NVIDIA's by its two names, and EFA's driver.
_PEER_MEMORY: Final = ("nvidia_peermem", "nv_peer_mem", "efa")


def _network(needs: Needs, machine: Machine) -> Iterator[Check]:
    """Check RDMA ports and what they need to reach GPU memory."""
    ports = []  # (/sys/class/infiniband/DEVICE/ports/N, "4: ACTIVE", "400 Gb/sec (4X NDR)")
    for path in machine.paths("/sys/class/infiniband/*/ports/*"):
        state, rate = (machine.read(f"{path}/{name}") or "unknown" for name in ("state", "rate"))
        ports.append((path, state.rpartition(":")[2].strip(), rate.strip()))
    up = {rate for _, state, rate in ports if state == "ACTIVE"}
    shown = ", ".join(f"{p.split('/')[4]} {state} {rate}" for p, state, rate in ports)
    tcp = not ports and any(group.hosts > 1 for group in needs.sweep.groups)
    uneven = len(up) > 1 or any(state != "ACTIVE" for _, state, _ in ports)
    yield judge(
        "NICs",
        shown or "no InfiniBand, RoCE or EFA device",
        (tcp, WARN, "NCCL takes TCP sockets: is a driver missing, or devices in the container?"),
        (bool(ports) and not up, FAIL, "no link: check cables and the subnet manager"),
        (uneven, WARN, "a slow link slows the whole group: keep it out with NCCL_IB_HCA"),
    )
    if not ports:
        return
    modules = {line.split()[0] for line in (machine.read("/proc/modules") or "").splitlines()}
    peers = ", ".join(module for module in _PEER_MEMORY if module in modules)
    advice = "data goes through host memory, unless DMA-BUF works (open kernel modules, Linux "
    advice += "5.12): 'modprobe nvidia_peermem', or look for GDRDMA in NCCL's log"
    yield judge("GPUDirect RDMA", peers or "no module", (not peers, WARN, advice))
    limits = machine.read("/proc/self/limits") or ""
    limit = re.search(r"^Max locked memory\s+(\S+)", limits, re.MULTILINE)
    found = limit.group(1) if limit else "not known"
    advice = "RDMA pins its buffers, or fails: 'ulimit -l unlimited', in containers '--ulimit "
    advice += "memlock=-1', under Slurm PropagateResourceLimitsExcept=MEMLOCK"
    yield judge("locked memory", found, (found != "unlimited", WARN, advice))


def _launcher(needs: Needs, machine: Machine) -> Iterator[Check]:
    """Check Open MPI, or the Slurm allocation that we are in."""
    if needs.sweep.launcher.kind == "mpirun":
        ran = machine.run("mpirun", "--version")
        advice = "load Open MPI, whose options are written, or take launcher.kind = 'srun'"
        yield judge("MPI", ran.first_line, ("Open MPI" not in ran.output, FAIL, advice))
    if not needs.sweep.launcher.is_slurm:
        return
    job, wanted = machine.env.get("SLURM_JOB_ID"), max(g.hosts for g in needs.sweep.groups)
    if job is None and needs.sweep.launcher.kind == "sbatch":
        return
    said = machine.run("scontrol", "show", "job", job or "").output if job else ""
    # scontrol(1): NumNodes may be a range; OverSubscribe is NO or EXCLUSIVE on nodes of one's own.
    fields = dict(re.findall(r"\b(NumNodes|OverSubscribe)=(\w+)", said))
    few = int(fields.get("NumNodes", wanted)) < wanted
    shared = fields.get("OverSubscribe") not in {"NO", "EXCLUSIVE"}
    yield judge(
        "Slurm allocation",
        f"job {job}: {fields or said.strip()}" if job else "none",
        (job is None, FAIL, f"'salloc -N {wanted} --exclusive', or launcher.kind = 'sbatch'"),
        (len(fields) < 2, UNKNOWN, "scontrol does not say whether the nodes are ours alone"),
        (few, FAIL, f"the sweep wants {wanted} nodes: allocate as many, or take smaller groups"),
        (shared, WARN, "not ours alone: rows are flagged and not judged; take --exclusive"),
    )


# --- The host ---


def _host(needs: Needs, machine: Machine) -> Iterator[Check]:
    """Check shared memory, and whether NVML answers."""
    free = machine.free_bytes("/dev/shm")
    advice = "NCCL's SHM transport takes about 10 MiB a channel and peer, and fails without: give "
    advice += "a container '--shm-size=1g' or more, or remove what is left (/dev/shm/nccl-*)"
    yield judge(
        "/dev/shm",
        "it is not there" if free is None else f"{free / _GIB:.1f} GiB free",
        (free is None, FAIL, advice),
        ((free or 0) < _GIB, WARN, advice),
    )
    if needs.sweep.telemetry.enabled:
        ran = machine.run(*node_argv())
        said = re.search(r'"nvml_error": (null|".*?")', ran.output)
        answers = said is not None and said.group(1) == "null"
        yield judge(
            "telemetry",
            "NVML answers" if answers else said.group(1) if said else ran.last_line,
            (not answers, WARN, "throttling and memory errors will not be noticed"),
        )
