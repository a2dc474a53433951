"""The built plugin, called from Python and by its own C++ tests; no NCCL and no GPU."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from dynamiccl import libraries
from dynamiccl.doctor import Machine
from dynamiccl.errors import MissingPath, PluginError
from dynamiccl.libraries import (
    ADAPTIVE_NAME,
    NAMES,
    PROFILER_NAME,
    SWEEP_NAME,
    TUNER_NAME,
    VENDOR_NAME,
)
from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from dynamiccl.serve import build
from dynamiccl.serve.build import build_plugin, find_tool, nccl_libraries
from dynamiccl.serve.table import DecisionTable
from dynamiccl.sizes import BINS_PER_OCTAVE, EDGES_Q32, bin_center_bytes, size_bin
from tests import vocabulary
from tests.conftest import Soak
from tests.once import locked
from tests.plugin_build import BUILDS, SANITIZERS
from tests.serve.abi import TunerPlugin, loopback_environment, write_bare_artifact
from tests.serve.tables import (
    TUNED,
    asked_in_a_job,
    expected_answer,
    nccl_choice,
    random_costs,
    random_schedule,
    random_table,
    uniform,
)

SYSTEM = "test-system"
VERSIONS = (4, 5, 6)
RING = Config(Algorithm.Ring, Protocol.LL128, 8)


def deploy(artifact: Path, table: DecisionTable) -> dict[str, str | None]:
    """Make an artifact of `table`; return the environment of ranks that use it."""
    write_bare_artifact(artifact, SYSTEM, table)
    return loopback_environment(artifact, SYSTEM)


def run_ctest(build: Path, **settings: str) -> None:
    done = subprocess.run(
        [find_tool("ctest"), "--output-on-failure", "--no-tests=error", "--parallel", "2"],
        cwd=build,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_cpp_tests_pass(build_dir: Callable[[str], Path]) -> None:
    run_ctest(build_dir(""), DYNAMICCL_FEW="1")


@pytest.mark.soak
@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_cpp_tests_pass_whole(sanitize: str, build_dir: Callable[[str], Path], soak: Soak) -> None:
    """A million schedules, hundreds of processes, and all of it under the sanitizers."""
    run_ctest(build_dir(sanitize), DYNAMICCL_SEED=str(soak.seed))


@pytest.fixture(params=NAMES)
def library(request: pytest.FixtureRequest, plugin_path: Path) -> Path:
    return plugin_path.with_name(request.param)


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def exported(library: Path) -> set[str]:
    listed = output_of("nm", "-D", "--defined-only", library)
    return {line.split()[-1] for line in listed.splitlines()}


def test_a_library_exports_what_nccl_looks_for_and_needs_little(library: Path) -> None:
    tuners = {f"ncclTunerPlugin_v{version}" for version in VERSIONS}
    profilers = {TUNER_NAME: (4,), VENDOR_NAME: (4,), SWEEP_NAME: ()}.get(library.name, (4, 5, 6))
    if library.name == PROFILER_NAME:
        tuners = set()
    assert exported(library) == tuners | {f"ncclProfiler_v{version}" for version in profilers}
    listed = output_of("readelf", "--dynamic", "--wide", library)
    needed = [line.split("[")[1].rstrip("]") for line in listed.splitlines() if "(NEEDED)" in line]
    loaders = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    assert set(needed) <= {"libc.so.6", "libpthread.so.0", "libdl.so.2", *loaders}
    assert "NODELETE" in listed
    assert "NOW" in listed
    listed = output_of("readelf", "--version-info", "--wide", library)
    found = re.findall(r"Name: GLIBC_(\d+)\.(\d+)", listed)
    assert max((int(major), int(minor)) for major, minor in found) <= (2, 28)
    content = library.read_bytes()
    assert str(Path.cwd()).encode() not in content
    assert b"/serve/plugin" not in content


@pytest.mark.parametrize("name", [TUNER_NAME, VENDOR_NAME])
def test_a_jobs_tuner_makes_no_thread_nor_handler(name: str, plugin_path: Path) -> None:
    """Nor listen, nor send a signal: what it leaves in a job would be made by one of these.

    Nor write: descriptor 2 of a process that has closed it is a file of the user's.
    """
    listed = output_of("nm", "-D", "--undefined-only", plugin_path.with_name(name))
    called = {line.split()[-1].partition("@")[0] for line in listed.splitlines()}
    assert {"open", "socket", "mmap"} <= called
    threads = {"pthread_create", "clone", "fork", "vfork", "posix_spawn", "system", "popen"}
    handlers = {"atexit", "on_exit", "__cxa_atexit", "pthread_atfork", "__register_atfork"}
    signals = {"signal", "sigaction", "sigprocmask", "pthread_sigmask", "kill", "raise", "alarm"}
    output = {"write", "writev", "dprintf", "fprintf", "vfprintf", "printf", "fputs", "perror"}
    others = {"listen", "bind", "accept", "getaddrinfo", "setenv"}
    descriptors = {"accept4", "eventfd", "pipe", "pipe2", "memfd_create"}
    assert not called & (threads | handlers | signals | output | others | descriptors)


@pytest.mark.parametrize("name", [TUNER_NAME, ADAPTIVE_NAME])
def test_a_jobs_tuner_is_asked_for_no_chunk_sizes(name: str, plugin_path: Path) -> None:
    """A rank that simulates a group would have NCCL's, and the others ours."""
    assert not TunerPlugin(plugin_path.with_name(name))._structs[6].get_chunk_size


