"""What `dynamiccl-collect doctor` checks before a sweep; what `run` refuses is not repeated."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from dynamiccl import doctor
from dynamiccl.collect.grid import BINARIES, PERSISTENT, PRODUCTS
from dynamiccl.collect.on_node import FACTS_ARGV, SLOWED
from dynamiccl.collect.sweep import GroupShape, Sizes, SweepFile
from dynamiccl.doctor import Check, CheckStatus, Machine, judge
from dynamiccl.libraries import SWEEP_NAME, built
from dynamiccl.nccl import TUNER_ABI_SINCE, Collective

OK, WARN, FAIL, UNKNOWN = CheckStatus
ASK_TORCH: Final = """import torch
nccl = ["NCCL", *torch.cuda.nccl.version()] if torch.cuda.is_available() else ["no GPU"]
print(torch.__version__, *nccl)"""
ASK_TRITON: Final = "\nimport triton"
_GIB: Final = 1 << 30
ANY_SWEEP: Final = SweepFile(
    name="any",
    system="any",
    collectives=(Collective.AllReduce.wire,),
    groups=(GroupShape(num_nodes=1, ranks_per_node=1),),
    sizes=Sizes(list=(_GIB,)),
)


def check_for_sweep(
    machine: Machine,
    sweep: SweepFile = ANY_SWEEP,
    nccl_tests_dir: Path | None = None,
) -> Iterator[Check]:
    """Check a machine (binaries: None = PATH). Raises UnknownName for a collective."""
    plays = any(Collective.parse(name).tunable for name in sweep.collectives)
    plays &= bool(sweep.algorithms)
    if sweep.launcher.container is not None:
        found = "it is the container's, and so is NCCL"
        advice = "start this doctor in the container, too, without a sweep file"
        yield Check("nccl-tests", UNKNOWN, found, advice)
    else:
        kinds = {one.kind for one in sweep.interference}
        if not kinds <= {*PRODUCTS}:
            yield from _benchmark(machine, sweep, nccl_tests_dir, plays=plays)
        if beside := kinds & {*PRODUCTS}:
            ask = ASK_TORCH + ASK_TRITON * (PERSISTENT in beside)
            ran = machine.run(sys.executable, "-c", ask)
            advice = f"interference '{max(beside)}' runs it: pip install '.[train]', built for CUDA"
            yield judge("torch", ran.last_line, (" NCCL " not in ran.last_line, FAIL, advice))
    if plays and sweep.too_old:
        yield Check("nccl_version", FAIL, str(sweep.nccl_version), sweep.too_old)
    yield from _plugins(machine, sweep, plays=plays)
    yield from _gpus(machine, sweep)
    yield from _network(machine, sweep)
    yield from _host(machine, sweep)


def _benchmark(
    machine: Machine, sweep: SweepFile, folder: Path | None, *, plays: bool
) -> Iterator[Check]:
    """Check the binaries: options, MPI, and the libnccl that one loads."""
    name, where = "nccl-tests", None if folder is None else str(folder)
    programs = {each: BINARIES.get(Collective.parse(each), "") for each in sweep.collectives}
    found = {each: machine.which(program, where) for each, program in programs.items()}
    path = next(iter(found.values()))
    linked = "" if path is None else machine.run("ldd", path).output
    if missing := [each for each, binary in found.items() if binary is None]:
        advice = "build nccl-tests (make MPI=1 for several nodes) and name it by --nccl-tests-dir"
        yield Check(name, FAIL, f"no binary for {', '.join(missing)} in {where or 'PATH'}", advice)
    else:
        ran = machine.run(str(path), "-h")
        lacks = [option for option in ("-N", "-J") if f"[{option}," not in ran.output]
        broken = "run it by hand: does LD_LIBRARY_PATH lack a library?"
        yield judge(
            name,
            f"{path} -h has no {', '.join(lacks)}: {ran.first_line}" if lacks else str(path),
            ("[-b," not in ran.output, FAIL, broken),
            (bool(lacks), FAIL, "build nccl-tests 2.17.3 or later"),
        )
        if sweep.launcher.is_distributed and "libmpi" not in linked:
            advice = "each process is a group of its own: build with MPI=1, or take kind = 'local'"
            yield Check(f"{name} with MPI", FAIL, f"{path} is not linked to an MPI library", advice)
    library = re.search(r"libnccl\.so\S*\s+=>\s+(not found|\S+)", linked)
    if path is not None and library is None:
        where = f"{path} is not linked to libnccl.so.2"
        yield Check("libnccl", UNKNOWN, where, "is NCCL built into it?")
        return
    nccl = "libnccl.so.2" if library is None else library.group(1)
    version = doctor.nccl_version(machine, nccl)
    if isinstance(version, str):
        advice = "install NCCL (libnccl2), or put its folder into LD_LIBRARY_PATH"
        yield Check("libnccl", FAIL, version, advice)
        return
    chunks, costs = TUNER_ABI_SINCE[6], TUNER_ABI_SINCE[4]
    no_chunks = any(sweep.chunk_sizes) and version < chunks
    yield judge(
        "libnccl",
        f"NCCL {version}, {nccl}",
        (no_chunks, FAIL, f"chunk_sizes need NCCL {chunks}; leave them at [0]"),
        (plays and version < costs, FAIL, f"a sweep of configs needs NCCL {costs} or later"),
    )


def _plugins(machine: Machine, sweep: SweepFile, *, plays: bool) -> Iterator[Check]:
    for role in doctor.ROLES:
        other = doctor.find_other_plugin(machine, role)
        advice = "it is part of the untouched default alone: inside a sweep ours takes its place"
        found, displaced = (other.place, bool(other.library)) if other else ("none", False)
        yield judge(f"other {role.name}", found, (displaced, WARN, advice))
    if plays:
        plugin = sweep.runner.plugin or str(built(SWEEP_NAME))
        check = doctor.check_plugin(
            machine, plugin, [f"ncclTunerPlugin_v{k}" for k in TUNER_ABI_SINCE]
        )
        advice = f"{check.advice} as runner.plugin; a sweep of configs needs it"
        yield check if check.status is OK else replace(check, advice=advice)
    for check in doctor.check_settings(machine):
        forced = plays and check.name in {"NCCL_ALGO", "NCCL_PROTO"}
        yield replace(check, status=FAIL) if forced else check


#: nvidia-smi (--help-query-gpu, --help-query-compute-apps).
GPU_FACTS: Final = "name,driver_version,mig.mode.current,ecc.errors.uncorrected.volatile.total"
#: Apart: a driver that knows other words answers nothing at all.
CLOCKS: Final = "clocks.sm,clocks.max.sm,clocks_throttle_reasons.active"
PROCESSES: Final = "pid,process_name,used_memory"


def smi(kind: str, facts: str) -> tuple[str, ...]:
    """The arguments of an nvidia-smi query."""
    return ("nvidia-smi", f"--query-{kind}={facts}", "--format=csv,noheader,nounits")


def _ask(machine: Machine, kind: str, facts: str) -> tuple[list[list[str]], str]:
    ran = machine.run(*smi(kind, facts))
    if not ran.worked:
        return [], ran.first_line
    rows = [[cell.strip() for cell in line.split(",")] for line in ran.output.splitlines()]
    return [row for row in rows if len(row) == facts.count(",") + 1], ""


def _gpus(machine: Machine, sweep: SweepFile) -> Iterator[Check]:
    rows, problem = _ask(machine, "gpu", GPU_FACTS)
    names, drivers, mig, errors = zip(*rows, strict=True) if rows else [()] * 4
    broken = [f"gpu{i}: {e}" for i, e in enumerate(errors) if e.isdecimal() and int(e)]
    found = f"{len(rows)} x {', '.join(dict.fromkeys(names))}, driver {', '.join({*drivers})}"
    found += f", uncorrected memory errors ({', '.join(broken)})" if broken else ""
    wanted = max(group.ranks_per_host for group in sweep.groups)
    distributed = sweep.launcher.is_distributed
    login = not rows and distributed and "SLURM_JOB_ID" not in machine.env
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
    rows, problem = _ask(machine, "gpu", CLOCKS)
    bits = [int(row[2], 16) if row[2].startswith("0x") else 0 for row in rows]
    slowed = ", ".join(f"gpu{i}" for i, reasons in enumerate(bits) if reasons & SLOWED)
    shown = ", ".join(f"{row[0]} of {row[1]} MHz" for row in rows)
    yield judge(
        "clocks",
        problem or (f"{shown}; slowed by heat or power: {slowed}" if slowed else shown),
        (not rows, UNKNOWN, "look at 'nvidia-smi -q -d PERFORMANCE' by hand"),
        (bool(slowed), WARN, "see to cooling and power: rows measured like this are flagged"),
    )
    rows, problem = _ask(machine, "compute-apps", PROCESSES)
    # MPS shares GPUs for us.
    jobs = [row for row in rows if not row[1].endswith("nvidia-cuda-mps-server")]
    others = [f"{pid} ({name}, {mib} MiB)" for pid, name, mib in jobs]
    yield judge(
        "other jobs on the GPUs",
        problem or ", ".join(others) or "none",
        (bool(problem), UNKNOWN, "look at 'nvidia-smi' by hand"),
        (bool(others), FAIL, "not the machine alone would be measured: wait, or take --exclusive"),
    )


def _network(machine: Machine, sweep: SweepFile) -> Iterator[Check]:
    ports = []  # (DEVICE, "ACTIVE", "400 Gb/sec (4X NDR)")
    for path in machine.paths("/sys/class/infiniband/*/ports/*"):
        state, rate = (machine.read(f"{path}/{name}") or "unknown" for name in ("state", "rate"))
        ports.append((path.split("/")[4], state.rpartition(":")[2].strip(), rate.strip()))
    up = {rate for _, state, rate in ports if state == "ACTIVE"}
    tcp = not ports and any(group.hosts > 1 for group in sweep.groups)
    uneven = len(up) > 1 or any(state != "ACTIVE" for _, state, _ in ports)
    yield judge(
        "NICs",
        ", ".join(map(" ".join, ports)) or "no InfiniBand, RoCE or EFA device",
        (tcp, WARN, "NCCL takes TCP sockets: is a driver missing, or devices in the container?"),
        (bool(ports) and not up, FAIL, "no link: check cables and the subnet manager"),
        (uneven, WARN, "a slow link slows the whole group: keep it out with NCCL_IB_HCA"),
    )
    if not ports:
        return
    modules = {line.split()[0] for line in (machine.read("/proc/modules") or "").splitlines()}
    # They let a NIC read GPU memory: NVIDIA's two names, and EFA's.
    known = ("nvidia_peermem", "nv_peer_mem", "efa")
    peers = ", ".join(module for module in known if module in modules)
    advice = "data goes through host memory, unless DMA-BUF works (open kernel modules, Linux "
    advice += "5.12): 'modprobe nvidia_peermem', or look for GDRDMA in NCCL's log"
    yield judge("GPUDirect RDMA", peers or "no module", (not peers, WARN, advice))
    limits = machine.read("/proc/self/limits") or ""
    limit = re.search(r"^Max locked memory\s+(\S+)", limits, re.MULTILINE)
    found = limit.group(1) if limit else "not known"
    advice = "RDMA pins its buffers, or fails: 'ulimit -l unlimited', in containers '--ulimit "
    advice += "memlock=-1', under Slurm PropagateResourceLimitsExcept=MEMLOCK"
    yield judge("locked memory", found, (found != "unlimited", WARN, advice))


def _host(machine: Machine, sweep: SweepFile) -> Iterator[Check]:
    job = machine.env.get("SLURM_JOB_ID")
    if sweep.launcher.kind == "srun":
        wanted = max(group.hosts for group in sweep.groups)
        advice = f"'salloc -N {wanted} --exclusive', or launcher.kind = 'sbatch'"
        yield judge("Slurm allocation", job or "none", (job is None, FAIL, advice))
    free = machine.free_bytes("/dev/shm")
    advice = "NCCL's SHM transport takes about 10 MiB a channel and peer, and fails without: give "
    advice += "a container '--shm-size=1g' or more, or remove what is left (/dev/shm/nccl-*)"
    yield judge(
        "/dev/shm",
        "it is not there" if free is None else f"{free / _GIB:.1f} GiB free",
        (free is None, FAIL, advice),
        ((free or 0) < _GIB, WARN, advice),
    )
    if sweep.telemetry.enabled:
        ran = machine.run(*FACTS_ARGV)
        said = re.search(r'"nvml_error": (null|".*?")', ran.output)
        problem = ran.last_line if said is None else said.group(1).replace("null", "")
        advice = "throttling and memory errors will not be noticed"
        yield judge("telemetry", problem or "NVML answers", (bool(problem), WARN, advice))
