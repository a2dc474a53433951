"""Layouts known from public issues, in text of our own making: numbers are invented."""

from itertools import product
from pathlib import Path

import pytest

from dynamiccl.collect import nccl_tests
from dynamiccl.errors import OutputError
from dynamiccl.nccl import Collective
from tests.collect.parsed import Parsed, imported, parse

START = "# Collective test starting: all_reduce_perf\n# nThread 1 nGpus 8 minBytes 8 maxBytes 64\n"
RANKS = "".join(
    f"#  Rank {r} Group 0 Pid 7 on n1 device {r} [0000:0{r}:00] H100\n" for r in range(8)
)
HALF = "time  algbw  busbw  #wrong"
NAMES = f"#       size  count  type  redop  root  {HALF}  {HALF}\n"
ROW_1M = "  1048576  262144  float  sum  -1  100.0  10.49  18.35  0  102.0  10.28  17.99  0\n"
ROW_2M = "  2097152  524288  float  sum  -1  150.0  13.98  24.47  0  151.0  13.89  24.30  0\n"
TAIL = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 20.0\n#\n"
WHOLE = START + RANKS + NAMES + ROW_1M + ROW_2M + TAIL
OLD = "#  size count type {}time algbw busbw error time algbw busbw error\n"
#: Of AllGather or AlltoAll.
AMBIGUOUS = "1048576 32768 float none -1 100.0 10.49 9.18 0 102.0 10.28 9.00 0\n"


def times(output: Parsed) -> list[float]:
    return [row["time_us"] for row in output.rows]


def refusal(text: str, folder: Path, name: str = "run1.log", **options: str) -> str:
    """Why a file of that text gives nothing."""
    with pytest.raises(OutputError) as caught:
        imported(folder / name, text, **options)
    assert not (folder / "out").exists()
    return str(caught.value)


def test_milliseconds_of_2018_and_cpu_times_are_refused() -> None:
    of_2018 = (
        "     bytes  N  type  op  time  algbw  busbw  res  time  algbw  busbw  res\n"
        "   1048576  262144  float  sum  0.410  2.56  4.48  0e+00  0.420  2.50  4.37  0e+00\n"
    )
    for text in (of_2018, NAMES.replace("time", "cputime") + ROW_1M):
        output = parse(START + RANKS + text)
        assert output.rows == []
        assert "-C prints cputime, no time" in output.rejected[0].reason


def test_wrong_values_mark_their_row_only() -> None:
    bad = ROW_2M.replace("24.47  0", "24.47  7").replace("24.30  0", "24.30  2e+06")
    output = parse(START + RANKS + NAMES + ROW_1M + bad)
    assert [row["status"] for row in output.rows] == ["ok", "ok", "wrong_values", "wrong_values"]
    assert [row["wrong_values"] for row in output.rows] == [0, 0, 7, 2_000_000]
    output = parse(WHOLE.replace("values : 0 OK", "values : 248 FAILED"))
    assert {row["reason"] for row in output.rows} == {"the run reports 248 values out of bounds"}


def test_torn_row_is_reported_and_nothing_of_it_taken() -> None:
    info = "n1:1:1 [0] NCCL INFO 131072 Bytes -> Algo 0 proto 1 time 51.603912\n"
    torn = "[0]  2097152  524288  float  sum  -1" + info + "[0]     150.0  13.98  24.47  0\n"
    body = "".join("[0] " + line + "\n" for line in (START + RANKS + NAMES + ROW_1M).splitlines())
    output = parse(body + torn)
    assert times(output) == [100.0, 102.0]
    assert [reject.line for reject in output.rejected] == [13, 14]
    assert all("torn row" in reject.reason for reject in output.rejected)


def changed(word: str, other: str) -> str:
    return ROW_2M.replace(word, other, 1)


