"""Cost of the plugin to a job: latency, memory, wake-ups, time of a vote, lines.

    python benchmarks/bench_plugin.py

`getcollinfo_*`: one getCollInfo, which every collective pays on the host. A table of all size bins,
a quarter of them NCCL's own, is asked random questions by a C++ program; p50 and p99 are over
20,000 batches of 64, since one call is as short as reading the clock. The baseline is a function
that abstains for good. `rss_table_mib`: by how much loading it and agreeing on one communicator
makes the private pages of a process grow. `job_threads`, `wakeups_per_s`: other threads of that
process, and how often they wake up in three steady seconds. `word_8_ranks_ms`: from the last rank's
entry into `init` to the last one's return, the median of 200 communicators; `word_2000_ranks_ms`, a
stress test: ranks are threads of four processes. `tcp_*`: the same by an arbiter over the loopback,
at 10,000 ranks once, with the memory of the arbiter's larger process. `tuner_lines`: of every
source and header that its dependency files name, but generated ones; `adaptive_lines`: of what mode
adaptive has beyond those and the recorder's. `record_*`: one recorded call.
"""

import json
import os
import re
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness import write_result

from dynamiccl.libraries import ADAPTIVE_NAME, PROFILER_NAME, TUNER_NAME
from dynamiccl.serve.artifact import PluginIndex
from dynamiccl.serve.build import SOURCE_DIR, build_plugin, find_tool
from dynamiccl.serve.table import MAX_BINS
from tests.serve.abi import prepared_environment, write_bare_artifact
from tests.serve.brains import HintPolicy, make_artifact
from tests.serve.jobs.arbiter import Arbiter
from tests.serve.jobs.play import clean_environment, play
from tests.serve.jobs.setting import KEY, fingerprint, make_setting
from tests.serve.tables import random_table

NUM_RANKS: Final = 16
KIB_PER_MIB: Final = 1024
#: Longer than any vote here.
ARBITER_MS: Final = 30_000
SYSTEM = "bench"
#: Written by tests.vocabulary.
GENERATED: Final = "vocabulary.h"
#: By what ranks agree, how many, in how many processes, and how often.
VOTES: Final = (
    ("word", 8, 8, 200),
    ("word", 2000, 4, 3),
    ("tcp", 16, 16, 50),
    ("tcp", 1000, 4, 3),
    ("tcp", 10_000, 8, 1),
)


