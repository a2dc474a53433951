"""GPUs, NICs, the host, and what starts ranks."""

import sys
from dataclasses import replace

import pytest

from dynamiccl.checks import Verdict
from dynamiccl.collect.doctor.context import Context
from dynamiccl.collect.doctor.gpus import CLOCKS, FACTS, query
from dynamiccl.collect.doctor.host import ASK_TORCH
from tests.collect.doctor.recorded import (
    CLOCK,
    GIB,
    GPU,
    HEALTHY,
    LIMITS,
    MODULES,
    Recorded,
    findings,
)

OK, WARN, FAIL, UNKNOWN = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN
APPS = query("compute-apps", ("pid", "process_name", "used_memory"))
IB = "/sys/class/infiniband"


def gpus(*lines: str) -> Recorded:
    return HEALTHY.answering(*query("gpu", FACTS), output="".join(lines))


def one_gpu(before: str, after: str) -> Recorded:
    """Eight GPUs, of which the fourth is different."""
    lines = [GPU.format(i) for i in range(8)]
    assert before in lines[3]
    lines[3] = lines[3].replace(before, after)
    return gpus(*lines)


def test_gpus_are_counted_and_named() -> None:
    assert findings(HEALTHY)["GPUs"].found == "8 x NVIDIA H100 80GB HBM3, driver 580.65.06"


def test_too_few_gpus_for_the_ranks_fail() -> None:
    check = findings(gpus(GPU.format(0)), Context(ranks_per_node=8))["GPUs"]
    assert check.status is FAIL
    assert "8 ranks per node" in check.advice


def test_unlike_gpus_are_told() -> None:
    assert findings(one_gpu("H100", "H200"))["GPUs"].status is WARN


def test_traffic_wants_spare_gpus() -> None:
    traffic = frozenset({"traffic"})
    full = Context(ranks_per_node=8, interference=traffic)
    assert findings(HEALTHY, full)["GPUs"].status is FAIL
    assert findings(HEALTHY, replace(full, ranks_per_node=4))["GPUs"].status is OK


def test_no_gpu_fails_except_on_a_login_node() -> None:
    bare = HEALTHY.answering(*query("gpu", FACTS), output="No devices were found\n", status=6)
    assert findings(bare)["GPUs"].status is FAIL
    login = findings(bare, Context(launcher="sbatch"))["GPUs"]
    assert (login.status, "srun -N1" in login.advice) == (UNKNOWN, True)
    node = bare.with_env(SLURM_JOB_ID="77", SLURM_NNODES="1")
    assert findings(node, Context(launcher="srun"))["GPUs"].status is FAIL


def test_a_driver_that_unloads_costs_time() -> None:
    machine = one_gpu("580.65.06, Enabled", "580.65.06, Disabled")
    assert findings(machine)["persistence mode"].found == "off on 1 of 8 GPUs"


def test_memory_errors_fail() -> None:
    check = findings(one_gpu("Enabled, 0,", "Enabled, 2,"))["ECC"]
    assert check.status is FAIL
    assert "gpu3: 2" in check.found


def test_ecc_modes_must_be_alike() -> None:
    assert findings(one_gpu("Enabled, 0,", "Disabled, 0,"))["ECC"].status is WARN
    consumer = [GPU.format(i).replace("Enabled, 0,", "[N/A], [N/A],") for i in range(2)]
    assert findings(gpus(*consumer))["ECC"].found == "[N/A], no uncorrected errors"


def test_mig_is_told() -> None:
    assert findings(one_gpu(", Disabled", ", Enabled"))["MIG"].found == "on (1 of 8 GPUs)"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (CLOCK, OK),
        ("1410, 1980, 0x0000000000000002, 0\n", OK),
        ("345, 1980, 0x0000000000000001, 0\n", WARN),
        ("1980, 1980, 0x0000000000000000, 97\n", UNKNOWN),
        ("[N/A], [N/A], [N/A], [N/A]\n", UNKNOWN),
        ("", UNKNOWN),
    ],
)
def test_clocks_that_fall_when_idle_are_not_locked(line: str, status: Verdict) -> None:
    machine = HEALTHY.answering(*query("gpu", CLOCKS), output=8 * line)
    assert findings(machine)["clocks"].status is status