TORN = [
    "n1:1:1 [0] NCCL INFO Trees " + ROW_2M,  # glued to a log line
    *(" ".join(ROW_2M.split()[:cut]) for cut in range(3, 13)),
    changed("  150.0  13.98", "  150.013.98"),  # numbers that touch
    changed("150.0", "900.0"),  # numbers that do not fit each other
]
#: Words of another rank inside, and other values in a column.
ODD = [
    *(
        changed(word, f"{word[:2]}node7: NCCL WARN Call failed{word[2:]}")
        for word in ("2097152", "524288", "float", "sum", "150.0")
    ),
    *(changed("float", "1.5"), changed("sum", "1.5"), changed("-1", "-2")),
    *(changed("2097152", str(1 << 62)), changed("24.47  0", "24.47 -1")),
    changed("24.47", "29.60"),
]


@pytest.mark.parametrize(("header", "torn"), [*product(("", NAMES), TORN), *product((NAMES,), ODD)])
def test_row_that_is_not_whole_gives_no_row(header: str, torn: str) -> None:
    output = parse(header + ROW_1M + torn, Collective.AllReduce)
    assert times(output) == [100.0, 102.0]
    assert len(output.rejected) == 1


@pytest.mark.parametrize(("wrong", "more"), [("  #wrong", " 0"), ("", "")])
def test_time_stamps_and_per_iteration_columns(wrong: str, more: str) -> None:
    """Which follow the bandwidths where nothing was checked."""
    half = f"time  algbw  busbw{wrong}  i_min  i_max  i_p99  i_cv%"
    names = f"#  size  count  type  redop  root  {half}  {half}  timestamp\n"
    row = (
        f"1048576 262144 float sum -1 100.0 10.49 18.35{more} 98.0 120.0 119.0 3.5 "
        f"102.0 10.28 17.99{more.replace('0', 'N/A')} 99.0 121.0 118.0 3.6 2026-01-02 03:04:05\n"
    )
    first, second = parse(START + names + row).rows
    assert (first["time_min_us"], first["time_max_us"]) == (98.0, 120.0)
    assert (first["time_p99_us"], first["time_cv_percent"]) == (119.0, 3.5)
    assert (second["time_us"], second["time_cv_percent"]) == (102.0, 3.6)
    assert "wrong_values" not in second


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        ("root ", "float 0 100.0 10.49 10.49 N/A 102.0 10.28 10.28 N/A", "Broadcast"),
        ("redop root ", "float sum 0 100.0 10.49 10.49 N/A N/A N/A N/A N/A", "Reduce"),
        ("redop ", "float sum 100.0 10.49 9.18 N/A 102.0 10.28 9.00 N/A", "ReduceScatter"),
        ("redop ", "float sum 100.0 10.49 18.35 N/A 102.0 10.28 18.00 N/A", "AllReduce"),
    ],
)
def test_collective_follows_from_older_columns(columns: str, row: str, expected: str) -> None:
    output = parse(OLD.format(columns) + "1048576 262144 " + row)
    # A half without a time is no measurement.
    assert times(output) == [100.0, 102.0][: 1 + (" N/A 102.0" in row)]
    assert {row["collective"] for row in output.rows} == {expected}
    assert f"collective {expected} follows from the columns" in output.remarks


def test_rows_of_several_processes_in_one_output_are_refused(tmp_path: Path) -> None:
    lines = (START + NAMES + ROW_1M).splitlines()
    tagged = "".join(f"{rank}: {line}\n" for line in lines for rank in (0, 1))
    for mixed in ((START + NAMES) * 2 + ROW_1M + ROW_1M + TAIL + TAIL, tagged):
        assert "several processes wrote into one output" in refusal(mixed, tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (WHOLE.replace("Rank 3 Group", "Rank Group"), "the list of ranks is not complete"),
        (WHOLE.replace("Rank 3 Group 0", "Rank 3 Group 1"), "several communicators"),
        (WHOLE.replace("Rank 7", "Frank 7"), "7 would make busbw"),
        (WHOLE.replace(RANKS, ""), "the output lists none; say --ranks, --nodes"),
    ],
)
def test_ranks_that_the_output_does_not_tell_are_left_out(text: str, why: str) -> None:
    output = parse(text)
    assert not any(name in row for row in output.rows for name in ("num_ranks", "num_nodes"))
    assert any(why in remark for remark in output.remarks)


