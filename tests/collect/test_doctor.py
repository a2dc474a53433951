"""`dynamiccl-collect doctor`: what each check says of a recorded machine."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynamiccl.collect import checks
from dynamiccl.collect.checks import ANY_SWEEP, ASK_TORCH, check_for_sweep, smi
from dynamiccl.collect.on_node import FACTS_ARGV
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.doctor import ASK_PLUGIN, ASK_VERSION, Check, CheckStatus, Machine
from tests import recorded
from tests.recorded import BINARY, CLOCK, GPU, HEALTHY, IB, LIBRARY, Recorded

OK, WARN, FAIL, UNKNOWN = CheckStatus


def sweep(**tables: Any) -> SweepFile:
    """A sweep that differs in these tables from the one without a file."""
    given = ANY_SWEEP.model_dump(exclude_unset=True) | tables
    return SweepFile.model_validate(given)


def found(
    machine: Machine, file: SweepFile = ANY_SWEEP, folder: Path | None = None
) -> dict[str, Check]:
    return recorded.by_name(check_for_sweep(machine, file, folder))


DEFAULT_ONLY = sweep(algorithms=[])
EIGHT = sweep(groups=[{"num_nodes": 1, "ranks_per_node": 8}])
MPIRUN = sweep(launcher={"kind": "mpirun"})
SRUN = sweep(launcher={"kind": "srun"}, groups=[{"num_nodes": 4, "ranks_per_node": 8}])


def test_a_healthy_node_needs_no_advice() -> None:
    in_job = HEALTHY.with_env(SLURM_JOB_ID="77")
    for each in (found(HEALTHY), found(HEALTHY, MPIRUN), found(in_job, SRUN)):
        assert {check.name: check.advice for check in each.values() if check.status != OK} == {}


def test_an_answer_that_is_missing_is_never_a_crash() -> None:
    nothing: dict[str, Any] = {"/dev/shm": None}
    machine = Recorded(runs={}, files={}, programs={}, free=nothing)
    for kind in ("local", "mpirun", "srun", "sbatch"):
        assert found(machine, sweep(launcher={"kind": kind}))["nccl-tests"].status is FAIL
        container = {"runtime": "pyxis", "image": "x.sqsh"}
        outside = sweep(launcher={"kind": kind, "container": container})
        # What the host has says nothing about the image.
        check = found(machine, outside)["nccl-tests"]
        assert (check.status, "without a sweep file" in check.advice) == (UNKNOWN, True)
        assert "libnccl" not in found(machine, outside)


ASK_NCCL = (sys.executable, "-c", ASK_VERSION)
ASK_OURS = (sys.executable, "-c", ASK_PLUGIN, recorded.PLUGIN, *recorded.TUNERS)
GPUS, CLOCKS = smi("gpu", checks.GPU_FACTS), smi("gpu", checks.CLOCKS)
APPS = smi("compute-apps", checks.PROCESSES)


def saying(argv: tuple[str, ...], output: str, status: int = 0) -> Recorded:
    return HEALTHY.answering(*argv, output=output, status=status)


def nccl(code: str) -> Recorded:
    return saying((*ASK_NCCL, LIBRARY), f"{code}\n")


def gpus(*lines: str) -> Recorded:
    return saying(GPUS, "".join(lines))


def torch(said: str, status: int = 0) -> Recorded:
    return saying((sys.executable, "-c", ASK_TORCH), said, status)


def triton(said: str, status: int = 0) -> Recorded:
    return saying((sys.executable, "-c", ASK_TORCH + checks.ASK_TRITON), said, status)


def without_option(option: str) -> Recorded:
    return saying((BINARY, "-h"), recorded.HELP.replace(f"[{option},", "["))


def free(mib: int | None) -> Recorded:
    return replace(HEALTHY, free={"/dev/shm": mib if mib is None else mib << 20})


ONE_DOWN = HEALTHY.holding(f"{IB}/mlx5_1/ports/1/state", "1: DOWN\n")
ALL_DOWN = ONE_DOWN.holding(f"{IB}/mlx5_0/ports/1/state", "1: DOWN\n")
ONE_SLOW = HEALTHY.holding(f"{IB}/mlx5_1/ports/1/rate", "200 Gb/sec (4X HDR)\n")
NO_RDMA = HEALTHY.without("infiniband")
LIMITED = recorded.LIMITS.replace("unlimited", "8388608")
ANY = ANY_SWEEP
BESIDE = sweep(interference=[{"kind": "matmul", "level": 4096}])
PERSISTENT = sweep(interference=[{"kind": "persistent-matmul", "level": 4096}])
OLDER = sweep(nccl_version="2.18.1")
CHUNKS = sweep(chunk_sizes=[0, "256K"])
LOGIN = sweep(launcher={"kind": "sbatch"})
NO_LIBCUDART = "OSError: libcudart.so.12: cannot open"
NO_GPU = saying(GPUS, "No devices were found\n", 6)
OLD_GLIBC = "OSError: /lib/libc.so.6: version `GLIBC_2.38' not found"
FORCED = HEALTHY.with_env(NCCL_MAX_CTAS="8").holding("/etc/nccl.conf", "NCCL_PROTO=LL\n")
SCATTER = sweep(collectives=["AllReduce", "Broadcast", "Scatter"])
BARE = HEALTHY.without("all_reduce")
WITHOUT_MPI = saying(("ldd", BINARY), recorded.LDD.replace("libmpi", "libm"))
HOT, NO_CLOCK = "900, 1980, 0x0000000000000040\n", "[N/A], [N/A], [N/A]\n"
MPS = "11, /usr/bin/nvidia-cuda-mps-server, 30\n"
NODE, NO_DRIVER = FACTS_ARGV, '{"nvml_error": "Not Loaded"}\n'


def test_what_is_wrong_is_said_with_the_fix() -> None:
    for name, machine, needs, status, said in (
        ("torch", torch("2.13.0+cu130 NCCL 2 28 9"), BESIDE, OK, "2.13.0+cu130 NCCL 2 28 9: "),
        ("torch", torch("2.13.0+cpu no GPU"), BESIDE, FAIL, "2.13.0+cpu no GPU: "),
        ("torch", torch("No module named 'torch'", 1), BESIDE, FAIL, "No module named 'torch': "),
        ("torch", triton("2.13.0+cu130 NCCL 2 28 9"), PERSISTENT, OK, " NCCL 2 28 9: "),
        (
            "torch",
            triton("No module named 'triton'", 1),
            PERSISTENT,
            FAIL,
            "'triton': interference",
        ),
        ("nccl-tests", HEALTHY, SCATTER, FAIL, "no binary for Broadcast, Scatter in PATH: "),
        ("nccl-tests", without_option("-N"), ANY, FAIL, "has no -N"),
        ("nccl-tests", saying((BINARY, "-h"), NO_LIBCUDART, 127), ANY, FAIL, "LD_LIBRARY_PATH"),
        ("nccl-tests with MPI", WITHOUT_MPI, MPIRUN, FAIL, ""),
        ("nccl_version", HEALTHY, OLDER, FAIL, "needs NCCL 2.24"),
        # Many configs in a process need NCCL 2.24, chunk sizes 2.30.
        ("libnccl", nccl("22304"), ANY, FAIL, ""),
        ("libnccl", nccl("22304"), DEFAULT_ONLY, OK, ""),
        ("libnccl", nccl("22907"), CHUNKS, FAIL, ""),
        ("libnccl", HEALTHY, ANY, OK, f"NCCL 2.29.7, {LIBRARY}: "),
        ("libnccl", saying(("ldd", BINARY), "\tlibnccl.so.2 => not found\n"), ANY, FAIL, ""),
        (
            *("libnccl", saying((*ASK_NCCL, LIBRARY), f"Traceback:\n{NO_LIBCUDART}\n", 1), ANY),
            *(FAIL, f"{LIBRARY} does not load: {NO_LIBCUDART}: "),
        ),
        (
            *("libnccl", BARE.answering(*ASK_NCCL, "libnccl.so.2", output="22907\n"), ANY),
            *(OK, "NCCL 2.29.7, libnccl.so.2: "),
        ),
        (
            *("other tuner", HEALTHY.with_env(NCCL_TUNER_PLUGIN="aws"), ANY),
            *(WARN, "NCCL_TUNER_PLUGIN=aws (environment): "),
        ),
        ("our plugin", saying(ASK_OURS, OLD_GLIBC, 1), ANY, FAIL, "GLIBC_2.38"),
        ("our plugin", saying(ASK_OURS, "ncclTunerPlugin_v4"), ANY, FAIL, "ncclTunerPlugin_v6"),
        # A forced algorithm beats a tuner.
        ("NCCL_PROTO", FORCED, ANY, FAIL, ""),
        ("NCCL_PROTO", FORCED, DEFAULT_ONLY, WARN, ""),
        ("GPUs", HEALTHY, EIGHT, OK, "8 x NVIDIA H100 80GB HBM3, driver 580.65.06"),
        ("GPUs", gpus(*4 * [GPU]), EIGHT, FAIL, "8 ranks per node"),
        ("GPUs", gpus(*7 * [GPU], GPU.replace("H100", "H200")), EIGHT, WARN, "slowest"),
        ("GPUs", gpus(*7 * [GPU], GPU.replace(" 0\n", " 2\n")), EIGHT, FAIL, "gpu7: 2"),
        ("GPUs", gpus(*7 * [GPU], GPU.replace("Disabled", "Enabled")), EIGHT, WARN, "MIG"),
        ("GPUs", NO_GPU, ANY, FAIL, "No devices were found: "),
        ("GPUs", NO_GPU, LOGIN, UNKNOWN, "srun -N1"),
        ("GPUs", NO_GPU.with_env(SLURM_JOB_ID="77"), SRUN, FAIL, ""),
        ("clocks", saying(CLOCKS, 7 * CLOCK + HOT), ANY, WARN, "slowed by heat or power: gpu7"),
        ("clocks", saying(CLOCKS, 7 * CLOCK + NO_CLOCK), ANY, OK, "[N/A] of [N/A] MHz"),
        # A driver that knows other words is no failure.
        ("clocks", saying(CLOCKS, 'Field "clocks_throttle_reasons"', 2), ANY, UNKNOWN, "Field"),
        ("other jobs on the GPUs", saying(APPS, MPS), ANY, OK, "none: "),
        ("other jobs on the GPUs", saying(APPS, "No right\n", 4), ANY, UNKNOWN, "No right: "),
        (
            *("other jobs on the GPUs", saying(APPS, "4242, python, 61234\n"), ANY),
            *(FAIL, "4242 (python, 61234 MiB): "),
        ),
        ("NICs", HEALTHY, ANY, OK, "mlx5_0 ACTIVE 400 Gb/sec (4X NDR), mlx5_1 ACTIVE 400"),
        ("NICs", ONE_DOWN, ANY, WARN, "mlx5_1 DOWN"),
        ("NICs", ONE_SLOW, ANY, WARN, "NCCL_IB_HCA"),
        ("NICs", ALL_DOWN, ANY, FAIL, "subnet manager"),
        ("NICs", NO_RDMA, SRUN, WARN, "TCP sockets"),
        ("GPUDirect RDMA", HEALTHY.holding("/proc/modules", "efa 1 0\n"), ANY, OK, "efa"),
        ("GPUDirect RDMA", HEALTHY.holding("/proc/modules", "gdrdrv 1 0\n"), ANY, WARN, "GDRDMA"),
        ("locked memory", HEALTHY.holding("/proc/self/limits", LIMITED), ANY, WARN, "8388608"),
        ("Slurm allocation", HEALTHY, SRUN, FAIL, "salloc -N 4"),
        ("/dev/shm", free(None), ANY, FAIL, "it is not there"),
        ("/dev/shm", free(64), ANY, WARN, "--shm-size=1g"),
        ("telemetry", HEALTHY.answering(*NODE, output=NO_DRIVER), ANY, WARN, '"Not Loaded"'),
        ("telemetry", HEALTHY.answering(*NODE, output="a\nImportError: x"), ANY, WARN, "Error: x"),
    ):
        check = found(machine, needs)[name]
        assert (check.status, said in f"{check.found}: {check.advice}") == (status, True), check
        assert check.advice or status is not FAIL


def test_what_is_not_needed_is_not_asked() -> None:
    assert "torch" not in found(HEALTHY)
    assert "nccl-tests" not in found(HEALTHY, BESIDE)
    assert "nccl-tests with MPI" not in found(WITHOUT_MPI)
    assert "our plugin" not in found(HEALTHY, DEFAULT_ONLY)
    assert "nccl_version" not in found(HEALTHY, sweep(nccl_version="2.18.1", algorithms=[]))
    assert "Slurm allocation" not in found(HEALTHY)
    assert "GPUDirect RDMA" not in found(NO_RDMA)
    assert "Slurm allocation" not in found(HEALTHY, sweep(launcher={"kind": "sbatch"}))
    assert "telemetry" not in found(HEALTHY, sweep(telemetry={"enabled": False}))
    there = found(HEALTHY, folder=Path("/opt/nccl-tests"))["nccl-tests"]
    assert (there.status, there.found) == (OK, BINARY)
    assert found(HEALTHY, folder=Path("/else"))["nccl-tests"].status is FAIL