def test_one_unlocked_gpu_is_enough() -> None:
    lines = 7 * CLOCK + "345, 1980, 0x0000000000000001, 0\n"
    machine = HEALTHY.answering(*query("gpu", CLOCKS), output=lines)
    assert findings(machine)["clocks"].status is WARN


def test_a_driver_that_knows_other_words_for_clocks_is_no_failure() -> None:
    said = 'Field "clocks_throttle_reasons.active" is not a valid field to query.\n'
    machine = HEALTHY.answering(*query("gpu", CLOCKS), output=said, status=2)
    assert findings(machine)["clocks"].status is UNKNOWN


def test_throttling_is_told_with_its_reason() -> None:
    lines = 7 * CLOCK + "900, 1980, 0x0000000000000040, 99\n"
    machine = HEALTHY.answering(*query("gpu", CLOCKS), output=lines)
    assert findings(machine)["throttling"].found == "slowed right now: gpu7: hw_thermal_slowdown"
    assert "throttling" not in findings(HEALTHY)


def test_another_job_on_the_gpus_fails() -> None:
    machine = HEALTHY.answering(*APPS, output="4242, python, 61234\n")
    check = findings(machine)["other jobs on the GPUs"]
    assert (check.status, check.found) == (FAIL, "1 processes: 4242 (python, 61234 MiB)")


def test_a_server_that_shares_gpus_is_no_job() -> None:
    machine = HEALTHY.answering(*APPS, output="11, /usr/bin/nvidia-cuda-mps-server, 30\n")
    assert findings(machine)["other jobs on the GPUs"].status is OK


def test_processes_that_cannot_be_listed_are_not_known() -> None:
    machine = HEALTHY.answering(*APPS, output="Insufficient Permissions\n", status=4)
    assert findings(machine)["other jobs on the GPUs"].status is UNKNOWN


def test_links_are_told_with_their_rate() -> None:
    assert findings(HEALTHY)["NICs"].found == "2 of 2 ports are up (400 Gb/sec (4X NDR))"


def test_a_link_that_is_down_or_slow_is_named() -> None:
    down = HEALTHY.holding(f"{IB}/mlx5_1/ports/1/state", "1: DOWN\n")
    check = findings(down)["NICs"]
    assert (check.status, "mlx5_1 is DOWN" in check.found) == (WARN, True)
    slow = HEALTHY.holding(f"{IB}/mlx5_1/ports/1/rate", "200 Gb/sec (2X NDR)\n")
    assert "mlx5_1 200 Gb/sec" in findings(slow)["NICs"].found
    all_down = down.holding(f"{IB}/mlx5_0/ports/1/state", "2: INIT\n")
    assert findings(all_down)["NICs"].status is FAIL


def test_a_second_port_has_a_name_of_its_own() -> None:
    machine = HEALTHY.holding(f"{IB}/mlx5_0/ports/2/state", "1: DOWN\n")
    assert "mlx5_0:2 is DOWN" in findings(machine)["NICs"].found


def test_nodes_without_rdma_matter_only_when_there_are_several() -> None:
    without = HEALTHY.without("infiniband")
    assert findings(without)["NICs"].status is OK
    found = findings(without, Context(num_nodes=2))
    assert found["NICs"].status is WARN
    assert "GPUDirect RDMA" not in found


@pytest.mark.parametrize(
    ("modules", "status", "word"),
    [
        (MODULES, OK, "nvidia_peermem loaded"),
        ("nv_peer_mem 1 0 - Live 0x0\ngdrdrv 1 0 - Live 0x0\n", OK, "nv_peer_mem, gdrdrv loaded"),
        ("efa 1 0 - Live 0x0\n", OK, "EFA"),
        ("gdrdrv 1 0 - Live 0x0\n", WARN, "no nvidia_peermem (only gdrdrv)"),
        ("", WARN, "no nvidia_peermem"),
    ],
)
def test_gpudirect_needs_a_module(modules: str, status: Verdict, word: str) -> None:
    check = findings(HEALTHY.holding("/proc/modules", modules))["GPUDirect RDMA"]
    assert check.status is status
    assert word in check.found


