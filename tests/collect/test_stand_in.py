"""The stand-in for nccl-tests: its lines against a real log, its NCCL, tuner calls and faults."""

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from dynamiccl.collect.output import FileReport, read_json
from dynamiccl.nccl import Collective
from dynamiccl.simulator import h100
from tests.collect.parsed import parse
from tests.fakes.nccl_tests.install import PROGRAMS, install_stand_in
from tests.fakes.running import StandIn, times_us, tuning_lines
from tests.published import folder

ROOT = Path(__file__).parents[2]
TUNING = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING"}
ONE_ROW = ("-b", "1M", "-e", "1M", "-g", "8")
LADDER = ("-b", "1K", "-e", "64M", "-f", "8", "-g", "8")


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return StandIn(install_stand_in(tmp_path_factory.mktemp("nccl-tests")))


def shape_of(text: str) -> list[str]:
    """The layout of a text: figures, and what names a device or a release, replaced."""
    text = re.sub(r"Pid +\d+ on +\S+ device +\d+ \[[^]]*\] .*", "DEVICE", text)
    text = re.sub(r"version \S+", "RELEASE", text)
    text = re.sub(r"Avg bus bandwidth    : \S+", "BANDWIDTH", text)
    return re.sub(r"\d", "9", text).rstrip().splitlines()


def test_lines_are_those_of_a_real_run(stand_in: StandIn) -> None:
    """Two GH200, one process each, NCCL 2.30.7: the same command line, digit for digit.

    Its nccl-tests is 2.18.2, the newest of the logs that are whole; `src/util.cu` of 2.19.6 writes
    these lines by the same formats.
    """
    real = (folder("logs") / "cscs_gh200_2ranks_v2.18.2.log").read_text(encoding="utf-8")
    two = {f"OMPI_COMM_WORLD_{name}": n for name, n in [("SIZE", "2"), ("LOCAL_SIZE", "1")]}
    text = stand_in.output("all_reduce_perf", "-b", "1M", "-e", "128M", "-f2", settings=two)
    ours, theirs = shape_of(text), shape_of(real)[1:]
    assert len(ours) == len(theirs)
    for mine, line in zip(ours, theirs, strict=True):
        if mine.lstrip()[:1] != "9":
            assert mine == line
        # Columns are right-aligned: each ends where the real one ends.
        ends = [[m.end() for m in re.finditer(r"\S+", one)] for one in (mine, line)]
        assert ends[0] == ends[1]


@pytest.mark.parametrize("program", PROGRAMS)
def test_text_and_json_are_read_whole_and_agree(
    stand_in: StandIn, program: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    walk = ("-b", "1K", "-e", "64K", "-f", "4", "-g", "2", "-N", "2", "-n", "9", "-I", "1")
    first = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    text = stand_in.output(program, *walk, "-J", str(path), settings=first)
    read = parse(text)
    assert (len(read.rows), read.rejected) == (2 * 2 * 4, [])
    from_json, _ = read_json(path, FileReport(str(path), "json"))
    for row, other in zip(read.rows, from_json, strict=True):
        assert Collective.parse(row["collective"]) is PROGRAMS[program]
        assert (row["num_ranks"], row["gpu"], row["nccl_version"]) == (4, "FAKE H100", "2.30.7")
        both = ("size_bytes", "in_place", "wrong_values")
        assert [row.get(name) for name in both] == [other.get(name) for name in both]
        assert other["time_us"] == pytest.approx(row["time_us"], rel=1e-3)
        assert row["time_min_us"] < row["time_p99_us"] <= row["time_max_us"]
        assert len(other["iteration_times_us"]) == 9
        assert len(other["process_times_us"]) == 2
    second = stand_in.output(program, *walk, settings={**first, "OMPI_COMM_WORLD_RANK": "1"})
    assert second == ""


def test_default_and_times_are_the_simulator_s(stand_in: StandIn) -> None:
    text = stand_in.output("all_reduce_perf", *LADDER, settings={"FAKE_NOISE": "0"})
    group, collective = h100.Group(1, 8), Collective.AllReduce
    expected = []
    for size in (1024 << 3 * step for step in range(6)):
        config = h100.default_config(group, collective, size)
        assert config.algorithm is not None
        assert config.protocol is not None
        cell = (config.algorithm, config.protocol)
        expected += [h100.true_us(group, collective, *cell, size)] * 2
    assert times_us(text) == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "AllReduce: 1048576 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..23}"),
        ({"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}, "Algo RING proto SIMPLE"),
        ({"NCCL_ALGO": "^Ring,NVLS"}, "Algo TREE proto "),
        ({"NCCL_MIN_CTAS": "2", "NCCL_MAX_CTAS": "2"}, "channel{Lo..Hi}={0..1}"),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_PROTO": "Simple"}, "Algo RING proto SIMPLE"),
    ],
)
def test_environment_forces_the_choice(
    stand_in: StandIn, settings: dict[str, str], said: str
) -> None:
    text = stand_in.output("all_reduce_perf", *ONE_ROW, settings={**TUNING, **settings})
    assert all(said in line for line in tuning_lines(text))
    for name, value in settings.items():
        assert f"{name} set by environment to {value}" in text


