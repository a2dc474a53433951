"""Layouts known from public issues, in text of our own making: numbers are invented."""

from pathlib import Path

import pytest

from dynamiccl.collect.imports import ImportFailed, ImportOptions, import_files
from dynamiccl.collect.nccl_tests import TextOutput, parse_text
from dynamiccl.collect.output import strip_prefix
from dynamiccl.datasets import store
from dynamiccl.errors import OutputError
from dynamiccl.nccl import Collective

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


def parse(text: str, collective: Collective | None = None) -> TextOutput:
    return parse_text(text, where="doc.txt", collective=collective)


def times(output: TextOutput) -> list[float]:
    return [row["time_us"] for row in output.rows]


def test_whole_output_has_two_rows_a_line() -> None:
    output = parse(WHOLE)
    assert times(output) == [100.0, 102.0, 150.0, 151.0]
    assert [row["in_place"] for row in output.rows] == [False, True, False, True]
    assert {row["num_ranks"] for row in output.rows} == {8}
    assert {row["gpu"] for row in output.rows} == {"H100"}


@pytest.mark.parametrize(
    "prefix",
    [
        "0: ",
        " 0: ",
        "[0] ",
        "[1,0]<stdout>:",
        "[1,0]<stdout>: ",
        "        [1,0]<stdout>: ",
        "Fri Sep 20 10:11:12 2024<stdout>:",
        "Fri Sep 20 10:11:12 2024[1,0]<stdout>:",
        "2024-05-01T10:00:00.123456789Z ",
        "2024-05-01T10:00:00.123456789Z stdout F ",
        "[pod/nccl-launcher-x7/launcher] ",
    ],
)
def test_launcher_prefixes_come_off(prefix: str) -> None:
    text = "".join(prefix + line + "\n" for line in WHOLE.splitlines())
    assert times(parse(text)) == [100.0, 102.0, 150.0, 151.0]


def test_rows_without_root_and_redop() -> None:
    text = "4294967296 134217728 float 29122 147.48 129.05 1e-07 29169 147.24 128.84 1e-07\n"
    row = parse(text, Collective.AllGather).rows[0]
    assert (row["time_us"], row["busbw_gbytes_per_s"]) == (29122.0, 129.05)
    assert "wrong_values" not in row
    assert "root" not in row


def test_rows_without_a_check_column() -> None:
    output = parse("1048576 262144 float sum -1 100.0 10.49 18.35 102.0 10.28 17.99\n")
    assert times(output) == [100.0, 102.0]
    assert "wrong_values" not in output.rows[0]


def test_output_of_2018_is_in_milliseconds() -> None:
    text = (
        "nThread 1 nGpus 8 minBytes 9 maxBytes 33554432 step: 1048576(bytes) warmup iters: 5\n"
        "--------------------------------------\n"
        "WARNING: There are more than one active ports on host 'n1', but the\n"
        "     bytes  N  type  op  time  algbw  busbw  res  time  algbw  busbw  res\n"
        "   1048576  262144  float  sum  0.410  2.56  4.48  0e+00  0.420  2.50  4.37  0e+00\n"
        " Out of bounds values : 248 FAILED\n"
        " Avg bus bandwidth    : 4.4\n"
    )
    output = parse(text)
    assert times(output) == pytest.approx([410.0, 420.0])
    assert {row["status"] for row in output.rows} == {"ok"}
    assert {row["reason"] for row in output.rows} == {"the run reports 248 values out of bounds"}
    assert any("248 values out of bounds" in remark for remark in output.remarks)


def test_one_half_of_2018_is_out_of_place() -> None:
    text = (
        "#                                   out-of-place\n"
        "#  bytes  N  type  root  time  algbw  busbw  res\n"
        "   1048576  262144  float  0  0.410  2.56  2.56  0e+00\n"
    )
    rows = parse(text, Collective.Broadcast).rows
    assert [(row["in_place"], row["root"]) for row in rows] == [(False, 0)]


def test_wrong_values_mark_their_row_only() -> None:
    bad = ROW_2M.replace("24.47  0", "24.47  7").replace("24.30  0", "24.30  2e+06")
    output = parse(START + RANKS + NAMES + ROW_1M + bad)
    assert [row["status"] for row in output.rows] == ["ok", "ok", "wrong_values", "wrong_values"]
    assert [row["wrong_values"] for row in output.rows] == [0, 0, 7, 2_000_000]


def test_torn_row_is_reported_and_nothing_of_it_taken() -> None:
    info = "n1:1:1 [0] NCCL INFO 131072 Bytes -> Algo 0 proto 1 time 51.603912\n"
    torn = "[0]  2097152  524288  float  sum  -1" + info + "[0]     150.0  13.98  24.47  0\n"
    body = "".join("[0] " + line + "\n" for line in (START + RANKS + NAMES + ROW_1M).splitlines())
    output = parse(body + torn)
    assert times(output) == [100.0, 102.0]
    assert [reject.line for reject in output.rejected] == [13, 14]
    assert all("torn row" in reject.reason for reject in output.rejected)


