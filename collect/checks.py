"""What `dynamiccl-collect doctor` checks before a sweep, in the order in which a sweep needs it.

What the start of a sweep refuses by itself, with the fix, is not repeated here.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from dynamiccl.collect.launch import BINARIES, directory_inside
from dynamiccl.collect.launchers import (
    LAUNCHERS,
    Limits,
    Ranks,
    command,
    map_into_container,
    run_process,
)
from dynamiccl.collect.nodes import node_argv
from dynamiccl.collect.sampler import ClockReason, is_slowed, reason_names
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
from dynamiccl.errors import InvalidSweep, MachineError
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
    #: The data directory.
    out: Path = Path()
    #: Whether we are in the sweep's container already.
    inside: bool = False

    @property
    def is_distributed(self) -> bool:
        """Whether ranks are processes of their own, started by MPI or Slurm."""
        return LAUNCHERS[self.sweep.launcher.kind].needs_mpi

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
    hardware = (_gpus, _clocks, _other_processes, _network, _cluster, _slurm, _host)
    return [partial(examine, needs) for examine in (*software, *hardware)]


# --- nccl-tests and NCCL ---


def _binary(needs: Needs, machine: Machine, collective: str) -> str | None:
    """Path of the binary that a launch would use."""
    name = BINARIES.get(Collective.parse(collective))
    folder = None if needs.nccl_tests_dir is None else str(needs.nccl_tests_dir)
    return None if name is None else machine.which(name, folder)


def _benchmark(needs: Needs, machine: Machine) -> Iterator[Check]:
    """Check the binaries of the sweep's collectives, one of them for its options and for MPI."""
    if needs.is_outside:
        return
    name = "nccl-tests"
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
CLOCKS: Final = ("clocks.sm", "clocks.max.sm", "clocks_throttle_reasons.active", "utilization.gpu")
PROCESSES: Final = ("pid", "process_name", "used_memory")
#: Shares GPUs for us, and is no job.
_SERVER: Final = "nvidia-cuda-mps-server"
#: An idle GPU that runs this share of its top clock does not lower it: somebody fixed it.
_HELD: Final = 0.75


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
    """Check that clocks are steady: neither slowed nor falling when idle."""
    rows, problem = _ask(machine, "gpu", CLOCKS)
    bits = [int(row[2], 16) if row[2].startswith("0x") else 0 for row in rows]
    slowed = {name for reasons in bits if is_slowed(reasons) for name in reason_names(reasons)}
    held = [_is_held(row, reasons) for row, reasons in zip(rows, bits, strict=True)]
    shown = ", ".join(f"{row[0]} of {row[1]} MHz" for row in rows)
    yield judge(
        "clocks",
        problem or (f"{shown}; slowed by {', '.join(sorted(slowed))}" if slowed else shown),
        (bool(slowed), WARN, "see to cooling and power: rows measured like this are flagged"),
        (False in held, WARN, "the first calls of a launch run slower: 'nvidia-smi -lgc MHZ'"),
        (not rows or None in held, UNKNOWN, "idle GPUs show whether clocks are locked"),
    )


def _is_held(row: Sequence[str], reasons: int) -> bool | None:
    """Whether a GPU's clock is fixed; None when it is busy, as any clock is high then."""
    if reasons & ClockReason.APPLICATIONS_CLOCKS_SETTING:
        return True
    if not (row[0].isdecimal() and row[1].isdecimal() and row[3] == "0"):
        return None
    return int(row[0]) >= _HELD * int(row[1])


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


def _cluster(needs: Needs, machine: Machine) -> Iterator[Check]:
    """Check what starts ranks, and whether nodes agree on the time."""
    launcher = needs.sweep.launcher
    if launcher.kind == "mpirun":
        ran = machine.run("mpirun", "--version")
        advice = "load Open MPI, whose options are written, or take launcher.kind = 'srun'"
        yield judge("MPI", ran.first_line, ("Open MPI" not in ran.output, FAIL, advice))
    if launcher.container is not None and needs.is_outside:
        runtime = launcher.container.runtime
        known = runtime == "pyxis" and "--container-image" in machine.run("srun", "--help").output
        missing = machine.which(runtime) is None and not known
        advice = f"install {runtime}, or load its module"
        yield judge("container", runtime, (missing, FAIL, advice))
    if needs.is_distributed:
        said = machine.run("timedatectl", "show", "-p", "NTPSynchronized", "--value").first_line
        advice = "readings of nodes are matched by time of day: run chrony or ntpd on all"
        yield judge(
            "clock",
            f"NTPSynchronized: {said}",
            (said not in {"yes", "no"}, UNKNOWN, advice),
            (said == "no", WARN, advice),
        )


