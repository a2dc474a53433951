"""Cost of the plugin to a job: latency, memory, wake-ups, agreement time.

    python benchmarks/bench_plugin.py

The tuner of a job:

`getcollinfo_*`: one getCollInfo, the time that every collective pays on the host. A full table
(every size bin, five collectives, all kinds of decisions) is asked random questions by a C++
program, in batches of 64; p50 and p99 are over 20,000 batches of the mean time of a call, since one
call is as short as reading the clock. The baseline is the same function pointer with a communicator
that abstains for good.
`rss_table_mib`: by how much loading it and agreeing on one communicator makes the private pages of
a process grow (/proc/self/smaps_rollup). `job_threads`, `wakeups_per_s`: other threads of that
process, and how often they wake up in three steady seconds. `word_8_ranks_ms`: from the last rank's
entry into `init` to the last one's return, the library loaded, 8 processes, the median of 200
communicators; `word_2000_ranks_ms`, a stress test: 2,000 ranks as threads of four processes, the
median of 3. `tcp_16_ranks_ms` (median of 50), `tcp_1000_ranks_ms` (threads of four processes): the
same by an arbiter over the loopback. `tuner_lines`: of every source and header that its dependency
files name, but generated ones; `tuner_code_lines`: without comments and empty lines.

The library of mode adaptive:

`adaptive_getcollinfo_*`; `init_table_us`: tuner's and profiler's init of a communicator, the median
over 63 in each of two processes, after the first one of each process (`init_first_us`, the slower
rank's).

`agreement_16_ranks_ms`: 16 processes on this machine, which find each other through local sockets,
from the last rank's call of init until every rank has had its first decided answer. Each makes
AGREEMENT_CALLS_PER_S calls a second meanwhile and is held to the others by nothing but that pace.
It includes reading the artifact, and the at least 32 calls that lie between the proposal and the
switch (agreement/rules.h): 16 ms at that pace. The median of 11 jobs, with the least and the most.

`rss_adaptive_mib`: its private pages with one communicator and no brain, the larger of two ranks;
`rss_adaptive_64_mib` with 64, `rss_adaptive_worker_mib` for a rank with a brain that does not lead.
`record_*`: bench_record.cpp. Writes out/bench/plugin.json.
"""

import json
import os
import re
import secrets
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness import write_result

from dynamiccl.doctor import Machine
from dynamiccl.libraries import ADAPTIVE_NAME, TUNER_NAME
from dynamiccl.nccl import VALID_PROTOCOLS, Algorithm, Collective, Config, Protocol
from dynamiccl.serve.build import SOURCE_DIR, build_plugin, find_tool
from dynamiccl.serve.loopback import prepared_environment, write_bare_artifact
from dynamiccl.serve.plugin_index import PluginIndex
from dynamiccl.serve.table import MAX_BINS, DecisionTable
from dynamiccl.serve.this_machine import ask_probe

NUM_RANKS: Final = 16
SYSTEM = "bench"
#: Written by tests.vocabulary.
GENERATED: Final = "vocabulary.h"
AGREEMENT_RANKS: Final = 16
AGREEMENT_JOBS: Final = 11
AGREEMENT_CALLS_PER_S: Final = 2000
#: Where memory and init are measured nothing is in a hurry.
QUIET_CALLS_PER_S: Final = 200
MANY_COMMUNICATORS: Final = 64
KIB_PER_MIB: Final = 1024
#: Targets of CMakeLists.txt that the tuner of a job is linked of (`add_parts(thin ...)`).
TUNER_PARTS: Final = ("table", "communicator", "thin_parts", "nccl-tuner-dynamiccl")


def full_table(num_nodes: int) -> DecisionTable:
    """Every bin acts, with a random Config of those that NCCL has for the collective."""
    random = np.random.default_rng(1)
    rows = []
    for collective in (c for c in Collective if c.tunable):
        choices: list[Config | None] = [Config(num_channels=8)]
        for algorithm, protocols in VALID_PROTOCOLS[collective].items():
            choices += [Config(algorithm, protocol, 8) for protocol in sorted(protocols)]
            choices.append(Config(algorithm))
        rows.append([choices[i] for i in random.integers(len(choices), size=MAX_BINS)])
    return DecisionTable.from_configs(rows, num_nodes=num_nodes, num_ranks=NUM_RANKS)