def test_row_glued_to_a_log_line_is_reported() -> None:
    output = parse(START + RANKS + NAMES + ROW_1M + "n1:1:1 [0] NCCL INFO Trees " + ROW_2M)
    assert times(output) == [100.0, 102.0]
    assert len(output.rejected) == 1


@pytest.mark.parametrize("cut", range(3, 13))
def test_row_cut_at_any_column_gives_no_row(cut: int) -> None:
    piece = " ".join(ROW_2M.split()[:cut]) + "\n"
    for header in ("", NAMES):
        output = parse(header + ROW_1M + piece, Collective.AllReduce)
        assert times(output) == [100.0, 102.0]
        assert len(output.rejected) == 1


def test_numbers_that_do_not_fit_each_other_are_refused() -> None:
    output = parse(START + RANKS + NAMES + ROW_1M.replace("100.0", "900.0") + ROW_2M)
    assert times(output) == [150.0, 151.0]
    assert "are not 10.49 GB/s" in output.rejected[0].reason


def test_a_row_whose_numbers_touch_is_torn() -> None:
    output = parse("2147483648 536870912 float sum -1 8019.8267.77 468.60 0 8019.5 267.78 468.62 0")
    assert times(output) == []
    [reject] = output.rejected
    assert "torn row" in reject.reason


def test_time_stamps_and_per_iteration_columns() -> None:
    half = "time  algbw  busbw  #wrong  i_min  i_max  i_p99  i_cv%"
    names = f"#  size  count  type  redop  root  {half}  {half}  timestamp\n"
    row = (
        "1048576 262144 float sum -1 100.0 10.49 18.35 0 98.0 120.0 119.0 3.5 "
        "102.0 10.28 17.99 N/A 99.0 121.0 118.0 3.6 2026-01-02 03:04:05\n"
    )
    for text in (START + names + row, row):
        first, second = parse(text).rows
        assert (first["time_min_us"], first["time_max_us"]) == (98.0, 120.0)
        assert (first["time_p99_us"], first["time_cv_percent"]) == (119.0, 3.5)
        assert (second["time_us"], second["time_cv_percent"]) == (102.0, 3.6)
        assert "wrong_values" not in second


def test_several_operations_are_rows_of_their_own() -> None:
    text = START + RANKS + NAMES + ROW_1M + ROW_1M.replace("sum", "max").replace("100.0", "101.0")
    rows = parse(text).rows
    assert [row["reduction_op"] for row in rows] == ["sum", "sum", "max", "max"]


def test_two_processes_in_one_output_count_equal_rows_once(tmp_path: Path) -> None:
    log = tmp_path / "mixed.log"
    second = ROW_1M.replace("100.0", "100.5")
    log.write_text((START + NAMES) * 2 + ROW_1M + ROW_1M + second + TAIL + TAIL)
    summary = import_files([log], tmp_path / "out", options=ImportOptions(system="s"))
    frame = store.read(tmp_path / "out").sort("source_line", "in_place")
    assert summary.duplicates == 3
    assert frame["time_us"].to_list() == [100.0, 102.0, 100.5]
    assert frame["repeat"].to_list() == [0, 0, 1]
    assert frame["num_ranks"].null_count() == 3


def test_streams_are_kept_apart() -> None:
    lines = (START + NAMES + ROW_1M).splitlines()
    text = "".join(f"{rank}: {line}\n" for line in lines for rank in (0, 1))
    output = parse(text)
    assert times(output) == [100.0, 102.0, 100.0, 102.0]
    assert all("num_ranks" not in row for row in output.rows)


def test_split_groups_are_communicators() -> None:
    ranks = "".join(
        f"#  Rank {r} Group {r % 2} Pid 7 on n{r // 2} device {r % 2} [0000:01:00] H100\n"
        for r in range(8)
    )
    row = ROW_1M.replace("18.35", "15.74").replace("17.99", "15.42")
    rows = parse(START.replace("nGpus 8", "nGpus 1") + ranks + NAMES + row).rows
    assert {(row["num_ranks"], row["num_nodes"], row["num_comms"]) for row in rows} == {(4, 4, 2)}


def test_missing_rank_line_leaves_the_number_unknown() -> None:
    torn = RANKS.replace("#  Rank 3 Group", "#  Rank Group")
    output = parse(START + torn + NAMES + ROW_1M)
    assert not any(name in row for row in output.rows for name in ("num_ranks", "num_nodes"))
    assert any("list of ranks is not complete" in remark for remark in output.remarks)


def test_bandwidths_overrule_a_wrong_number_of_ranks() -> None:
    output = parse(START.replace("nGpus 8", "nGpus 2") + NAMES + ROW_1M)
    assert all("num_ranks" not in row for row in output.rows)
    assert any("would make busbw" in remark for remark in output.remarks)


