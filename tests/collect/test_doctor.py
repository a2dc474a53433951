"""`dynamiccl-collect doctor`: what each check says of a recorded machine."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect import checks
from dynamiccl.collect.checks import ANY_SWEEP, ASK_TORCH, check_for_sweep, smi
from dynamiccl.collect.nodes import NODE_ARGV
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.doctor import ASK_PLUGIN, ASK_VERSION, Check, CheckStatus, Machine
from tests import recorded
from tests.recorded import BINARY, CLOCK, GPU, HEALTHY, IB, LIBRARY, Recorded

OK, WARN, FAIL, UNKNOWN = CheckStatus


def sweep(**tables: Any) -> SweepFile:
    """A sweep that differs in these tables from the one without a file."""
    given = ANY_SWEEP.model_dump(exclude_unset=True) | tables
    return SweepFile.model_validate(given)


def found(machine: Machine, file: SweepFile = ANY_SWEEP, **options: Any) -> dict[str, Check]:
    return recorded.by_name(check_for_sweep(machine, file, **options))


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
        assert (check.status, "--inside" in check.advice) == (UNKNOWN, True)
        assert "libnccl" not in found(machine, outside)
        assert found(machine, outside, inside=True)["nccl-tests"].status is FAIL


@pytest.mark.parametrize(
    ("said", "code", "status"),
    [
        ("2.13.0+cu130 NCCL 2 28 9", 0, OK),
        ("2.13.0+cpu no GPU", 0, FAIL),
        ("ModuleNotFoundError: No module named 'torch'", 1, FAIL),
    ],
)
def test_products_beside_calls_need_a_torch_with_nccl(
    said: str, code: int, status: CheckStatus
) -> None:
    needs = sweep(interference=[{"kind": "matmul", "level": 4096}])
    machine = HEALTHY.answering(sys.executable, "-c", ASK_TORCH, output=said, status=code)
    checks = found(machine, needs)
    check = checks["torch"]
    assert "nccl-tests" not in checks
    assert (check.status, check.found) == (status, said)
    assert bool(check.advice) is (status is FAIL)
    assert "torch" not in found(machine)


# --- nccl-tests and NCCL ---


def test_missing_binaries_are_named() -> None:
    needs = sweep(collectives=["AllReduce", "Broadcast", "Scatter"])
    check = found(HEALTHY, needs)["nccl-tests"]
    assert (check.status, check.found) == (FAIL, "no binary for Broadcast, Scatter in PATH")
    assert "--nccl-tests-dir" in check.advice
    there = found(HEALTHY, nccl_tests_dir=Path("/opt/nccl-tests"))["nccl-tests"]
    assert (there.status, there.found) == (OK, BINARY)
    assert found(HEALTHY, nccl_tests_dir=Path("/else"))["nccl-tests"].status is FAIL


def test_ranks_that_are_processes_need_a_binary_with_mpi() -> None:
    plain = HEALTHY.answering("ldd", BINARY, output=recorded.LDD.replace("libmpi", "libm"))
    assert found(plain, MPIRUN)["nccl-tests with MPI"].status is FAIL
    assert "nccl-tests with MPI" not in found(plain)


@pytest.mark.parametrize(
    ("code", "needs", "status"),
    [("22304", ANY_SWEEP, FAIL), ("22304", DEFAULT_ONLY, OK), ("22403", ANY_SWEEP, OK)],
)
def test_many_configs_in_a_process_need_nccl_2_24(
    code: str, needs: SweepFile, status: CheckStatus
) -> None:
    old = HEALTHY.answering(sys.executable, "-c", ASK_VERSION, LIBRARY, output=f"{code}\n")
    assert found(old, needs)["libnccl"].status is status


def test_a_sweep_file_of_an_older_release_is_a_failure() -> None:
    check = found(HEALTHY, sweep(nccl_version="2.18.1"))["nccl_version"]
    assert (check.status, "needs NCCL 2.24" in check.advice) == (FAIL, True)
    assert "nccl_version" not in found(HEALTHY, sweep(nccl_version="2.18.1", algorithms=[]))


@pytest.mark.parametrize("option", ["-N", "-J"])
def test_a_release_that_lacks_an_option_is_a_failure(option: str) -> None:
    old = HEALTHY.answering(BINARY, "-h", output=recorded.HELP.replace(f"[{option},", "["))
    check = found(old)["nccl-tests"]
    assert (check.status, f"has no {option}" in check.found) == (FAIL, True)
    assert "2.17.3" in check.advice


def test_a_binary_that_does_not_start_is_quoted() -> None:
    said = "error while loading shared libraries: libcudart.so.12: cannot open"
    check = found(HEALTHY.answering(BINARY, "-h", output=said, status=127))["nccl-tests"]
    assert check.status is FAIL
    assert "libcudart" in check.found
    assert "LD_LIBRARY_PATH" in check.advice


def test_nccl_is_the_one_that_the_benchmark_loads() -> None:
    ask = (sys.executable, "-c", ASK_VERSION)
    assert found(HEALTHY)["libnccl"].found == f"NCCL 2.29.7, {LIBRARY}"
    lost = HEALTHY.answering("ldd", BINARY, output="\tlibnccl.so.2 => not found\n")
    assert found(lost)["libnccl"].status is FAIL
    said = "Traceback (most recent call last):\nOSError: libcudart.so.12: cannot open\n"
    broken = HEALTHY.answering(*ask, LIBRARY, output=said, status=1)
    assert found(broken)["libnccl"].found == (
        f"{LIBRARY} does not load: OSError: libcudart.so.12: cannot open"
    )
    inside = HEALTHY.answering("ldd", BINARY, output="\tnot a dynamic executable\n", status=1)
    assert found(inside)["libnccl"].status is UNKNOWN
    bare = HEALTHY.without("all_reduce").answering(*ask, "libnccl.so.2", output="22907\n")
    assert found(bare)["libnccl"].found == "NCCL 2.29.7, libnccl.so.2"


@pytest.mark.parametrize(("code", "status"), [("22907", FAIL), ("23007", OK), ("what", FAIL)])
def test_chunk_sizes_need_nccl_2_30(code: str, status: CheckStatus) -> None:
    machine = HEALTHY.answering(sys.executable, "-c", ASK_VERSION, LIBRARY, output=f"{code}\n")
    assert found(machine, sweep(chunk_sizes=[0, "256K"]))["libnccl"].status is status


def test_another_tuner_is_part_of_the_untouched_default_alone() -> None:
    check = found(HEALTHY.with_env(NCCL_TUNER_PLUGIN="aws"))["other tuner"]
    assert (check.status, check.found) == (WARN, "NCCL_TUNER_PLUGIN=aws (environment)")
    assert found(HEALTHY.with_env(NCCL_TUNER_PLUGIN="None"))["other tuner"].status is OK


def test_our_plugin_must_load() -> None:
    ask = (sys.executable, "-c", ASK_PLUGIN, recorded.PLUGIN, *recorded.TUNERS)
    said = "OSError: /lib/libc.so.6: version `GLIBC_2.38' not found"
    check = found(HEALTHY.answering(*ask, output=said, status=1))["our plugin"]
    assert (check.status, "GLIBC_2.38" in check.found) == (FAIL, True)
    check = found(HEALTHY.answering(*ask, output="ncclTunerPlugin_v4"))["our plugin"]
    assert (check.status, "ncclTunerPlugin_v6" in check.advice) == (FAIL, True)
    assert "our plugin" not in found(HEALTHY, DEFAULT_ONLY)


@pytest.mark.parametrize(("needs", "status"), [(ANY_SWEEP, FAIL), (DEFAULT_ONLY, WARN)])
def test_a_forced_algorithm_beats_a_tuner(needs: SweepFile, status: CheckStatus) -> None:
    machine = HEALTHY.with_env(NCCL_MAX_CTAS="8").holding("/etc/nccl.conf", "NCCL_PROTO=LL\n")
    said = found(machine, needs)
    assert (said["NCCL_PROTO"].status, said["NCCL_MAX_CTAS"].status) == (status, WARN)


# --- GPUs ---


GPUS, CLOCKS = smi("gpu", checks.GPU_FACTS), smi("gpu", checks.CLOCKS)
APPS = smi("compute-apps", checks.PROCESSES)


@pytest.mark.parametrize(
    ("lines", "status", "said"),
    [
        (8 * [GPU], OK, "8 x NVIDIA H100 80GB HBM3, driver 580.65.06"),
        (4 * [GPU], FAIL, "8 ranks per node"),
        ([*7 * [GPU], GPU.replace("H100", "H200")], WARN, "slowest"),
        ([*7 * [GPU], GPU.replace(" 0\n", " 2\n")], FAIL, "gpu7: 2"),
        ([*7 * [GPU], GPU.replace("Disabled", "Enabled")], WARN, "MIG"),
        (8 * [GPU.replace("Disabled, 0", "[N/A], [N/A]")], OK, "8 x"),
    ],
)
def test_gpus_are_enough_alike_and_healthy(
    lines: list[str], status: CheckStatus, said: str
) -> None:
    check = found(HEALTHY.answering(*GPUS, output="".join(lines)), EIGHT)["GPUs"]
    assert check.status is status
    assert said in check.found + check.advice


def test_no_gpu_fails_except_on_a_login_node() -> None:
    said = "No devices were found\n"
    bare = HEALTHY.answering(*GPUS, output=said, status=6)
    assert (found(bare)["GPUs"].status, found(bare)["GPUs"].found) == (FAIL, said.strip())
    login = found(bare, sweep(launcher={"kind": "sbatch"}))["GPUs"]
    assert (login.status, "srun -N1" in login.advice) == (UNKNOWN, True)
    assert found(bare.with_env(SLURM_JOB_ID="77"), SRUN)["GPUs"].status is FAIL


@pytest.mark.parametrize(
    ("last", "code", "status", "said"),
    [
        (CLOCK, 0, OK, "1980 of 1980 MHz"),
        ("900, 1980, 0x0000000000000040\n", 0, WARN, "slowed by heat or power: gpu7"),
        ("[N/A], [N/A], [N/A]\n", 0, OK, "[N/A] of [N/A] MHz"),
        # A driver that knows other words is no failure.
        ('Field "clocks_throttle_reasons.active" is not a valid field\n', 2, UNKNOWN, "Field"),
    ],
)
def test_clocks_are_full_or_slowed(last: str, code: int, status: CheckStatus, said: str) -> None:
    lines = last if code else 7 * CLOCK + last
    check = found(HEALTHY.answering(*CLOCKS, output=lines, status=code))["clocks"]
    assert (check.status, said in check.found + check.advice) == (status, True)


@pytest.mark.parametrize(
    ("said", "code", "status", "text"),
    [
        ("4242, python, 61234\n", 0, FAIL, "4242 (python, 61234 MiB)"),
        ("11, /usr/bin/nvidia-cuda-mps-server, 30\n", 0, OK, "none"),
        ("Insufficient Permissions\n", 4, UNKNOWN, "Insufficient Permissions"),
    ],
)
def test_another_job_on_the_gpus_fails(
    said: str, code: int, status: CheckStatus, text: str
) -> None:
    check = found(HEALTHY.answering(*APPS, output=said, status=code))["other jobs on the GPUs"]
    assert (check.status, check.found) == (status, text)


# --- Between nodes, and the host ---


def free(mib: int | None) -> Recorded:
    return replace(HEALTHY, free={"/dev/shm": mib if mib is None else mib << 20})


ONE_DOWN = HEALTHY.holding(f"{IB}/mlx5_1/ports/1/state", "1: DOWN\n")
ALL_DOWN = ONE_DOWN.holding(f"{IB}/mlx5_0/ports/1/state", "1: DOWN\n")
ONE_SLOW = HEALTHY.holding(f"{IB}/mlx5_1/ports/1/rate", "200 Gb/sec (4X HDR)\n")
NO_RDMA = HEALTHY.without("infiniband")
LIMITED = recorded.LIMITS.replace("unlimited", "8388608")
IN_JOB = HEALTHY.with_env(SLURM_JOB_ID="77")
ANY = ANY_SWEEP
NODE, NO_DRIVER = NODE_ARGV, '{"nvml_error": "Not Loaded"}\n'


@pytest.mark.parametrize(
    ("name", "machine", "needs", "status", "said"),
    [
        ("NICs", HEALTHY, ANY, OK, "mlx5_0 ACTIVE 400 Gb/sec (4X NDR), mlx5_1 ACTIVE 400"),
        ("NICs", ONE_DOWN, ANY, WARN, "mlx5_1 DOWN"),
        ("NICs", ONE_SLOW, ANY, WARN, "NCCL_IB_HCA"),
        ("NICs", ALL_DOWN, ANY, FAIL, "subnet manager"),
        ("NICs", NO_RDMA, ANY, OK, "no InfiniBand"),
        ("NICs", NO_RDMA, SRUN, WARN, "TCP sockets"),
        ("GPUDirect RDMA", HEALTHY.holding("/proc/modules", "efa 1 0\n"), ANY, OK, "efa"),
        ("GPUDirect RDMA", HEALTHY.holding("/proc/modules", "gdrdrv 1 0\n"), ANY, WARN, "GDRDMA"),
        ("locked memory", HEALTHY.holding("/proc/self/limits", LIMITED), ANY, WARN, "8388608"),
        ("locked memory", HEALTHY.holding("/proc/self/limits", ""), ANY, WARN, "not known"),
        ("Slurm allocation", HEALTHY, SRUN, FAIL, "salloc -N 4"),
        ("Slurm allocation", IN_JOB, SRUN, OK, "77"),
        ("/dev/shm", free(None), ANY, FAIL, "it is not there"),
        ("/dev/shm", free(64), ANY, WARN, "--shm-size=1g"),
        ("telemetry", HEALTHY.answering(*NODE, output=NO_DRIVER), ANY, WARN, '"Not Loaded"'),
        ("telemetry", HEALTHY.answering(*NODE, output="a\nImportError: x"), ANY, WARN, "Error: x"),
    ],
)
def test_what_is_wrong_is_said_with_the_fix(
    name: str, machine: Recorded, needs: SweepFile, status: CheckStatus, said: str
) -> None:
    check = found(machine, needs)[name]
    assert (check.status, said in f"{check.found}: {check.advice}") == (status, True)


def test_what_a_sweep_does_not_need_is_not_asked() -> None:
    assert "Slurm allocation" not in found(HEALTHY)
    assert "GPUDirect RDMA" not in found(NO_RDMA)
    assert "Slurm allocation" not in found(HEALTHY, sweep(launcher={"kind": "sbatch"}))
    assert "telemetry" not in found(HEALTHY, sweep(telemetry={"enabled": False}))