@pytest.mark.parametrize(
    ("bus_id", "hosts", "nodes"),
    # A bus id of its own each; what nccl-tests printed up to 2.14; and ranks on one GPU.
    [("0009:01:00", 8, 8), ("0x01", 4, None), ("0000:02:00", 4, None)],
)
def test_ranks_that_seem_to_share_a_gpu_leave_the_number_of_nodes_open(
    bus_id: str, hosts: int, nodes: int | None
) -> None:
    ranks = "".join(
        f"#  Rank {r} Group 0 Pid {r} on n{r % hosts} device 0 [{bus_id}] GH200\n" for r in range(8)
    )
    output = parse(WHOLE.replace(RANKS, ranks))
    assert {(row["num_ranks"], row.get("num_nodes")) for row in output.rows} == {(8, nodes)}
    assert any("ranks show the same GPU" in each for each in output.remarks) == (nodes is None)


def test_a_fact_that_the_output_tells_twice_and_differently_is_left_out() -> None:
    output = parse(WHOLE.replace("[0000:07:00] H100", "[0000:07:00] H200"))
    assert {row.get("gpu") for row in output.rows} == {None}
    assert "GPU model left out: the output names several (H100, H200)" in output.remarks


def test_collective_from_option_then_file_name(tmp_path: Path) -> None:
    for number, (name, option, expected) in enumerate(
        (
            ("allgather_8gpu.log", None, "AllGather"),
            ("run1.log", "alltoall", "AlltoAll"),
            ("allgather_8gpu.log", "alltoall", "AlltoAll"),
        )
    ):
        (folder := tmp_path / str(number)).mkdir()
        _, rows = imported(folder / name, AMBIGUOUS, collective=option)
        assert {row["collective"] for row in rows} == {expected}


def test_collective_that_is_not_known_or_contradicted_is_refused(tmp_path: Path) -> None:
    found = refusal(AMBIGUOUS, tmp_path, "broadcast.log")
    assert "name it with --collective (AllGather or" in found
    found = refusal(WHOLE.replace("all_reduce_perf", "hypercube_perf"), tmp_path)
    assert "'hypercube' is no collective of NCCL's" in found


def test_tuning_lines_between_the_rows() -> None:
    lines = "".join(
        f"n1:1:1 [0] NCCL INFO AllReduce: {size} Bytes -> Algo {algorithm} proto SIMPLE "
        "channel{Lo..Hi}={0..7}\n"
        for size, algorithm in ((1048576, "RING"), (2097152, "RING"), (2097152, "TREE"))
    )
    output = parse(START + RANKS + NAMES + lines + ROW_1M + ROW_2M)
    assert [row.get("actual_algorithm") for row in output.rows] == ["Ring", "Ring", None, None]
    assert [row["verified"] for row in output.rows] == [True, True, False, False]
    assert any("disagrees, at sizes 2097152" in remark for remark in output.remarks)


def test_long_outputs_become_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_tests, "CHUNK_ROWS", 3)
    monkeypatch.setattr(nccl_tests, "_PART_ROWS", 5)
    summary, rows = imported(tmp_path / "a.log", WHOLE * 2)
    assert (len(summary.files[0].parts), summary.measurements_written) == (2, 8)
    found = [(row["run"][-2:], row["time_us"], row["repeat"]) for row in rows]
    times_us = (100.0, 102.0, 150.0, 151.0)
    assert found == [(run, time_us, 0) for run in (".1", ".2") for time_us in times_us]