@pytest.mark.parametrize(
    ("limits", "found"),
    [(LIMITS.replace("unlimited", "8388608"), "limit of 8388608 bytes"), ("", "unknown")],
)
def test_rdma_pins_memory(limits: str, found: str) -> None:
    check = findings(HEALTHY.holding("/proc/self/limits", limits))["locked memory"]
    assert (check.status, check.found) == (WARN, found)


def test_governors_other_than_performance_are_counted() -> None:
    path = "/sys/devices/system/cpu/cpu1/cpufreq/scaling_governor"
    check = findings(HEALTHY.holding(path, "powersave\n"))["CPU governor"]
    assert check.status is WARN
    assert "powersave on 1 CPUs" in check.found
    assert findings(HEALTHY.without("scaling_governor"))["CPU governor"].status is UNKNOWN


@pytest.mark.parametrize(
    ("place", "name", "free", "status"),
    [
        ("/dev/shm", "/dev/shm", None, FAIL),
        ("/dev/shm", "/dev/shm", 64 << 20, WARN),
        (".", "disk", None, UNKNOWN),
        (".", "disk", 50 << 20, FAIL),
        (".", "disk", GIB, WARN),
    ],
)
def test_room_runs_out(place: str, name: str, free: int | None, status: Verdict) -> None:
    machine = replace(HEALTHY, free={**HEALTHY.free, place: free})
    assert findings(machine)[name].status is status


def test_a_file_system_without_locks_is_told() -> None:
    assert findings(HEALTHY)["file system"].found == "xfs, which knows file locks"
    lustre = HEALTHY.answering("stat", "--file-system", "--format=%T", ".", output="lustre\n")
    words = "flock: .: Function not implemented\n"
    lustre = lustre.answering("flock", "--nonblock", ".", "true", output=words, status=1)
    check = findings(lustre)["file system"]
    assert check.status is WARN
    assert check.found == "lustre, no file locks (flock: .: Function not implemented)"
    assert "--take-over" in check.advice


NODE = (sys.executable, "-m", "dynamiccl.collect.nodes")


def test_telemetry_without_nvml_is_told_and_not_asked_for_when_off() -> None:
    blind = HEALTHY.answering(*NODE, output='{"nvml_error": "Driver Not Loaded"}\n')
    check = findings(blind)["telemetry"]
    assert (check.status, check.found) == (WARN, "no GPU readings (Driver Not Loaded)")
    broken = HEALTHY.answering(*NODE, output="Traceback\nImportError: x\n", status=1)
    assert "ImportError: x" in findings(broken)["telemetry"].found
    assert "telemetry" not in findings(blind, Context(wants_telemetry=False))


@pytest.mark.parametrize(
    ("output", "code", "status"),
    [
        ("2.13.0+cu130 True\n", 0, OK),
        ("2.13.0+cpu False\n", 0, FAIL),
        ("Traceback\nModuleNotFoundError: No module named 'torch'\n", 1, FAIL),
    ],
)
def test_gemm_needs_a_torch_that_sees_a_gpu(output: str, code: int, status: Verdict) -> None:
    machine = HEALTHY.answering(sys.executable, "-c", ASK_TORCH, output=output, status=code)
    context = Context(interference=frozenset({"none", "gemm"}))
    assert findings(machine, context)["torch"].status is status
    assert "torch" not in findings(machine)


MPIRUN = ("mpirun", "--version")


@pytest.mark.parametrize(
    ("output", "code", "status", "found"),
    [
        ("mpirun (Open MPI) 4.1.4\n", 0, OK, "Open MPI 4.1.4"),
        ("mpirun (PRRTE/Open MPI) 5.0.3\n", 0, OK, "Open MPI 5.0.3"),
        ("HYDRA build details:\n    Version:   4.1.2\n", 0, FAIL, "MPICH 4.1.2"),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307 (id: d82b3071db)\n",
            0,
            FAIL,
            "Intel MPI 2021.9",
        ),
        ("something else 1.0\n", 0, UNKNOWN, "something else 1.0"),
        ("mpirun: No such file or directory", None, FAIL, "mpirun: No such file or directory"),
    ],
)
def test_flavours_of_mpi(output: str, code: int | None, status: Verdict, found: str) -> None:
    machine = HEALTHY.answering(*MPIRUN, output=output, status=code)
    check = findings(machine, Context(launcher="mpirun"))["MPI"]
    assert (check.status, check.found) == (status, found)


