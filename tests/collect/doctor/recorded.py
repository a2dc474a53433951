"""A fake machine with recorded outputs of programs and contents of files."""

import fnmatch
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dynamiccl.checks import Check
from dynamiccl.collect.doctor.context import Context
from dynamiccl.collect.doctor.examine import run_checks
from dynamiccl.collect.doctor.gpus import CLOCKS, FACTS, query
from dynamiccl.collect.doctor.host import ASK_TORCH
from dynamiccl.machine import ProgramResult
from dynamiccl.nccl_setup import ASK_TUNER, ASK_VERSION

GIB = 1 << 30
ABSENT = ProgramResult(None, "no such file or directory")

#: `all_reduce_perf -h` of nccl-tests 2.19.6, shortened.
HELP = """\
USAGE: all_reduce_perf
\t[-t,--nthreads <num threads>]
\t[-g,--ngpus <gpus per thread>]
\t[-b,--minbytes <min size in bytes>]
\t[-e,--maxbytes <max size in bytes>]
\t[-f,--stepfactor <increment factor>]
\t[-n,--iters <iteration count>]
\t[-w,--warmup_iters <warmup iteration count>]
\t[-N,--run_cycles <cycle count> run & print each cycle. default: 1; 0=infinite]
\t[-c,--check <check iteration count>]
\t[-J,--output_file <file> write output to filepath, if accessible.]
\t[-I,--per_iter_timing <0/1> time each iteration]
\t[-h,--help]
"""
LDD = """\
\tlinux-vdso.so.1 (0x00007ffd8a5f2000)
\tlibnccl.so.2 => /opt/nccl/lib/libnccl.so.2 (0x00007f8a2c000000)
\tlibmpi.so.40 => /usr/lib/x86_64-linux-gnu/libmpi.so.40 (0x00007f8a2bc00000)
"""
LDCONFIG = """\
2 libs found in cache `/etc/ld.so.cache'
\tlibnccl.so.2 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libnccl.so.2
\tlibc.so.6 (libc6,x86-64, OS ABI: Linux 3.2.0) => /lib/x86_64-linux-gnu/libc.so.6
"""
GPU = "{0}, NVIDIA H100 80GB HBM3, 580.65.06, Enabled, Enabled, 0, Disabled\n"
CLOCK = "1980, 1980, 0x0000000000000001, 0\n"
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            1048576              1048576              files
Max locked memory         unlimited            unlimited            bytes
"""
MODULES = "nvidia_peermem 16384 0 - Live 0x0\nmlx5_core 2420736 1 mlx5_ib, Live 0x0\n"
NODE = '{"host": "n1", "nvml_error": null}\n'
PLUGIN = "out/plugin/libnccl-tuner-dynamiccl-sweep.so"
BINARY = "/opt/nccl-tests/all_reduce_perf"

HEALTHY_RUNS: Mapping[tuple[str, ...], ProgramResult] = {
    (BINARY, "-h"): ProgramResult(0, HELP),
    ("ldd", BINARY): ProgramResult(0, LDD),
    (sys.executable, "-c", ASK_VERSION, "/opt/nccl/lib/libnccl.so.2"): ProgramResult(0, "22907\n"),
    (sys.executable, "-c", ASK_TUNER, PLUGIN): ProgramResult(0, "2 3 4 5 6\n"),
    (sys.executable, "-m", "dynamiccl.collect.nodes"): ProgramResult(0, NODE),
    (sys.executable, "-c", ASK_TORCH): ProgramResult(0, "2.13.0+cu130 True\n"),
    ("/sbin/ldconfig", "-p"): ProgramResult(0, LDCONFIG),
    query("gpu", FACTS): ProgramResult(0, "".join(GPU.format(i) for i in range(8))),
    query("gpu", CLOCKS): ProgramResult(0, 8 * CLOCK),
    query("compute-apps", ("pid", "process_name", "used_memory")): ProgramResult(0, ""),
    ("mpirun", "--version"): ProgramResult(0, "mpirun (Open MPI) 4.1.4\n\nReport bugs to ...\n"),
    ("sinfo", "-h", "-o", "%P|%a|%D"): ProgramResult(0, "gpu*|up|64\ndebug|up|2\nold|down|8\n"),
    ("scontrol", "show", "job", "77"): ProgramResult(
        0, "JobId=77 JobName=x\n   OverSubscribe=NO Contig=0\n"
    ),
    ("srun", "--help"): ProgramResult(
        0, "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH\n"
    ),
    ("stat", "--file-system", "--format=%T", "."): ProgramResult(0, "xfs\n"),
    ("flock", "--nonblock", ".", "true"): ProgramResult(0, ""),
    ("timedatectl", "show", "-p", "NTPSynchronized", "--value"): ProgramResult(0, "yes\n"),
}
HEALTHY_FILES: Mapping[str, str] = {
    "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "/sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "/sys/class/infiniband/mlx5_1/ports/1/state": "4: ACTIVE\n",
    "/sys/class/infiniband/mlx5_1/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "/sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance\n",
    "/proc/modules": MODULES,
    "/proc/self/limits": LIMITS,
    PLUGIN: "ELF",
}
HEALTHY_PROGRAMS = {
    "all_reduce_perf": BINARY,
    "srun": "/usr/bin/srun",
    "sbatch": "/usr/bin/sbatch",
    "apptainer": "/usr/bin/apptainer",
}


@dataclass(frozen=True)
class Recorded:
    """A healthy node of eight H100, with changes."""

    env: Mapping[str, str] = field(default_factory=dict)
    runs: Mapping[tuple[str, ...], ProgramResult] = field(default_factory=lambda: HEALTHY_RUNS)
    files: Mapping[str, str] = field(default_factory=lambda: HEALTHY_FILES)
    programs: Mapping[str, str] = field(default_factory=lambda: HEALTHY_PROGRAMS)
    free: Mapping[str, int | None] = field(
        default_factory=lambda: {"/dev/shm": 100 * GIB, ".": 100 * GIB}
    )

    def run(self, *argv: str) -> ProgramResult:
        return self.runs.get(argv, ABSENT)

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def paths(self, pattern: str) -> list[str]:
        return sorted(path for path in self.files if fnmatch.fnmatch(path, pattern))

    def which(self, name: str, folder: str | None = None) -> str | None:
        found = self.programs.get(name)
        return found if folder is None or (found or "").startswith(f"{folder}/") else None

    def free_bytes(self, path: str) -> int | None:
        return self.free[path]

    def answering(self, *argv: str, output: str = "", status: int | None = 0) -> "Recorded":
        """The same machine with another output of one program."""
        return replace(self, runs={**self.runs, argv: ProgramResult(status, output)})

    def holding(self, path: str, text: str) -> "Recorded":
        """The same machine with another file."""
        return replace(self, files={**self.files, path: text})

    def without(self, part: str) -> "Recorded":
        """The same machine without programs and files whose name contains `part`."""
        return replace(
            self,
            programs={name: path for name, path in self.programs.items() if part not in name},
            files={path: text for path, text in self.files.items() if part not in path},
        )

    def with_env(self, **env: str) -> "Recorded":
        """The same machine in another environment."""
        return replace(self, env={**self.env, **env})


HEALTHY = Recorded()


def findings(machine: Recorded, context: Context | None = None) -> dict[str, Check]:
    """All checks by name, each name once."""
    checks = run_checks(machine, context or Context())
    by_name = {check.name: check for check in checks}
    assert len(by_name) == len(checks), [check.name for check in checks]
    return by_name