def test_failure_of_nccl_ends_it(stand_in: StandIn) -> None:
    for name, said in (
        ("NVLS_TREE", 'Unrecognized element token "nvls_tree"'),
        ("PAT", "No algorithm/protocol available for function AllReduce."),
    ):
        done = stand_in.run("all_reduce_perf", *ONE_ROW, settings={"NCCL_ALGO": name})
        assert done.returncode == 3
        assert re.search(rf"Test NCCL failure common.cu:\d+ '.*{said}", done.stdout)


def record(stand_in: StandIn, tmp_path: Path, **settings: str) -> tuple[int, str, list[str]]:
    """A run of two ranks under a recording tuner: exit status, NCCL's log, and the calls."""
    library, calls = tmp_path / "librecorder.so", tmp_path / "calls.txt"
    if shutil.which("c++") is None:
        pytest.skip("no c++ to build the recording tuner with")
    if not library.exists():
        source = [f"-I{ROOT}/serve/plugin/nccl", f"{ROOT}/tests/fakes/recording_tuner.cpp"]
        subprocess.run(["c++", "-shared", "-fPIC", *source, "-o", library], check=True)
    calls.unlink(missing_ok=True)
    paths = {"NCCL_TUNER_PLUGIN": str(library), "RECORD_FILE": str(calls)}
    words = ("-b", "64M", "-e", "64M", "-g", "2", "-n", "1")
    settings = {**TUNING, **paths, **settings}
    wait_s = 1.0 if "RECORD_DISAGREE" in settings else 60.0
    done = stand_in.run("all_reduce_perf", *words, settings=settings, timeout_s=wait_s)
    return done.returncode, done.stdout, calls.read_text().splitlines()


def test_tuner_is_asked_by_every_rank_for_every_call(stand_in: StandIn, tmp_path: Path) -> None:
    _, log, calls = record(stand_in, tmp_path)
    assert "TUNER/Plugin: Using recorder (v6)" in log
    assert "NCCL INFO recording" in log
    # Warm-up, then for both halves one call, one iteration and one check.
    asked = [f"{call} {rank}" for call in ("ask", "chunk") for rank in (1, 2)] * 7
    ranks = [" ".join(call.split()[:2]) for call in calls]
    assert ranks == ["init 1", "init 2", *asked, "finalize 1", "finalize 2"]
    assert {call[7:] for call in calls if call.startswith("init")} == {"2 1 1 2"}
    assert {call[6:] for call in calls if call.startswith("ask")} == {"4 67108864 7 3"}
    _, forced, _ = record(stand_in, tmp_path, RECORD_FORCE="0,1,4")
    assert "Algo TREE proto LL128 channel{Lo..Hi}={0..3}" in forced
    quiet = {"NCCL_DEBUG": "NONE", "FAKE_NOISE": "0", "NCCL_PROTO": "Simple"}
    _, own, _ = record(stand_in, tmp_path, **quiet)
    _, small, _ = record(stand_in, tmp_path, **quiet, RECORD_CHUNK="16384")
    assert times_us(small) > times_us(own)


def test_what_a_tuner_does_wrong_is_nccl_s_end(stand_in: StandIn, tmp_path: Path) -> None:
    assert record(stand_in, tmp_path, RECORD_ERROR="init")[0] == 3
    assert record(stand_in, tmp_path, RECORD_ERROR="ask")[0] == 3
    for unchecked in ("2,0,0", "1,0,256"):  # a cell that is not there, and no channels
        assert record(stand_in, tmp_path, RECORD_FORCE=unchecked)[0] == -signal.SIGFPE
    with pytest.raises(subprocess.TimeoutExpired):
        record(stand_in, tmp_path, RECORD_DISAGREE="1")
