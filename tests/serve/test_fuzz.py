"""The plugin's readers of files, fuzzed for a while from a few seeds.

`make soak ONLY=fuzz SECONDS=3600` fuzzes each for an hour; 0 seconds play the seeds alone.
"""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from dynamiccl.serve.build import build_plugin
from dynamiccl.serve.table import DecisionTable
from tests.conftest import Soak
from tests.once import locked
from tests.plugin_build import BUILDS
from tests.serve.tables import random_schedule

_HOW = "apt-get install clang-14 libclang-rt-14-dev"
# libFuzzer holds the process's peak memory (getrusage) against its limit. Linux hands the peak of
# the one that calls exec on to what it starts, and Python starts others from a vfork, so that peak
# would be pytest's own. A process that a shell forks begins anew.
_WITH_ITS_OWN_PEAK = ("sh", "-c", '"$0" "$@"; exit $?')


def seeds_of_tables() -> list[bytes]:
    ring = Config(Algorithm.Ring, Protocol.LL128, 8)
    last = Config(Algorithm.PAT, Protocol.Simple, 64, 512)

    def table(config: Config | None, row: int, first: int, bins: int) -> bytes:
        rows = [[config if each == row else None] * bins for each in range(5)]
        made = DecisionTable.from_configs(rows, num_nodes=1, num_ranks=8, first_bin=first)
        return made.to_bytes()

    return [
        table(ring, Collective.AllReduce, 80, 1),
        table(Config(Algorithm.Tree), Collective.AllReduce, 40, 60),
        table(last, Collective.AllGather, 248, 1),
        table(None, 0, 0, 3),
    ]


def seeds_of_schedules() -> list[bytes]:
    random = np.random.default_rng(0)
    made = [
        random_schedule(random, Collective.AllReduce, chunks=True),
        random_schedule(random, Collective.AllGather),
    ]
    made.append(dataclasses.replace(made[1], warmup=(), halves=1, sizes=(1 << 61,) * 5))
    return [schedule.to_bytes() for schedule in made]


SEEDS = {"table": seeds_of_tables, "schedule": seeds_of_schedules}


def find_clang(scratch: Path) -> tuple[str, str]:
    """A clang for C and the one for C++; skips the test where there is none, or no libFuzzer."""
    versions = ("", *(f"-{version}" for version in range(21, 11, -1)))
    found = next(
        (v for v in versions if all(shutil.which(name + v) for name in ("clang", "clang++"))), None
    )
    if found is None:
        pytest.skip(f"no clang: {_HOW}")
    source = scratch / "probe.cpp"
    source.write_text('extern "C" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }\n')
    tried = subprocess.run(
        [f"clang++{found}", "-fsanitize=fuzzer,address", str(source), "-o", str(scratch / "probe")],
        capture_output=True,
        check=False,
    )
    if tried.returncode != 0:
        pytest.skip(f"clang++{found} has no libFuzzer: {_HOW}")
    return f"clang{found}", f"clang++{found}"


@pytest.fixture(scope="session")
def fuzz_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build directory with the fuzz targets."""
    c, cpp = find_clang(tmp_path_factory.mktemp("clang"))
    build = BUILDS / "fuzz"
    with locked(BUILDS / "fuzz.lock"), pytest.MonkeyPatch.context() as patch:
        # Not as -DCMAKE_CXX_COMPILER: given once more, it has CMake forget every other setting.
        patch.setenv("CC", c)
        patch.setenv("CXX", cpp)
        build_plugin(build, "-DDYNAMICCL_FUZZ=ON")
    return build


@pytest.mark.soak
@pytest.mark.parametrize("target", SEEDS)
def test_no_input_crashes(target: str, fuzz_dir: Path, tmp_path: Path, soak: Soak) -> None:
    corpus = tmp_path / "corpus"  # the fuzzer adds to it
    corpus.mkdir()
    for number, seed in enumerate(SEEDS[target]()):
        (corpus / str(number)).write_bytes(seed)
    done = subprocess.run(
        [
            *_WITH_ITS_OWN_PEAK,
            str(fuzz_dir / f"fuzz_{target}"),
            f"-max_total_time={soak.seconds:.0f}" if soak.seconds > 0 else "-runs=0",
            f"-seed={soak.seed + 1}",  # 0 would be drawn from the clock
            "-timeout=10",
            "-rss_limit_mb=1024",
            f"-artifact_prefix={tmp_path}/",
            str(corpus),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stdout.write(done.stderr[-2000:])
    assert done.returncode == 0, done.stderr[-8000:]