IN_JOB = HEALTHY.with_env(SLURM_JOB_ID="77", SLURM_JOB_NUM_NODES="4")
SRUN = Context(launcher="srun", num_nodes=4)


def test_slurm_in_an_allocation() -> None:
    found = findings(IN_JOB, SRUN)
    assert found["Slurm"].found == "partitions: gpu (64 nodes), debug (2 nodes)"
    assert found["Slurm allocation"].found == "job 77, 4 nodes"
    assert found["exclusive nodes"].status is OK


def test_srun_wants_an_allocation_and_sbatch_makes_one() -> None:
    assert findings(HEALTHY, SRUN)["Slurm allocation"].status is FAIL
    assert "Slurm allocation" not in findings(HEALTHY, replace(SRUN, launcher="sbatch"))


def test_an_allocation_may_be_too_small() -> None:
    machine = IN_JOB.with_env(SLURM_JOB_NUM_NODES="2")
    assert findings(machine, SRUN)["Slurm allocation"].status is FAIL


@pytest.mark.parametrize(
    ("output", "status"),
    [("OverSubscribe=OK", WARN), ("OverSubscribe=NO", OK), ("Invalid job id", UNKNOWN)],
)
def test_shared_nodes_are_told(output: str, status: Verdict) -> None:
    machine = IN_JOB.answering("scontrol", "show", "job", "77", output=output)
    assert findings(machine, SRUN)["exclusive nodes"].status is status


SINFO = ("sinfo", "-h", "-o", "%P|%a|%D")


@pytest.mark.parametrize(
    ("output", "code", "partition", "status"),
    [
        ("gpu*|up|64\n", 0, "gpu", OK),
        ("gpu*|up|64\n", 0, "gpus", FAIL),
        ("gpu*|down|64\n", 0, "gpu", FAIL),
        ("gpu*|down|64\n", 0, None, FAIL),
        ("slurm_load_partitions: Unable to contact slurm controller\n", 1, None, FAIL),
    ],
)
def test_partitions(output: str, code: int, partition: str | None, status: Verdict) -> None:
    machine = HEALTHY.answering(*SINFO, output=output, status=code)
    context = Context(launcher="sbatch", partition=partition)
    assert findings(machine, context)["Slurm"].status is status


def test_a_machine_without_slurm_fails_the_launcher_that_wants_it() -> None:
    found = findings(HEALTHY.without("srun"), SRUN)
    assert found["Slurm"].found == "no srun on PATH"
    assert "Slurm" not in findings(HEALTHY.without("srun"))


@pytest.mark.parametrize(
    ("runtime", "machine", "status"),
    [
        ("pyxis", HEALTHY, OK),
        ("pyxis", HEALTHY.answering("srun", "--help", output="no such option"), FAIL),
        ("apptainer", HEALTHY, OK),
        ("enroot", HEALTHY, FAIL),
    ],
)
def test_container_runtimes(runtime: str, machine: Recorded, status: Verdict) -> None:
    assert findings(machine, Context(container=runtime))["container"].status is status


TIMEDATECTL = ("timedatectl", "show", "-p", "NTPSynchronized", "--value")
CHRONY = "Reference ID    : A9FEA97B\nStratum         : 4\nLeap status     : {0}\n"


@pytest.mark.parametrize(
    ("systemd", "chrony", "status"),
    [
        ("yes\n", None, OK),
        ("no\n", None, WARN),
        (None, CHRONY.format("Normal"), OK),
        (None, CHRONY.format("Not synchronised"), WARN),
        (None, None, UNKNOWN),
    ],
)
def test_clocks_of_nodes_must_agree(
    systemd: str | None, chrony: str | None, status: Verdict
) -> None:
    machine = HEALTHY.answering(
        *TIMEDATECTL, output=systemd or "", status=None if systemd is None else 0
    ).answering("chronyc", "tracking", output=chrony or "", status=None if chrony is None else 0)
    assert findings(machine, Context(launcher="mpirun"))["clock"].status is status
    assert "clock" not in findings(machine)
