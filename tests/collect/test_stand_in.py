"""The stand-in for nccl-tests: what it prints in each release, and that our parsers take it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dynamiccl.collect.nccl_tests import TextOutput, parse_json, parse_text
from dynamiccl.errors import CorruptFile
from dynamiccl.nccl import Collective
from tests.fakes.nccl_tests.flags import parse, usage
from tests.fakes.nccl_tests.install import install_stand_in
from tests.fakes.nccl_tests.numbers import narrow
from tests.fakes.nccl_tests.program import PROGRAMS
from tests.fakes.nccl_tests.releases import TESTS_RELEASES
from tests.fakes.running import StandIn
from tests.published import folder, published

LOGS = folder("logs")
RELEASES = [str(release) for release in TESTS_RELEASES]
WITH_JSON = RELEASES[2:]


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return StandIn(install_stand_in(tmp_path_factory.mktemp("nccl-tests")))


def parsed(text: str, collective: Collective | None = None) -> TextOutput:
    found = parse_text(text, where="stand-in", collective=collective)
    assert found.rejected == ()
    return found


def release(version: str, **settings: str) -> dict[str, str]:
    return {"FAKE_NCCL_TESTS_VERSION": version, **settings}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("version", RELEASES)
def test_every_release_s_text_is_parsed_whole(
    stand_in: StandIn, version: str, program: str
) -> None:
    text = stand_in.output(
        program, "-b", "1K", "-e", "64K", "-f", "4", "-g", "2", settings=release(version)
    )
    collective = PROGRAMS[program]
    # Before 2.16 the output does not say which program it is of.
    found = parsed(text, collective if version == "2.13.12" else None)
    assert len(found.rows) == 2 * 4
    for row in found.rows:
        assert Collective.parse(row["collective"]) is collective
        assert (row["num_ranks"], row["gpu"]) == (2, "FAKE H100")
        expected = row["size_bytes"] / row["time_us"] / 1000
        assert row["algbw_gbytes_per_s"] == pytest.approx(expected, abs=0.006, rel=0.01)
        in_place_of_two = row["in_place"] and collective in {
            Collective.AlltoAll,
            Collective.SendRecv,
        }
        assert row.get("wrong_values") == (None if in_place_of_two else 0)
    assert "FAKE H100" in text


@pytest.mark.parametrize(("version", "columns"), [(v, 13) for v in RELEASES])
def test_options_of_a_release_add_their_columns(
    stand_in: StandIn, version: str, columns: int
) -> None:
    arguments = ["-b", "1M", "-e", "1M", "-n", "7"]
    if version >= "2.17.8":
        arguments += ["-S", "1"]
        columns += 2
    if version >= "2.19.2":
        arguments += ["-I", "1"]
        columns += 8
    text = stand_in.output("all_reduce_perf", *arguments, "-g", "4", settings=release(version))
    [row] = [line.split() for line in text.splitlines() if line.startswith("     1048576")]
    assert len(row) == columns
    for found in parsed(text, Collective.AllReduce).rows:
        assert ("time_p99_us" in found) == (version >= "2.19.2")


def test_iterations_have_their_statistics(stand_in: StandIn) -> None:
    text = stand_in.output("all_reduce_perf", "-b", "1M", "-e", "1M", "-g", "4", "-I", "1")
    for row in parsed(text).rows:
        assert row["time_min_us"] < row["time_us"] * 1.05
        assert row["time_min_us"] < row["time_p99_us"] <= row["time_max_us"]
        assert 0 < row["time_cv_percent"] < 20


def shape_of(text: str) -> str:
    """The layout of a text: figures, names and runs of dashes of a device replaced."""
    text = re.sub(r"Pid +\d+ on +\S+ device +\d+ \[[^]]*\] .*", "DEVICE", text)
    text = re.sub(r"nccl-headers=\d+ nccl-library=\d+", "CODES", text)
    text = re.sub(r"Avg bus bandwidth    : \S+", "BANDWIDTH", text)
    return re.sub(r"\d", "9", text)


def test_lines_are_those_of_a_real_run_of_2_18_2(stand_in: StandIn) -> None:
    """Two GH200, one process each: the same command line, digit for digit the same shape."""
    real = (LOGS / "cscs_gh200_2ranks_v2.18.2.log").read_text(encoding="utf-8")
    real = real.partition("\n")[2]
    two = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    text = stand_in.output(
        "all_reduce_perf",
        *("-b", "1M", "-e", "128M", "-f2"),
        settings=release("2.18.2", OMPI_COMM_WORLD_LOCAL_SIZE="1", **two),
    )
    ours, theirs = (shape_of(t).rstrip().splitlines() for t in (text, real))
    assert len(ours) == len(theirs)
    for mine, real_line in zip(ours, theirs, strict=True):
        if mine.lstrip()[:1] != "9":
            assert mine == real_line
        else:
            # Columns are right-aligned: each ends where the real one ends.
            ends = [[m.end() for m in re.finditer(r"\S+", line)] for line in (mine, real_line)]
            assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("log", "version"),
    [
        ("oci_a100_2x8_one_row_10g.log", "2.13.12"),
        ("playground_a100_sendrecv.log", "2.16.9"),
    ],
)
def test_table_head_is_that_of_real_runs(stand_in: StandIn, log: str, version: str) -> None:
    real = published(LOGS / log).read_text(encoding="utf-8")
    [names] = {line for line in real.splitlines() if "algbw" in line and "#wrong" in line}
    text = stand_in.output("all_reduce_perf", "-b", "8", "-e", "8", settings=release(version))
    assert names in text.splitlines()


def test_three_releases_print_a_large_bandwidth_differently() -> None:
    by_version = {str(v): narrow(12_345.678, 6, v) for v in TESTS_RELEASES[2:]}
    assert by_version["2.17.8"] == by_version["2.19.6"] == " 12346"
    assert narrow(9_999.996, 6, TESTS_RELEASES[3]) == "10000.0"  # a column too many
    assert narrow(9_999.996, 6, TESTS_RELEASES[-1]) == " 10000"
    assert narrow(123_456.0, 6, TESTS_RELEASES[-1]) == "123456"
    assert narrow(1_234_567.0, 6, TESTS_RELEASES[-1]) == " 1e+06"


@pytest.mark.parametrize("version", RELEASES)
def test_help_lists_the_release_s_options_and_succeeds(stand_in: StandIn, version: str) -> None:
    done = stand_in.run("all_reduce_perf", "-h", settings=release(version))
    assert done.returncode == 0
    assert done.stdout.startswith("USAGE: all_reduce_perf \n\t[-t,--nthreads <num threads>] \n\t")
    shown = set(re.findall(r"\[-(\w),--", done.stdout))
    common = set("tgbeifnmwNpcodrzyTGCaRh")
    later = {"2.17.3": "JxDV", "2.17.8": "SM", "2.18.2": "u", "2.19.2": "I", "2.19.6": "K"}
    known = RELEASES[: RELEASES.index(version) + 1]
    assert shown == common | {letter for v in known for letter in later.get(v, "")}


def test_unknown_option_prints_the_usage_and_succeeds(stand_in: StandIn) -> None:
    done = stand_in.run("all_reduce_perf", "-b", "8", "-K", "1", settings=release("2.19.2"))
    assert done.returncode == 0
    assert done.stdout.startswith("invalid option '?'\nUSAGE: all_reduce_perf")
    assert done.stderr.endswith("all_reduce_perf: invalid option -- 'K'\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-b", "x"), "invalid size specified for 'minbytes'"),
        (("-b", "2M", "-e", "1M"), "invalid sizes for 'minbytes' and 'maxbytes': 2097152 > 10"),
        (("-D", "1"), "requires enabling symmetric memory registration (-R 2)"),
    ],
)
def test_what_cannot_be_run_is_refused(
    stand_in: StandIn, arguments: tuple[str, ...], said: str
) -> None:
    done = stand_in.run("all_reduce_perf", *arguments)
    assert done.returncode == 255
    assert said in done.stderr


def test_long_options_may_be_cut_short_and_numbers_are_c_s() -> None:
    newest = TESTS_RELEASES[-1]
    options = parse("x", ["--minb", "1.5K", "--maxbytes=2m", "-n0x10", "-w", "3rd"], newest)
    assert (options.min_bytes, options.max_bytes) == (1536, 2 << 20)
    assert (options.iterations, options.warmup) == (16, 3)
    assert parse("x", [], TESTS_RELEASES[0]).warmup == 5
    assert "memory_report" in usage("x", TESTS_RELEASES[3])
    assert parse("x", ["--memory", "1"], TESTS_RELEASES[3]).memory == 1


def test_sizes_are_whole_and_rounded_for_each_rank(stand_in: StandIn) -> None:
    text = stand_in.output("all_gather_perf", "-b", "8", "-e", "1000", "-f", "5", "-g", "3")
    rows = [line.split()[:2] for line in text.splitlines() if line.strip()[:1].isdecimal()]
    # 8, 40, 200, 1000 bytes over three ranks: 0, 0, 64 and 320 bytes each, in steps of 16.
    assert rows == [["0", "0"], ["0", "0"], ["192", "16"], ["960", "80"]]
    step = stand_in.output("all_reduce_perf", "-b", "1M", "-e", "3M", "-g", "2")
    assert [row["size_bytes"] >> 20 for row in parsed(step).rows[::2]] == [1, 2, 3]


def test_cycles_types_operations_and_roots_multiply(stand_in: StandIn) -> None:
    arguments = ("-b", "64", "-e", "64", "-g", "2", "-N", "3")
    assert len(parsed(stand_in.output("all_reduce_perf", *arguments)).rows) == 2 * 3
    every = stand_in.output("reduce_perf", *arguments, "-d", "all", "-o", "all", "-r", "-1")
    assert every.count("\n          64 ") == 3 * 12 * 6 * 2


@pytest.mark.parametrize("version", WITH_JSON)
def test_json_of_every_release_is_parsed_whole(
    stand_in: StandIn, version: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    arguments = ["-b", "1K", "-e", "64K", "-f", "4", "-g", "8", "-J", str(path)]
    if version >= "2.19.2":
        arguments += ["-I", "1", "-n", "9"]
    settings = release(version, NCCL_ALGO="Ring", SECRET="do not keep")
    text = stand_in.output("all_gather_perf", *arguments, settings=settings)
    assert text.startswith(f"# Writing JSON output to {path}\n")
    rows = parse_json(path, Collective.AllGather)
    assert len(rows) == 2 * 4
    assert {(row["num_ranks"], row["nccl_version"]) for row in rows} == {(8, "2.29.7")}
    assert {row["requested_algorithm"] for row in rows} == {"Ring"}
    in_text = {(r["size_bytes"], r["in_place"]): r["time_us"] for r in parsed(text).rows}
    for row in rows:
        assert row["time_us"] == pytest.approx(
            in_text[row["size_bytes"], row["in_place"]], rel=1e-3
        )
        assert len(row.get("iteration_times_us", ())) == (9 if version >= "2.19.2" else 0)


@pytest.mark.parametrize(
    ("version", "number", "bandwidth"),
    [
        ("2.17.3", 1, "average_bus_bandwidith"),
        ("2.17.8", 1, "average_bus_bandwidith"),
        ("2.18.2", 1, "average_bus_bandwidth"),
        ("2.19.2", 2, "average_bus_bandwidth"),
        ("2.19.6", 3, "average_bus_bandwidth"),
    ],
)
def test_json_has_the_traps_of_its_version(
    stand_in: StandIn, tmp_path: Path, version: str, number: int, bandwidth: str
) -> None:
    path = tmp_path / "out.json"
    arguments = ["-b", "64", "-e", "64", "-g", "2", "-J", str(path)]
    if number > 1:
        arguments += ["-I", "1", "-n", "3"]
    settings = release(version, ODD="grün", NCCL_TESTS_MIN_BW="0")
    stand_in.output("all_reduce_perf", *arguments, settings=settings)
    content = json.loads(path.read_text(encoding="ascii"))
    assert content["version"] == number
    assert content[bandwidth][bandwidth.rpartition("_")[2]] > 0
    assert content[bandwidth]["okay"] == "true"
    assert content["config"]["blocking_collectives"] == "false"
    assert ("per_iter_timing" in content["config"]) == (number >= 2)
    assert ("per_iter_skip" in content["config"]) == (number >= 3)
    assert "ODD=gr" in content["env"]  # cut where it stops being ASCII
    [result] = content["results"]
    assert result["root"] == "    -1"
    assert result["out_of_place"]["nwrong"] == 0.0
    extra = result.get("out_of_place_per_iter", {})
    assert ("skipped_iterations" in extra) == (number >= 3)
    assert content["errors"] == [""]
    assert [d["rank"] for d in content["config"]["devices"]] == [0]


def test_json_is_never_written_over_another_file(stand_in: StandIn, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ("-b", "64", "-e", "64", "-J", str(path))
    for name in ("out.json", "out.json.0", "out.json.1"):
        said = stand_in.output("all_reduce_perf", *arguments).splitlines()[0]
        assert said == f"# Writing JSON output to {tmp_path / name}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.json", "out.json.0", "out.json.1"]
    nowhere = stand_in.output("all_reduce_perf", "-J", str(tmp_path / "no" / "out.json"))
    assert nowhere.startswith("# skipping json output; ")
    assert "JSON" not in stand_in.output("all_reduce_perf", "-J", str(tmp_path / "out.txt"))


def test_crash_leaves_the_json_cut_off(stand_in: StandIn, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = stand_in.run(
        "all_reduce_perf",
        *("-b", "1K", "-e", "1M", "-f", "2", "-g", "8", "-N", "40", "-J", str(path)),
        settings={"FAKE_CRASH": "Ring/LL/16ch"},
    )
    assert done.returncode < 0
    with pytest.raises(CorruptFile, match="cut off"):
        parse_json(path, Collective.AllReduce)


@pytest.mark.parametrize(("version", "whole"), [("2.18.2", False), ("2.19.2", True)])
def test_failure_among_the_rows_aborts_where_json_cannot_be_closed(
    stand_in: StandIn, tmp_path: Path, version: str, whole: bool
) -> None:
    path = tmp_path / "out.json"
    settings = release(version, NCCL_ALGO="PAT")
    done = stand_in.run("all_reduce_perf", "-g", "2", "-J", str(path), settings=settings)
    assert done.returncode == (3 if whole else -6)
    if whole:
        assert json.loads(path.read_text(encoding="ascii"))["results"] == []
    else:
        assert path.read_text(encoding="ascii") == ""


def ompi(rank: int, size: int, local_size: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local_size),
    }


def test_only_the_first_of_two_processes_prints(stand_in: StandIn, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ("-b", "1K", "-e", "1K", "-g", "4", "-J", str(path), "-I", "1", "-n", "2")
    first, second = (
        stand_in.output("all_reduce_perf", *arguments, settings=ompi(rank, 2, 1)) for rank in (0, 1)
    )
    assert second == ""
    rows = parsed(first).rows
    assert {(r["num_ranks"], r["num_nodes"], r["ranks_per_node"]) for r in rows} == {(8, 2, 4)}
    assert first.count("#  Rank ") == 8
    content = json.loads(path.read_text(encoding="ascii"))
    assert [d["rank"] for d in content["config"]["devices"]] == [0, 4]
    times = content["results"][0]["out_of_place_per_iter"]
    for slowest, *each in zip(times["times_us"], *times["per_process_max_times_us"], strict=True):
        assert slowest == max(each)


def test_start_is_light() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
        "import tests.fakes.nccl_tests.program; "
        "print(*({'polars', 'pyarrow', 'pydantic', 'torch', 'pytest'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""