def figures_of(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """The JSON output of a benchmark program."""
    settings = clean_environment() | environment
    done = subprocess.run(command, env=settings, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def measure_calls(build_dir: Path) -> dict[str, float]:
    """One call of getCollInfo, and what the tuner makes a process pay."""
    command = [str(build_dir / "bench"), str(build_dir / TUNER_NAME), str(NUM_RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        return figures_of(command, environment_of(Path(folder) / "artifact", NUM_RANKS))


def measure_votes(build_dir: Path) -> dict[str, float]:
    """How long ranks take to agree on a table, and the memory of the last arbiter's processes."""
    figures: dict[str, float] = {}
    for way, ranks, processes, rounds in VOTES:
        command = [str(build_dir / "init_ranks"), str(build_dir / TUNER_NAME)]
        command += ["--ranks", str(ranks), "--processes", str(processes), "--rounds", str(rounds)]
        with tempfile.TemporaryDirectory() as folder:
            environment = environment_of(Path(folder) / "artifact", ranks)
            with arbiter_of(build_dir, environment) as arbiter:
                made = figures_of(command, environment | (by(arbiter) if way == "tcp" else {}))
                peaks_kib = [peak_kib(pid) for pid in arbiter.processes()]
        if made["tables"] != ranks * rounds:
            raise RuntimeError(f"{made['tables']} of {ranks * rounds} ranks got the table")
        figures[f"{way}_{ranks}_ranks_ms"] = statistics.median(made["ms"])
    return figures | {"tcp_10000_arbiter_mib": max(peaks_kib) / KIB_PER_MIB}


def environment_of(artifact: Path, num_ranks: int) -> dict[str, str]:
    """Environment of a rank with a one-table artifact, on a machine with NCCL 2.30.7."""
    bins: dict[str, int] = {"first_bin": 0, "num_bins": MAX_BINS}
    table = random_table(np.random.default_rng(1), num_ranks=num_ranks, **bins)
    write_bare_artifact(artifact, SYSTEM, table)
    job = {"DYNAMICCL_JOB": secrets.token_hex(8)}
    return job | prepared_environment(artifact, SYSTEM, 23007)


def arbiter_of(build_dir: Path, environment: Mapping[str, str]) -> Arbiter:
    """The arbiter of a job."""
    program = [str(build_dir / "dynamiccl-arbiter")]
    return Arbiter(program, environment["DYNAMICCL_JOB"], ARBITER_MS, environment)


def by(arbiter: Arbiter) -> dict[str, str]:
    """What ranks need to agree by it."""
    return {"DYNAMICCL_ARBITER": arbiter.address, "DYNAMICCL_KEY": KEY, "DYNAMICCL_WORD": "0"}


def peak_kib(pid: int) -> int:
    """The most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0])


def source_lines(build_dir: Path) -> dict[str, int]:
    """Source lines of the tuner, and what mode adaptive adds, by Ninja's dependency files."""
    found = subprocess.run(
        [find_tool("ninja"), "-C", str(build_dir), "-t", "deps"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    files: dict[str, set[Path]] = {}
    for block in found.split("\n\n"):
        target, *needed = block.split("\n")
        if part := re.match(r"CMakeFiles/([^/]*)\.dir/", target):
            paths = {(build_dir / name.strip()).resolve() for name in needed}
            ours = {path for path in paths if path.is_relative_to(SOURCE_DIR)}
            files[part[1]] = files.get(part[1], set()) | ours
    tuner = files["nccl-tuner-dynamiccl"]
    added = files["nccl-tuner-dynamiccl-adaptive"] - tuner - files["recorder_parts"]
    figures: dict[str, int] = {}
    for name, own in (("tuner", tuner), ("adaptive", added)):
        texts = [f.read_text(encoding="utf-8") for f in own if f.name != GENERATED]
        figures[f"{name}_lines"] = sum(len(text.splitlines()) for text in texts)
    return figures


def build_for_tests() -> Path:
    """The directory of all libraries and programs."""
    options, targets = "-DDYNAMICCL_TESTS=ON", ("all", "bench")
    return build_plugin(Path("out/bench-plugin"), options, targets=targets).parent.resolve()


#: What the artifact of the tests calls the harness's machine.
KNOWN: Final = {"DYNAMICCL_SYSTEMS": "22809=box"}
#: By mode: settings beside the defaults. In `search` all calls are timed, and the brain decides
#: each second, ten times as often as by default.
MODES: Final[dict[str, dict[str, str]]] = {
    "table": {},
    "adaptive": {"DYNAMICCL_BRAIN": "exit 0"},
    "search": {
        "DYNAMICCL_BRAIN": "dynamiccl-deploy brain --policy search",
        "DYNAMICCL_ADAPT_INTERVAL_S": "1",
        "DYNAMICCL_STOP_PERCENT": "100",
        "DYNAMICCL_SAMPLE_PERCENT": "100",
    },
}
LEADER_JOB: Final[dict[str, Any]] = {"ranks": 8, "rate": 700, "calls": 42_000, "deadline": 300}


def measure_leader() -> dict[str, float | None]:
    """A minute's job of eight ranks: its table alone, in mode adaptive, and with a search as brain.

    CPU time of the ranks by call, and share of one core for arbiter, leader and brain.
    """
    build_dir, figures = build_for_tests(), dict[str, float | None]()
    for mode, settings in MODES.items():
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            setting = make_setting(folder := Path(name), num_ranks=8)
            (folder / "made").mkdir()
            artifact = make_artifact(folder / "made", HintPolicy()).directory
            PluginIndex.read(artifact).bound("box", fingerprint(22809)).write(artifact)
            setting = replace(setting, artifact=artifact)
            ranks, arbiter = setting.environment() | KNOWN | settings, None
            if settings:
                arbiter = stack.enter_context(arbiter_of(build_dir, ranks))
                ranks |= setting.by_arbiter(arbiter.address) | KNOWN
            library = build_dir / (ADAPTIVE_NAME if arbiter else TUNER_NAME)
            before, began = os.times(), time.monotonic()
            job = play(build_dir / "play_rank", library, environment=ranks, **LEADER_JOB)
            wall_s = time.monotonic() - began
            own_s = sum(os.times()[2:4]) - sum(before[2:4])
            if not job.is_sound:
                raise RuntimeError(f"the job did not play well: {job}")
            figures[f"leader_{mode}_ranks_us_a_call"] = 1e6 * own_s / job.calls
            if arbiter:
                figures[f"leader_{mode}_core"] = sum(map(cpu_s, arbiter.processes())) / wall_s
    return figures


def cpu_s(pid: int) -> float:
    """CPU time of a process and its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Build, measure, write."""
    build_dir = build_for_tests()
    figures: dict[str, float] = {
        **measure_calls(build_dir),
        **measure_votes(build_dir),
        **source_lines(build_dir),
        **figures_of([str(build_dir / "bench"), str(build_dir / PROFILER_NAME)], {}),
    }
    write_result("plugin", figures)


if __name__ == "__main__":
    main()