def _slurm(needs: Needs, machine: Machine) -> Iterator[Check]:
    """Check Slurm, and the allocation that we are in."""
    if not LAUNCHERS[needs.sweep.launcher.kind].is_slurm:
        return
    ran = machine.run("sinfo", "-h", "-o", "%P %a %D")
    advice = "is this a node of the cluster, and the controller up (scontrol ping, sinfo -R)?"
    partitions = "; ".join(ran.output.splitlines())
    yield judge("Slurm", partitions, (not ran.worked or " up " not in ran.output, FAIL, advice))
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
    """Check CPU clocks, shared memory, room for the data, and whether NVML answers."""
    pattern = "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
    governors = Counter((machine.read(path) or "?").strip() for path in machine.paths(pattern))
    shown = ", ".join(f"{name} on {count} CPUs" for name, count in governors.items())
    slow = set(governors) != {"performance"}
    yield judge(
        "CPU governor",
        shown or "the kernel does not show it",
        (not shown, UNKNOWN, "usual in virtual machines: nothing to do"),
        (slow, WARN, "small messages wait: 'cpupower frequency-set -g performance' (root)"),
    )
    advice = "NCCL's SHM transport takes about 10 MiB a channel and peer, and fails without: give "
    advice += "a container '--shm-size=1g' or more, or remove what is left (/dev/shm/nccl-*)"
    yield _room(machine, "/dev/shm", "/dev/shm", _GIB, advice)
    advice = "a full disk stops a run: make room, or take another --out"
    yield _room(machine, "disk", str(needs.out), 2 * _GIB, advice)
    if needs.sweep.telemetry.enabled:
        ran = machine.run(*node_argv())
        said = re.search(r'"nvml_error": (null|".*?")', ran.output)
        answers = said is not None and said.group(1) == "null"
        yield judge(
            "telemetry",
            "NVML answers" if answers else said.group(1) if said else ran.last_line,
            (not answers, WARN, "throttling and memory errors will not be noticed"),
        )


def _room(machine: Machine, name: str, place: str, wanted_bytes: int, advice: str) -> Check:
    free = machine.free_bytes(place)
    if free is None:
        return Check(name, FAIL, f"{place} is not there", advice)
    none, few = free < wanted_bytes / 20, free < wanted_bytes
    found = f"{free / _GIB:.1f} GiB free in {place}"
    return judge(name, found, (none, FAIL, advice), (few, WARN, advice))


# --- Inside the sweep's container ---

#: A first start pulls the image.
_PULL_S: Final = 900.0


def check_inside(sweep_file: Path, needs: Needs) -> list[Check]:
    """Run this doctor in the container on one node, and return what it found.

    The sweep must lie under a mount, as our Python must; nccl-tests may lie in the image.
    """
    name, container = "inside the container", needs.sweep.launcher.container
    try:
        python = map_into_container(sys.executable, container)
        sweep = map_into_container(str(sweep_file.resolve()), container)
        argv = [python, "-P", "-m", "dynamiccl.collect.cli", "doctor", sweep, "--inside", "--json"]
        if needs.nccl_tests_dir is not None and container is not None:
            argv += ["--nccl-tests-dir", directory_inside(needs.nccl_tests_dir, container)]
        started = command(Ranks(tuple(argv)), needs.sweep.launcher)
        done = run_process(started, Limits(_PULL_S, _PULL_S))
    except (InvalidSweep, MachineError) as error:
        advice = "mount the sweep and our virtual environment, or start the container by hand"
        return [Check(name, UNKNOWN, str(error), advice)]
    found = re.search(r"^\[$.*^\]$", done.output, re.MULTILINE | re.DOTALL)
    if found is None:
        said = " | ".join(done.output.strip().splitlines()[-3:]) or "nothing"
        return [Check(name, FAIL, f"output of doctor: {said}", f"try: {started.text}")]
    return [Check(**{**one, "name": f"{name}: {one['name']}"}) for one in json.loads(found[0])]