def test_size_bins_agree_with_python_bit_for_bit(plugin: TunerPlugin, tmp_path: Path) -> None:
    edges = [
        (edge << octave >> 32) + step
        for octave in range(63)
        for edge in (1 << 32, *EDGES_Q32)
        for step in (-2, -1, 0, 1, 2)
    ]
    centers = [bin_center_bytes(index) for index in range(62 * BINS_PER_OCTAVE)]
    random = np.random.default_rng(7)
    drawn = [int(2**power) for power in random.uniform(0, 63.9, size=20_000)]
    extremes = [0, 1, 2, 3, 2**62 - 1, 2**62, 2**63, 2**64 - 1]
    sizes = [size for size in (*range(5000), *edges, *centers, *drawn, *extremes) if size >= 0]
    kinds = [*((Algorithm.Ring, protocol) for protocol in Protocol), (Algorithm.Tree, Protocol.LL)]
    of_bin = [Config(*kinds[index // 64], 1 + index % 64) for index in range(249)]
    rows = [of_bin if row == Collective.AllReduce else [None] * 249 for row in range(5)]
    table = DecisionTable.from_configs(rows, num_nodes=1, num_ranks=8)
    costs = np.full((7, 3), 10, dtype=np.float32)
    with plugin.communicator(
        8, 1, environment=deploy(tmp_path, table), all_ranks=True
    ) as communicator:
        for size in sizes:
            answer = communicator.ask(Collective.AllReduce, size, costs)
            index = of_bin.index(answer.config) if answer.acted else -1
            assert index == size_bin(size), size


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_answers_by_law(version: int, num_nodes: int, plugin: TunerPlugin, tmp_path: Path) -> None:
    random = np.random.default_rng(100 * version + num_nodes)
    table = random_table(
        random, num_nodes=num_nodes, num_ranks=8 * num_nodes, first_bin=20, num_bins=120
    )
    environment = deploy(tmp_path, table)
    acted = 0
    with plugin.communicator(
        table.num_ranks, num_nodes, version=version, environment=environment, all_ranks=True
    ) as communicator:
        for _ in range(1500):
            collective = TUNED[random.integers(5)]
            size_bytes = int(2 ** random.uniform(3, 38))
            costs = random_costs(random)
            answer = communicator.ask(collective, size_bytes, costs)
            config = asked_in_a_job(table.at(collective, size_bin(size_bytes)))
            expected = expected_answer(config, costs, num_nodes=num_nodes)
            np.testing.assert_array_equal(answer.cost_table_after, expected.cost_table_after)
            assert answer.num_channels == expected.num_channels
            assert answer.config == expected.config
            acted += answer.acted
    assert acted > 250


def test_abstains_and_says_why(plugin: TunerPlugin, tmp_path: Path) -> None:
    costs = np.full((7, 3), 10, dtype=np.float32)
    for job, shape, domains, reason in (
        ({"DYNAMICCL_JOB": None}, (8, 1), None, "start the job with dynamiccl-run"),
        ({}, (15, 2), None, "its nodes hold different numbers of ranks"),
        ({}, (8, 1), (3, 5), "its NVLink domains hold different numbers of ranks"),
        ({}, (8, 1), (4, 4), "the artifact's table, from call 0: it acts in 1245 of 1245"),
    ):
        told: dict[str, Any] = {"version": 6, "ranks_per_domain": domains, "all_ranks": True}
        told["environment"] = deploy(tmp_path, uniform(RING)) | job
        with plugin.communicator(*shape, **told) as communicator:
            answer = communicator.ask(Collective.AllReduce, 1 << 20, costs)
        acts = domains == (4, 4)
        assert answer.config == (RING if acts else Config(*nccl_choice(costs) or ()))
        (line,) = communicator.lines
        assert line.startswith("DYNAMICCL: ")
        assert ("NCCL's own choice stands: " in line) != acts
        assert reason in line


LIBRARIES: list[str | None] = [*nccl_libraries(Machine())] or [None]


@pytest.fixture(params=LIBRARIES)
def asked(request: pytest.FixtureRequest) -> str:
    """The names of plugins' symbols that it holds."""
    if request.param is None:
        pytest.skip("no NCCL: pip install nvidia-nccl-cu12")
    names = re.findall(
        rb"\0(ncclTunerPlugin_v\d+|ncclProfiler_v\d+)(?=\0)", Path(request.param).read_bytes()
    )
    return " ".join(sorted({name.decode() for name in names}))


def test_the_newest_tuner_and_a_profiler_are_there(asked: str, plugin_path: Path) -> None:
    """It takes the newest that it finds: before ours is one, somebody has to read what is new.

    A profiler of v7 (2.31 on) is not ours: v6 is taken in its place.
    """
    tuners = [symbol for symbol in asked.split() if "Tuner" in symbol]
    for name in (TUNER_NAME, ADAPTIVE_NAME):
        ours = exported(plugin_path.with_name(name))
        assert tuners[-1] in ours, tuners
    assert {symbol for symbol in asked.split() if "Profiler" in symbol} & ours


def test_committed_header_is_what_would_be_generated() -> None:
    assert vocabulary.HEADER_PATH.read_text("utf-8") == vocabulary.header_text()


@pytest.fixture
def own_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the plugin's sources that a test may break."""
    source = tmp_path / "plugin"
    shutil.copytree(
        build.SOURCE_DIR, source, ignore=shutil.ignore_patterns("tests", "bench", "fuzz")
    )
    monkeypatch.setattr(build, "SOURCE_DIR", source)
    return source


def test_compiler_error_is_shown(own_source: Path, tmp_path: Path) -> None:
    # The first that is compiled, so that the rest is not.
    (own_source / "profiler" / "recorder.cpp").write_text("int broken = not_declared;\n")
    with pytest.raises(PluginError, match="not_declared") as caught:
        build.build_plugin(tmp_path / "build", targets=("recorder_parts",))
    assert caught.value.exit_code == 4


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(PluginError, match="no C\\+\\+ compiler: no-such-compiler not found"):
        build.build_plugin(tmp_path / "build")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(PluginError, match=r"no cmake .*pip install '\.\[plugin\]'"):
        build.build_plugin(tmp_path / "build")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(libraries, "BUILD_DIR", Path("nowhere"))  # `make plugin` may have run here
    with pytest.raises(MissingPath, match="make plugin"):
        build.find_plugin()
    with pytest.raises(MissingPath, match=r"elsewhere\.so"):
        build.find_plugin(tmp_path / "elsewhere.so")


# `make soak ONLY=crashes SECONDS=3600` fuzzes each reader of files for an hour; 0 seconds play the
# seeds alone.
_HOW = "apt-get install clang-14 libclang-rt-14-dev, which has libFuzzer"
# libFuzzer holds the process's peak memory (getrusage) against its limit. Linux hands the peak of
# the one that calls exec on to what it starts, and Python starts others from a vfork, so that peak
# would be pytest's own. A process that a shell forks begins anew.
_WITH_ITS_OWN_PEAK = ("sh", "-c", '"$0" "$@"; exit $?')


def seed_of(target: str) -> bytes:
    random = np.random.default_rng(0)
    if target == "table":
        return random_table(random, first_bin=80, num_bins=3).to_bytes()
    return random_schedule(random, Collective.AllReduce, chunks=True).to_bytes()


@pytest.fixture(scope="session")
def fuzz_dir() -> Path:
    """The build directory with the fuzz targets."""
    versions = ("", *(f"-{version}" for version in range(21, 11, -1)))
    found = [v for v in versions if all(shutil.which(name + v) for name in ("clang", "clang++"))]
    if not found:
        pytest.skip(f"no clang: {_HOW}")
    build = BUILDS / "fuzz"
    with locked(BUILDS / "fuzz.lock"), pytest.MonkeyPatch.context() as patch:
        # Not as -DCMAKE_CXX_COMPILER: given once more, it has CMake forget every other setting.
        patch.setenv("CC", f"clang{found[0]}")
        patch.setenv("CXX", f"clang++{found[0]}")
        build_plugin(build, "-DDYNAMICCL_FUZZ=ON")
    return build


@pytest.mark.soak
@pytest.mark.parametrize("target", ["table", "schedule"])
def test_no_input_crashes(target: str, fuzz_dir: Path, tmp_path: Path, soak: Soak) -> None:
    corpus = tmp_path / "corpus"  # the fuzzer adds to it
    corpus.mkdir()
    (corpus / "0").write_bytes(seed_of(target))
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


# The explorer of the vote finds what would break the law: one changed line of `agree/` each.

PLUGIN = Path(__file__).resolve().parents[2] / "serve" / "plugin"
SOURCE = "tests/test_agree_explore.cpp"
#: What is wrong -> the part of the explorer (and its world) that finds it, the file, and texts
#: before and after.
#: All are compiled at once; WRONG is true in the run of this one.
MUTANTS: Final[dict[str, tuple[str, ...]]] = {
    "a rank abstains after it has confirmed": (
        "worlds:keeper and worker are killed",
        "agree/ballot.h",
        "end(Verdict::kFailed,",
        "end(WRONG ? Verdict::kAbstain : Verdict::kFailed,",
    ),
    "table when all but one have confirmed": (
        "worlds:a rank is killed",
        "agree/rounds.h",
        "if (round.num_confirmed <",
        "if (round.num_confirmed + (WRONG ? 1 : 0) <",
    ),
    "a rank counts before it says that it differs": (
        "word",
        "agree/word.h",
        "first == own ? Step::kCount",
        "first == own || WRONG ? Step::kCount",
        "if (is_time_up) decide",
        "if (is_time_up || (WRONG && board->fields[2] != vote->fields[2])) decide",
    ),
    "no log": (
        "worlds:the worker is killed, and one is late",
        "agree/rounds.h",
        "if (outlet->log(table))",
        "if (WRONG ? table.num_ranks > 0 : outlet->log(table))",
    ),
    "a table is forgotten at the first vote of the next round": (
        "random",
        "agree/rounds.h",
        "  std::string why = difference(",
        "  if (WRONG) forget_before(key);\n  std::string why = difference(",
    ),
    "an unknown recall is answered by silence": (
        "worlds:the worker is killed, and one is late",
        "agree/rounds.h",
        "    bind(from, key, &round, vote.nonce);\n    if (!is_known) {",
        "    if (!WRONG) bind(from, key, &round, vote.nonce);\n"
        "    if (!is_known && WRONG) {\n"
        "      if (round.voters.empty()) rounds_.erase(key);\n"
        "      return;\n"
        "    }\n"
        "    if (!is_known) {",
    ),
    "the ids of shrinks are not known": (
        "worlds:two disjoint shrinks",
        "identity/ids.h",
        "= *place_of(id) == id || count == kMost;",
        "= !WRONG && (*place_of(id) == id || count == kMost);",
    ),
    "what NCCL told of a call is not in the digest": (
        "worlds:one simulates a call before the stop",
        "agree/stops.h",
        "size_bytes), marks);",
        "size_bytes), WRONG ? 0 : marks);",
    ),
    "a shrink takes the table back": (
        "worlds:one sees a shrink",
        "agree/stops.h",
        "{ return __atomic_exchange_n(&votes_, false, __ATOMIC_RELAXED); }",
        "{\n"
        "    if (WRONG) return votes_ = false, table_ = nullptr, true;\n"
        "    return __atomic_exchange_n(&votes_, false, __ATOMIC_RELAXED);\n"
        "  }",
    ),
    "stops are not shifted by the communicator's id": (
        "worlds:opposite order",
        "agree/stops.h",
        "mixed(mixed(0, comm_id_), number_) % width;",
        "(WRONG ? 0 : mixed(mixed(0, comm_id_), number_) % width);",
    ),
}


@pytest.fixture(scope="module", name="explorer")
def explorer_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The explorer with all mutants, one of which DYNAMICCL_WRONG names by its number."""
    folder = tmp_path_factory.mktemp("explorer")
    for part in ("agree", "identity", "tests"):
        shutil.copytree(PLUGIN / part, folder / part)
    for number, (_, name, *changes) in enumerate(MUTANTS.values()):
        path = folder / name
        text = path.read_text(encoding="utf-8")
        for before, after in zip(changes[::2], changes[1::2], strict=True):
            assert text.count(before) == 1
            text = text.replace(before, after.replace("WRONG", f"(wrong == {number})"))
        path.write_text(text, encoding="utf-8")
    (folder / "wrong.h").write_text(
        "#pragma once\n#include <cstdlib>\n"
        'inline const int wrong = std::atoi(std::getenv("DYNAMICCL_WRONG"));\n'
    )
    argv = [find_tool("g++"), "-std=c++17", "-O1", "-I.", "-include", "wrong.h", SOURCE]
    subprocess.run([*argv, "-o", "explore"], cwd=folder, check=True)
    return folder / "explore"


@pytest.mark.parametrize("what", MUTANTS)
def test_explorer_finds_it(what: str, explorer: Path) -> None:
    """And nothing where nothing is wrong: it is one of the plugin's own tests."""
    wrong = {"DYNAMICCL_WRONG": str(list(MUTANTS).index(what))}
    environment = {"DYNAMICCL_FEW": "1", "DYNAMICCL_SEED": "0"} | wrong
    argv = [str(explorer), *MUTANTS[what][0].split(":")]
    with subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert ", after:" in process.stderr.readline()
        process.kill()  # it would look at further worlds
