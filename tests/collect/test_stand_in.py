"""The stand-in for nccl-tests: its lines against a real log, its NCCL, tuner calls and faults."""

import re
from pathlib import Path

import pytest

from dynamiccl.collect.output import FileReport, read_json
from dynamiccl.nccl import Collective
from dynamiccl.simulator import h100
from tests.collect.parsed import parse
from tests.fakes.nccl_tests.install import PROGRAMS, install_stand_in
from tests.fakes.running import StandIn, times_us
from tests.published import folder

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


def test_failure_of_nccl_ends_it(stand_in: StandIn) -> None:
    for name, said in (
        ("NVLS_TREE", 'Unrecognized element token "nvls_tree"'),
        ("PAT", "No algorithm/protocol available for function AllReduce."),
    ):
        done = stand_in.run("all_reduce_perf", *ONE_ROW, settings={"NCCL_ALGO": name})
        assert done.returncode == 3
        assert re.search(rf"Test NCCL failure common.cu:\d+ '.*{said}", done.stdout)