def test_bandwidths_prove_all_reduce() -> None:
    assert {row["collective"] for row in parse(NAMES + ROW_1M).rows} == {"AllReduce"}


@pytest.mark.parametrize(
    ("name", "option", "expected"),
    [
        ("allgather_8gpu.log", None, "AllGather"),
        ("run1.log", "alltoall", "AlltoAll"),
        ("allgather_8gpu.log", "alltoall", "AlltoAll"),
    ],
)
def test_collective_from_option_then_file_name(
    name: str, option: str | None, expected: str, tmp_path: Path
) -> None:
    log = tmp_path / name
    log.write_text("1048576 32768 float none -1 100.0 10.49 9.18 0 102.0 10.28 9.00 0\n")
    import_files([log], tmp_path / "out", options=ImportOptions(system="s", collective=option))
    assert store.read(tmp_path / "out")["collective"].unique().to_list() == [expected]


def test_unknown_collective_asks_for_the_option(tmp_path: Path) -> None:
    log = tmp_path / "run1.log"
    log.write_text("1048576 32768 float none -1 100.0 10.49 9.18 0 102.0 10.28 9.00 0\n")
    with pytest.raises(OutputError, match=r"name it with --collective \(one of Broadcast"):
        import_files([log], tmp_path / "out", options=ImportOptions(system="s"))


def test_program_that_is_no_collective_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "run1.log"
    log.write_text(WHOLE.replace("all_reduce_perf", "hypercube_perf"))
    with pytest.raises(OutputError, match="does not say which collective"):
        import_files([log], tmp_path / "out", options=ImportOptions(system="s"))


def test_requested_config_from_command_and_log() -> None:
    command = (
        "mpirun -np 8 -x NCCL_ALGO=Tree -x NCCL_BUFFSIZE=8388608 -x TOKEN=x ./all_reduce_perf\n"
    )
    info = "n1:1:1 [0] NCCL INFO NCCL_PROTO set by environment to simple\n"
    row = parse(command + WHOLE.replace(NAMES, info + NAMES)).rows[0]
    assert (row["requested_algorithm"], row["requested_protocol"]) == ("Tree", "Simple")
    assert row["is_default"] is False
    assert row["launch_profile"] == "buffsize=8388608"


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


def test_blocking_and_aggregation_are_launch_profiles() -> None:
    text = START.replace("maxBytes 64", "maxBytes 64 step: 2(factor) agg iters: 4 graph: 0")
    text += "# Blocking Enabled: wait and barrier after each inner iteration\n"
    row = parse(text + RANKS + NAMES + ROW_1M).rows[0]
    assert row["launch_profile"] == "agg_iters=4,blocking"


def test_rows_of_size_zero_are_counted_and_dropped(tmp_path: Path) -> None:
    zero = "0 0 float sum -1 1.63 0.00 0.00 N/A 1.38 0.00 0.00 N/A\n"
    log = tmp_path / "zero.log"
    log.write_text(NAMES + zero * 5 + ROW_1M)
    summary = import_files([log], tmp_path / "out", options=ImportOptions(system="s"))
    assert (summary.rows_read, summary.measurements_written, summary.dropped) == (6, 2, 5)


def test_half_without_a_time_gives_no_measurement() -> None:
    row = "1048576 262144 float sum -1 100.0 10.49 18.35 0 N/A N/A N/A N/A\n"
    assert times(parse(NAMES + row)) == [100.0]
    one_gpu = "4194304 1048576 float sum -1 5.60 748.98 0.00 0 0.10 43046 0.00 N/A\n"
    assert times(parse(NAMES + one_gpu, Collective.AllReduce)) == [5.6, 0.1]


def test_undecodable_bytes_do_not_stop_the_import(tmp_path: Path) -> None:
    log = tmp_path / "allreduce.log"
    log.write_bytes(b"\xff\xfe\x00caf\xe9\n" + WHOLE.encode())
    summary = import_files([log], tmp_path / "out", options=ImportOptions(system="s"))
    assert summary.measurements_written == 4


def test_one_bad_file_among_two_is_named(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.log", tmp_path / "bad.log"
    good.write_text(WHOLE)
    bad.write_text("nothing\n")
    with pytest.raises(ImportFailed, match=r"bad\.log holds no row.*4 measurements of 1 other"):
        import_files([bad, good], tmp_path / "out", options=ImportOptions(system="s"))
    assert store.read(tmp_path / "out").height == 4


def test_cpu_time_is_refused() -> None:
    output = parse(START + RANKS + NAMES.replace("time", "cputime") + ROW_1M)
    assert output.rows == []
    assert "cputime (-C)" in output.rejected[0].reason


def test_prefix_of_a_line_without_one_is_empty() -> None:
    assert strip_prefix("[1622510346.876958] [g0185:1:0] ucp UCX  WARN x")[0] == ""
