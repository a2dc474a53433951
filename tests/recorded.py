"""A machine that answers what was recorded of programs and files: a healthy node of eight H100."""

import fnmatch
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dynamiccl.collect.checks import CLOCKS, GPU_FACTS, PROCESSES, smi
from dynamiccl.collect.on_node import FACTS_ARGV
from dynamiccl.doctor import ASK_PLUGIN, ASK_VERSION, Check, Machine, ProgramResult
from dynamiccl.nccl import TUNER_ABI_SINCE

GIB = 1 << 30
ABSENT = ProgramResult(None, "no such file or directory")
BINARY = "/opt/nccl-tests/all_reduce_perf"
LIBRARY = "/opt/nccl/lib/libnccl.so.2"
PLUGIN = "out/plugin/libnccl-tuner-dynamiccl-sweep.so"
TUNERS = [f"ncclTunerPlugin_v{k}" for k in TUNER_ABI_SINCE]
IB = "/sys/class/infiniband"

#: `all_reduce_perf -h` of nccl-tests 2.19.6, shortened.
HELP = """\
USAGE: all_reduce_perf
\t[-b,--minbytes <min size in bytes>]
\t[-N,--run_cycles <cycle count> run & print each cycle. default: 1; 0=infinite]
\t[-J,--output_file <file> write output to filepath, if accessible.]
\t[-h,--help]
"""
LDD = f"""\
\tlinux-vdso.so.1 (0x00007ffd8a5f2000)
\tlibnccl.so.2 => {LIBRARY} (0x00007f8a2c000000)
\tlibmpi.so.40 => /usr/lib/x86_64-linux-gnu/libmpi.so.40 (0x00007f8a2bc00000)
"""
LDCONFIG = """\
2 libs found in cache `/etc/ld.so.cache'
\tlibnccl.so.2 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libnccl.so.2
\tlibc.so.6 (libc6,x86-64, OS ABI: Linux 3.2.0) => /lib/x86_64-linux-gnu/libc.so.6
"""
GPU = "NVIDIA H100 80GB HBM3, 580.65.06, Disabled, 0\n"
LIMITS = "Max locked memory         unlimited            unlimited            bytes\n"
CLOCK = "1980, 1980, 0x0000000000000001\n"
RUNS: Mapping[tuple[str, ...], str] = {
    (BINARY, "-h"): HELP,
    ("ldd", BINARY): LDD,
    (sys.executable, "-c", ASK_VERSION, LIBRARY): "22907\n",
    (sys.executable, "-c", ASK_PLUGIN, PLUGIN, *TUNERS): " ".join(TUNERS),
    FACTS_ARGV: '{"host": "n1", "nvml_error": null}\n',
    ("/sbin/ldconfig", "-p"): LDCONFIG,
    smi("gpu", GPU_FACTS): 8 * GPU,
    smi("gpu", CLOCKS): 8 * CLOCK,
    smi("compute-apps", PROCESSES): "",
}
FILES: Mapping[str, str] = {
    **{f"{IB}/mlx5_{k}/ports/1": "" for k in (0, 1)},
    **{f"{IB}/mlx5_{k}/ports/1/state": "4: ACTIVE\n" for k in (0, 1)},
    **{f"{IB}/mlx5_{k}/ports/1/rate": "400 Gb/sec (4X NDR)\n" for k in (0, 1)},
    "/proc/modules": "nvidia_peermem 16384 0 - Live 0x0\nmlx5_core 2420736 1 mlx5_ib, Live 0x0\n",
    "/proc/self/limits": LIMITS,
}
PROGRAMS = {"all_reduce_perf": BINARY, "apptainer": "/usr/bin/apptainer"}


@dataclass(frozen=True)
class Recorded(Machine):
    """Answers in place of this machine's; HEALTHY but for changes."""

    env: Mapping[str, str] = field(default_factory=dict)
    runs: Mapping[tuple[str, ...], ProgramResult] = field(
        default_factory=lambda: {argv: ProgramResult(0, text) for argv, text in RUNS.items()}
    )
    files: Mapping[str, str] = field(default_factory=lambda: FILES)
    programs: Mapping[str, str] = field(default_factory=lambda: PROGRAMS)
    free: Mapping[str, int | None] = field(default_factory=lambda: {"/dev/shm": 100 * GIB})

    def run(self, *argv: str, limit_s: float = 30.0) -> ProgramResult:  # noqa: ARG002 - no time passes
        return self.runs.get(argv, ABSENT)

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def paths(self, pattern: str) -> list[str]:
        slashes = pattern.count("/")  # which no `*` of a shell matches
        fitting = (path for path in self.files if path.count("/") == slashes)
        return sorted(path for path in fitting if fnmatch.fnmatch(path, pattern))

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
        programs = {name: path for name, path in self.programs.items() if part not in name}
        files = {path: text for path, text in self.files.items() if part not in path}
        return replace(self, programs=programs, files=files)

    def with_env(self, **env: str) -> "Recorded":
        """The same machine in another environment."""
        return replace(self, env={**self.env, **env})


HEALTHY = Recorded()


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    """The checks by name; each name once."""
    found = [*checks]
    named = {check.name: check for check in found}
    assert len(named) == len(found), [check.name for check in found]
    return named
