"""`dynamiccl-collect doctor`: what each check says of a recorded machine."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect import checks
from dynamiccl.collect.checks import ANY_SWEEP, Needs, smi
from dynamiccl.collect.node_facts import node_argv
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.doctor import ASK_PLUGIN, ASK_VERSION, Check, CheckStatus, Machine
from tests import recorded
from tests.recorded import BINARY, CLOCK, GPU, HEALTHY, IB, LIBRARY, Recorded

OK, WARN, FAIL, UNKNOWN = CheckStatus


def sweep(**tables: Any) -> Needs:
    """A sweep that differs in these tables from the one without a file."""
    given = ANY_SWEEP.model_dump(exclude_unset=True) | tables
    return Needs(sweep=SweepFile.model_validate(given))


def found(machine: Machine, needs: Needs = Needs()) -> dict[str, Check]:  # noqa: B008
    return recorded.by_name(machine, checks.sweep_checks(needs))


FORCED = sweep(runner={"mode": "sweep"})
PROCESSES_ONLY = sweep(runner={"mode": "processes"})
EIGHT = sweep(groups=[{"num_nodes": 1, "ranks_per_node": 8}])
MPIRUN = sweep(launcher={"kind": "mpirun"})
SRUN = sweep(launcher={"kind": "srun"}, groups=[{"num_nodes": 4, "ranks_per_node": 8}])


def test_a_healthy_node_needs_no_advice() -> None:
    in_job = HEALTHY.with_env(SLURM_JOB_ID="77")
    for each in (found(HEALTHY), found(HEALTHY, MPIRUN), found(in_job, SRUN)):
        assert {check.name: check.advice for check in each.values() if check.status != OK} == {}


def test_an_answer_that_is_missing_is_never_a_crash() -> None:
    nothing: dict[str, Any] = {"/dev/shm": None, ".": None}
    machine = Recorded(runs={}, files={}, programs={}, free=nothing)
    for kind in ("local", "mpirun", "srun", "sbatch"):
        assert found(machine, sweep(launcher={"kind": kind}))["nccl-tests"].status is FAIL
        container = {"runtime": "pyxis", "image": "x.sqsh"}
        outside = sweep(launcher={"kind": kind, "container": container})
        assert found(machine, outside)["container"].status is FAIL
        # What the host has says nothing about the image.
        assert not {"nccl-tests", "libnccl"} & found(machine, outside).keys()
        assert "nccl-tests" in found(machine, replace(outside, inside=True))


# --- nccl-tests and NCCL ---


def test_missing_binaries_are_named() -> None:
    needs = sweep(collectives=["AllReduce", "Broadcast", "Scatter"])
    check = found(HEALTHY, needs)["nccl-tests"]
    assert (check.status, check.found) == (FAIL, "no binary for Broadcast, Scatter in PATH")
    assert "--nccl-tests-dir" in check.advice
    there, elsewhere = (Needs(nccl_tests_dir=Path(p)) for p in ("/opt/nccl-tests", "/else"))
    assert found(HEALTHY, there)["nccl-tests"].found == BINARY
    assert found(HEALTHY, elsewhere)["nccl-tests"].status is FAIL


def test_a_binary_with_mpi_is_taken_where_ranks_are_processes() -> None:
    both = replace(HEALTHY, programs={**HEALTHY.programs, "all_reduce_perf_mpi": "/opt/mpi/ar"})
    both = both.answering("/opt/mpi/ar", "-h", output=recorded.HELP)
    assert found(both, MPIRUN)["nccl-tests"].found == "/opt/mpi/ar"
    assert found(both)["nccl-tests"].found == BINARY
    plain = HEALTHY.answering("ldd", BINARY, output=recorded.LDD.replace("libmpi", "libm"))
    assert found(plain, MPIRUN)["nccl-tests with MPI"].status is FAIL
    assert "nccl-tests with MPI" not in found(plain)


@pytest.mark.parametrize(
    ("needs", "status"), [(FORCED, FAIL), (Needs(), WARN), (PROCESSES_ONLY, OK)]
)
def test_many_configs_in_a_process_need_cycles_and_a_cost_table(
    needs: Needs, status: CheckStatus
) -> None:
    old = HEALTHY.answering(BINARY, "-h", output=recorded.HELP.replace("[-N,", "["))
    check = found(old, needs)["nccl-tests"]
    assert (check.status, "2.13" in check.advice) == (status, status is not OK)
    old = HEALTHY.answering(sys.executable, "-c", ASK_VERSION, LIBRARY, output="22105\n")
    assert found(old, needs)["libnccl"].status is status


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


@pytest.mark.parametrize(("needs", "status"), [(FORCED, FAIL), (Needs(), WARN)])
def test_our_plugin_must_load(needs: Needs, status: CheckStatus) -> None:
    ask = (sys.executable, "-c", ASK_PLUGIN, recorded.PLUGIN, *recorded.TUNERS)
    said = "OSError: /lib/libc.so.6: version `GLIBC_2.38' not found"
    check = found(HEALTHY.answering(*ask, output=said, status=1), needs)["our plugin"]
    assert (check.status, "GLIBC_2.38" in check.found) == (status, True)
    check = found(HEALTHY.answering(*ask, output="ncclTunerPlugin_v2"), needs)["our plugin"]
    assert (check.status, "ncclTunerPlugin_v6" in check.advice) == (status, True)
    assert "our plugin" not in found(HEALTHY, PROCESSES_ONLY)


@pytest.mark.parametrize(("needs", "status"), [(Needs(), FAIL), (PROCESSES_ONLY, WARN)])
def test_a_forced_algorithm_beats_a_tuner(needs: Needs, status: CheckStatus) -> None:
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
        ("1410, 1980, 0x0000000000000002, 0\n", 0, OK, "1410 of 1980 MHz"),
        ("345, 1980, 0x0000000000000001, 0\n", 0, WARN, "nvidia-smi -lgc"),
        ("900, 1980, 0x0000000000000040, 99\n", 0, WARN, "slowed by hw_thermal_slowdown"),
        ("1980, 1980, 0x0000000000000000, 97\n", 0, UNKNOWN, "idle GPUs show"),
        ("[N/A], [N/A], [N/A], [N/A]\n", 0, UNKNOWN, "idle GPUs show"),
        # A driver that knows other words is no failure.
        ('Field "clocks_throttle_reasons.active" is not a valid field\n', 2, UNKNOWN, "Field"),
    ],
)
def test_clocks_are_locked_fall_when_idle_or_are_slowed(
    last: str, code: int, status: CheckStatus, said: str
) -> None:
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


# --- Between nodes ---


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({}, OK, "mlx5_0 ACTIVE 400 Gb/sec (4X NDR), mlx5_1 ACTIVE 400"),
        ({"mlx5_1/ports/1/state": "1: DOWN\n"}, WARN, "mlx5_1 DOWN"),
        ({"mlx5_1/ports/1/rate": "200 Gb/sec (4X HDR)\n"}, WARN, "NCCL_IB_HCA"),
        ({f"mlx5_{k}/ports/1/state": "1: DOWN\n" for k in (0, 1)}, FAIL, "subnet manager"),
    ],
)
def test_a_link_that_is_down_or_slow_is_named(
    changes: dict[str, str], status: CheckStatus, said: str
) -> None:
    machine = HEALTHY
    for path, text in changes.items():
        machine = machine.holding(f"{IB}/{path}", text)
    check = found(machine)["NICs"]
    assert (check.status, said in check.found + check.advice) == (status, True)


def test_without_rdma_several_nodes_are_warned() -> None:
    bare = HEALTHY.without("infiniband")
    assert found(bare)["NICs"].status is OK
    assert found(bare, SRUN)["NICs"].status is WARN
    assert "GPUDirect RDMA" not in found(bare, SRUN)


@pytest.mark.parametrize(
    ("modules", "status"),
    [("nv_peer_mem 1 0\n", OK), ("efa 1 0\n", OK), ("gdrdrv 1 0\n", WARN), ("", WARN)],
)
def test_gpudirect_needs_a_module(modules: str, status: CheckStatus) -> None:
    check = found(HEALTHY.holding("/proc/modules", modules))["GPUDirect RDMA"]
    assert check.status is status


@pytest.mark.parametrize(
    ("limits", "text"),
    [(recorded.LIMITS.replace("unlimited", "8388608"), "8388608"), ("", "not known")],
)
def test_rdma_pins_memory(limits: str, text: str) -> None:
    check = found(HEALTHY.holding("/proc/self/limits", limits))["locked memory"]
    assert (check.status, check.found) == (WARN, text)


@pytest.mark.parametrize(
    ("said", "code", "status"),
    [
        ("mpirun (PRRTE/Open MPI) 5.0.3\n", 0, OK),
        ("HYDRA build details:\n    Version:   4.1.2\n", 0, FAIL),
        ("mpirun: No such file or directory", None, FAIL),
    ],
)
def test_mpirun_must_be_open_mpis(said: str, code: int | None, status: CheckStatus) -> None:
    machine = HEALTHY.answering("mpirun", "--version", output=said, status=code)
    assert found(machine, MPIRUN)["MPI"].status is status


@pytest.mark.parametrize(("said", "status"), [("no\n", WARN), ("System has not been", UNKNOWN)])
def test_clocks_of_nodes_must_agree(said: str, status: CheckStatus) -> None:
    asked = ("timedatectl", "show", "-p", "NTPSynchronized", "--value")
    machine = HEALTHY.answering(*asked, output=said)
    assert found(machine, MPIRUN)["clock"].status is status
    assert "clock" not in found(machine)


@pytest.mark.parametrize(
    ("said", "status", "text"),
    [
        ("NumNodes=4 OverSubscribe=NO", OK, "job 77"),
        ("NumNodes=2 OverSubscribe=NO", FAIL, "wants 4 nodes"),
        ("NumNodes=4-8 OverSubscribe=OK", WARN, "--exclusive"),
        ("Invalid job id", UNKNOWN, "Invalid job id"),
    ],
)
def test_an_allocation_is_large_enough_and_ours(said: str, status: CheckStatus, text: str) -> None:
    machine = HEALTHY.with_env(SLURM_JOB_ID="77")
    machine = machine.answering("scontrol", "show", "job", "77", output=said)
    check = found(machine, SRUN)["Slurm allocation"]
    assert (check.status, text in check.found + check.advice) == (status, True)


def test_srun_wants_an_allocation_and_sbatch_makes_one() -> None:
    assert found(HEALTHY, SRUN)["Slurm allocation"].status is FAIL
    assert "Slurm allocation" not in found(HEALTHY, sweep(launcher={"kind": "sbatch"}))
    for said, code in (("gpu* down 64\n", 0), ("Unable to contact slurm controller\n", 1)):
        machine = HEALTHY.answering("sinfo", "-h", "-o", "%P %a %D", output=said, status=code)
        check = found(machine, SRUN)["Slurm"]
        assert (check.status, check.found) == (FAIL, said.strip())


@pytest.mark.parametrize(
    ("runtime", "machine", "status"),
    [
        ("pyxis", HEALTHY, OK),
        ("pyxis", HEALTHY.answering("srun", "--help", output="no such option"), FAIL),
        ("apptainer", HEALTHY, OK),
        ("enroot", HEALTHY, FAIL),
    ],
)
def test_container_runtimes(runtime: str, machine: Recorded, status: CheckStatus) -> None:
    needs = sweep(launcher={"kind": "srun", "container": {"runtime": runtime, "image": "x"}})
    assert found(machine, needs)["container"].status is status


# --- The host ---


def test_governors_other_than_performance_are_counted() -> None:
    path = "/sys/devices/system/cpu/cpu1/cpufreq/scaling_governor"
    check = found(HEALTHY.holding(path, "powersave\n"))["CPU governor"]
    assert (check.status, "powersave on 1 CPUs" in check.found) == (WARN, True)
    assert found(HEALTHY.without("scaling_governor"))["CPU governor"].status is UNKNOWN


@pytest.mark.parametrize(
    ("place", "name", "free", "status"),
    [
        ("/dev/shm", "/dev/shm", None, FAIL),
        ("/dev/shm", "/dev/shm", 64 << 20, WARN),
        (".", "disk", 50 << 20, FAIL),
        (".", "disk", 1 << 30, WARN),
    ],
)
def test_room_runs_out(place: str, name: str, free: int | None, status: CheckStatus) -> None:
    machine = replace(HEALTHY, free={**HEALTHY.free, place: free})
    assert found(machine)[name].status is status


def test_a_node_without_nvml_is_told_and_not_asked_where_telemetry_is_off() -> None:
    blind = HEALTHY.answering(*node_argv(), output='{"nvml_error": "Driver Not Loaded"}\n')
    check = found(blind)["telemetry"]
    assert (check.status, check.found) == (WARN, '"Driver Not Loaded"')
    broken = HEALTHY.answering(*node_argv(), output="Traceback\nImportError: x\n", status=1)
    assert found(broken)["telemetry"].found == "ImportError: x"
    assert "telemetry" not in found(blind, sweep(telemetry={"enabled": False}))