def figures_of(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """The JSON output of a benchmark program."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DYNAMICCL_")}
    done = subprocess.run(
        command, env=clean | environment, stdout=subprocess.PIPE, text=True, check=True
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def measure_tuner(build_dir: Path) -> dict[str, float]:
    """Figures of the tuner of a job."""
    ring = Config(Algorithm.Ring, Protocol.Simple, 8)
    uniform = [[ring] * MAX_BINS] * 5
    with tempfile.TemporaryDirectory() as folder:
        full = tuner_environment(Path(folder) / "full", full_table(1))
        figures = figures_of(
            [str(build_dir / "bench_tuner"), str(build_dir / TUNER_NAME), str(NUM_RANKS)], full
        )
        for way, ranks, processes, rounds in (
            ("word", 8, 8, 200),
            ("word", 2000, 4, 3),
            ("tcp", 16, 16, 50),
            ("tcp", 1000, 4, 3),
        ):
            table = DecisionTable.from_configs(uniform, num_nodes=1, num_ranks=ranks)
            environment = tuner_environment(Path(folder) / f"{way}-{ranks}", table)
            if way == "tcp":
                environment |= start_arbiter(build_dir, environment["DYNAMICCL_JOB"])
            command = [str(build_dir / "init_ranks"), str(build_dir / TUNER_NAME)]
            command += ["--ranks", str(ranks), "--processes", str(processes)]
            made = figures_of([*command, "--rounds", str(rounds)], environment)
            if made["tables"] != ranks * rounds:
                raise RuntimeError(f"{made['tables']} of {ranks * rounds} ranks got the table")
            figures[f"{way}_{ranks}_ranks_ms"] = statistics.median(made["ms"])
    return figures | tuner_lines(build_dir)


def tuner_environment(artifact: Path, table: DecisionTable) -> dict[str, str]:
    """Environment of a rank with a one-table artifact, on a machine with NCCL 2.30.7."""
    write_bare_artifact(artifact, SYSTEM, table)
    job = {"DYNAMICCL_JOB": secrets.token_hex(8)}
    return job | prepared_environment(artifact, SYSTEM, 23007)


def start_arbiter(build_dir: Path, job: str) -> dict[str, str]:
    """Start the arbiter of a job, which ends with this process; returns its variables."""
    key = {"DYNAMICCL_KEY": secrets.token_hex(16)}
    started = subprocess.run(
        [str(build_dir / "dynamiccl-arbiter"), "0", str(os.getpid())],
        env=os.environ | key | {"DYNAMICCL_JOB": job},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    address = f"127.0.0.1:{int(started.stdout)}"
    return key | {"DYNAMICCL_ARBITER": address, "DYNAMICCL_WORD": "0"}


def tuner_lines(build_dir: Path) -> dict[str, int]:
    """Source lines of the tuner, by Ninja's dependency files."""
    found = subprocess.run(
        [find_tool("ninja"), "-C", str(build_dir), "-t", "deps"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    files: set[Path] = set()
    for block in found.split("\n\n"):
        target, *needed = block.split("\n")
        if re.match(rf"CMakeFiles/({'|'.join(TUNER_PARTS)})\.dir/", target):
            files |= {(build_dir / name.strip()).resolve() for name in needed}
    ours = {f for f in files if f.is_relative_to(SOURCE_DIR) and f.name != GENERATED}
    lines = [line.strip() for f in ours for line in f.read_text(encoding="utf-8").splitlines()]
    code = [line for line in lines if line and not line.startswith("//")]
    return {"tuner_lines": len(lines), "tuner_code_lines": len(code)}


def adaptive_environment(build_dir: Path, folder: Path, table: DecisionTable) -> dict[str, str]:
    """Environment of ranks on this node in mode adaptive, one table, no brain."""
    artifact, run_dir = folder / "artifact", folder / "run"
    run_dir.mkdir(mode=0o700)
    write_bare_artifact(artifact, SYSTEM, table)
    facts = ask_probe(Machine(), build_dir / ADAPTIVE_NAME)
    here = str(facts["fingerprint"]).partition(";nccl=")[0]
    PluginIndex.read(artifact).bound(SYSTEM, f"{here};nccl=23007").write(artifact)
    return {
        "DYNAMICCL_ARTIFACT": str(artifact),
        "DYNAMICCL_COORDINATOR": "none",
        "DYNAMICCL_RUN_DIR": str(run_dir),
        "DYNAMICCL_JOB_ID": folder.name,
    }


def measure_calls(build_dir: Path) -> dict[str, float]:
    """One call of getCollInfo of the library of mode adaptive."""
    with tempfile.TemporaryDirectory() as folder:
        environment = adaptive_environment(build_dir, Path(folder), one_ring(2))
        environment["DYNAMICCL_PROBE_CALLS"] = "0"
        program = str(build_dir / "bench_plugin")
        return figures_of([program, str(build_dir / ADAPTIVE_NAME)], environment)


def one_ring(num_ranks: int) -> DecisionTable:
    """A table with the same config everywhere."""
    ring = Config(Algorithm.Ring, Protocol.Simple, 8)
    return DecisionTable.from_configs([[ring] * MAX_BINS] * 5, num_nodes=1, num_ranks=num_ranks)


def agree(build_dir: Path, ranks: int, communicators: int, calls_per_s: int) -> dict[str, Any]:
    """Run one job of `bench_agreement` with such a table."""
    with tempfile.TemporaryDirectory() as folder:
        environment = adaptive_environment(build_dir, Path(folder), one_ring(ranks))
        program = str(build_dir / "bench_agreement")
        numbers = [str(number) for number in (ranks, communicators, calls_per_s)]
        return figures_of([program, str(build_dir / ADAPTIVE_NAME), *numbers], environment)


def measure_agreement(build_dir: Path) -> dict[str, float]:
    """Time of the first agreement of the ranks."""
    jobs = [
        agree(build_dir, AGREEMENT_RANKS, 1, AGREEMENT_CALLS_PER_S) for _ in range(AGREEMENT_JOBS)
    ]
    took_ms = sorted(job["agreed_ms"] for job in jobs)
    return {
        "agreement_16_ranks_ms": statistics.median(took_ms),
        "agreement_16_ranks_min_ms": took_ms[0],
        "agreement_16_ranks_max_ms": took_ms[-1],
        "agreement_16_ranks_at_call": statistics.median(job["agreed_at_call"] for job in jobs),
    }


def measure_creation(build_dir: Path) -> dict[str, float]:
    """Time and memory of communicators in mode adaptive."""
    one = agree(build_dir, 2, 1, QUIET_CALLS_PER_S)
    many = agree(build_dir, 2, MANY_COMMUNICATORS, QUIET_CALLS_PER_S)
    return {
        "init_table_us": statistics.median(many["init_us"]),
        "init_table_max_us": max(many["init_us"]),
        "init_first_us": max(one["init_first_us"]),
        "rss_adaptive_mib": one["private_kib"] / KIB_PER_MIB,
        "rss_adaptive_64_mib": many["private_kib"] / KIB_PER_MIB,
        "rss_adaptive_worker_mib": one["worker_private_kib"] / KIB_PER_MIB,
    }


def main() -> None:
    """Build, measure, write."""
    build_dir = build_plugin(
        Path("out/bench-plugin"), tests=True, targets=("all", "benchmarks")
    ).parent.resolve()
    figures: dict[str, float | int | str | None] = {
        **measure_tuner(build_dir),
        **measure_calls(build_dir),
        **measure_creation(build_dir),
        **measure_agreement(build_dir),
        **figures_of([str(build_dir / "bench_record")], {}),
    }
    write_result("plugin", figures)


if __name__ == "__main__":
    main()
