"""Layouts known from public issues, with invented numbers; outputs of several runs, some failed."""

import random
from itertools import product
from pathlib import Path

import pytest

from dynamiccl.collect import nccl_tests
from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.datasets import store
from dynamiccl.errors import OutputError
from dynamiccl.nccl import Collective
from tests.collect.parsed import INPUTS, Parsed, imported, parse
from tests.published import COPIES, WHOLE, published

START = "# Collective test starting: all_reduce_perf\n# nThread 1 nGpus 8 minBytes 8 maxBytes 64\n"
RANKS = "".join(
    f"#  Rank {r} Group 0 Pid 7 on n1 device {r} [0000:0{r}:00] H100\n" for r in range(8)
)
HALF = "time  algbw  busbw  #wrong"
NAMES = f"#       size  count  type  redop  root  {HALF}  {HALF}\n"
ROW_1M = "  1048576  262144  float  sum  -1  100.0  10.49  18.35  0  102.0  10.28  17.99  0\n"
ROW_2M = "  2097152  524288  float  sum  -1  150.0  13.98  24.47  0  151.0  13.89  24.30  0\n"
TAIL = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 20.0\n#\n"
PRINTED = START + RANKS + NAMES + ROW_1M + ROW_2M + TAIL
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


def test_halves_without_a_time_and_wrong_values_of_a_run() -> None:
    none = parse(PRINTED.replace("102.0  10.28  17.99", "N/A  N/A  N/A"))
    assert times(none) == [100.0, 150.0, 151.0]
    output = parse(PRINTED.replace("values : 0 OK", "values : 248 FAILED"))
    assert {row["reason"] for row in output.rows} == {"the run reports 248 values out of bounds"}


def test_torn_rows_and_other_times_are_reported_and_not_taken() -> None:
    info = "n1:1:1 [0] NCCL INFO 131072 Bytes -> Algo 0 proto 1 time 51.603912\n"
    torn = "[0]  2097152  524288  float  sum  -1" + info + "[0]     150.0  13.98  24.47  0\n"
    body = "".join("[0] " + line + "\n" for line in (START + RANKS + NAMES + ROW_1M).splitlines())
    output = parse(body + torn)
    assert times(output) == [100.0, 102.0]
    assert [reject.line for reject in output.rejected] == [13, 14]
    assert all("torn row" in reject.reason for reject in output.rejected)
    # Milliseconds of 2018, and CPU times.
    of_2018 = (
        "     bytes  N  type  op  time  algbw  busbw  res  time  algbw  busbw  res\n"
        "   1048576  262144  float  sum  0.410  2.56  4.48  0e+00  0.420  2.50  4.37  0e+00\n"
    )
    for text in (of_2018, NAMES.replace("time", "cputime") + ROW_1M):
        output = parse(START + RANKS + text)
        assert output.rows == []
        assert "-C prints cputime, no time" in output.rejected[0].reason


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


def test_several_processes_or_no_collective_are_refused(tmp_path: Path) -> None:
    lines = (START + NAMES + ROW_1M).splitlines()
    tagged = "".join(f"{rank}: {line}\n" for line in lines for rank in (0, 1))
    for mixed in ((START + NAMES) * 2 + ROW_1M + ROW_1M + TAIL + TAIL, tagged):
        assert "several processes wrote into one output" in refusal(mixed, tmp_path)
    found = refusal(AMBIGUOUS, tmp_path, "broadcast.log")
    assert "name it with --collective (AllGather or" in found
    found = refusal(PRINTED.replace("all_reduce_perf", "hypercube_perf"), tmp_path)
    assert "'hypercube' is no collective of NCCL's" in found


def test_ranks_that_the_output_does_not_tell_are_left_out() -> None:
    for old, new, why in (
        ("Rank 3 Group", "Rank Group", "the list of ranks is not complete"),
        ("Rank 3 Group 0", "Rank 3 Group 1", "several communicators"),
        ("Rank 7", "Frank 7", "7 would make busbw"),
        (RANKS, "", "the output lists none; say --ranks, --nodes"),
    ):
        output = parse(PRINTED.replace(old, new))
        assert not any(name in row for row in output.rows for name in ("num_ranks", "num_nodes"))
        assert any(why in remark for remark in output.remarks)


def test_ranks_on_one_gpu_leave_nodes_open() -> None:
    for bus_id, hosts, nodes in [("0009:01:00", 8, 8), ("0x01", 4, None), ("0000:02:00", 4, None)]:
        row = "#  Rank {0} Group 0 Pid {0} on n{1} device 0 [{2}] GH200\n"
        ranks = "".join(row.format(rank, rank % hosts, bus_id) for rank in range(8))
        output = parse(PRINTED.replace(RANKS, ranks))
        assert {(row["num_ranks"], row.get("num_nodes")) for row in output.rows} == {(8, nodes)}
        assert any("ranks show the same GPU" in each for each in output.remarks) == (nodes is None)


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


def test_what_the_output_tells_twice_is_left_out() -> None:
    lines = "".join(
        f"n1:1:1 [0] NCCL INFO AllReduce: {size} Bytes -> Algo {algorithm} proto SIMPLE "
        "channel{Lo..Hi}={0..7}\n"
        for size, algorithm in ((1048576, "RING"), (2097152, "RING"), (2097152, "TREE"))
    )
    output = parse(START + RANKS + NAMES + lines + ROW_1M + ROW_2M)
    assert [row.get("actual_algorithm") for row in output.rows] == ["Ring", "Ring", None, None]
    assert [row["verified"] for row in output.rows] == [True, True, False, False]
    assert any("disagrees, at sizes 2097152" in remark for remark in output.remarks)
    output = parse(PRINTED.replace("[0000:07:00] H100", "[0000:07:00] H200"))
    assert {row.get("gpu") for row in output.rows} == {None}
    assert "GPU model left out: the output names several (H100, H200)" in output.remarks


def test_long_outputs_become_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_tests, "CHUNK_ROWS", 3)
    monkeypatch.setattr(nccl_tests, "_PART_ROWS", 5)
    summary, rows = imported(tmp_path / "a.log", PRINTED * 2)
    assert (len(summary.files[0].parts), summary.sums["measurements_written"]) == (2, 8)
    found = [(row["run"][-2:], row["time_us"], row["repeat"]) for row in rows]
    times_us = (100.0, 102.0, 150.0, 151.0)
    assert found == [(run, time_us, 0) for run in (".1", ".2") for time_us in times_us]


CASES = COPIES / "public-cases"


def cases() -> list[list[str]]:
    """File, shape and runs of each line of the README's table."""
    lines = (CASES / "README.md").read_text().splitlines()
    return [line.strip("| ").split(" | ") for line in lines if ".log |" in line]


def case(name: str) -> Path:
    """The file; skips the test where it is not here."""
    copy = CASES / name
    return copy if copy.is_file() else published(WHOLE / "public-cases" / name)


def told(row: dict[str, object]) -> str:
    asked = "own" if row["is_default"] else row["requested_algorithm"] or "?"
    profile = "" if row["launch_profile"] == "default" else f" [{row['launch_profile']}]"
    time = "failed" if row["time_us"] is None else f"{row['time_us']:.0f} us"
    assert row["status"] == ("failed" if row["time_us"] is None else "ok")
    return f"{row['collective']} {asked}{profile} {time}"


@pytest.mark.parametrize(("name", "shape", "runs"), cases(), ids=lambda text: str(text)[:30])
def test_each_run_is_what_it_was(name: str, shape: str, runs: str, tmp_path: Path) -> None:
    log, options = case(name), ImportOptions(system="s")
    if runs.startswith("refused: "):
        with pytest.raises(OutputError) as caught:
            import_files([log], tmp_path, options=options)
        assert runs.removeprefix("refused: ") in str(caught.value)
        return
    summary = import_files([log], tmp_path, options=options)
    frame = store.read(tmp_path).sort("source_line", "in_place")
    # In place and out of place were the same in nearly all of these cases.
    rows = frame.unique("run", keep="first", maintain_order=True).to_dicts()
    assert "; ".join(map(told, rows)) == runs
    assert frame["repeat"].unique().to_list() == [0]
    found = {f"{row['num_ranks'] or '?'} x {row['num_nodes'] or '?'}" for row in rows}
    assert found == {shape}
    assert not any("several" in remark for remark in summary.files[0].remarks)


def test_a_run_that_failed_before_its_first_row_is_told(tmp_path: Path) -> None:
    text = (CASES / "failed_algo_then_ok.log").read_text()
    summary, _ = imported(tmp_path / "failed.log", text)
    [told] = [text for text in summary.files[0].remarks if "failed" in text]
    assert told.startswith("line 9: a run failed before its first row: n1: Test NCCL failure")


@pytest.mark.parametrize(
    ("sizes", "ends", "failed"),
    [
        ("maxBytes 4194304 step: 2(factor)", "Test NCCL failure common.cu:401", [2 << 20]),
        ("maxBytes 4194304 step: 1024(bytes)", "mpirun noticed that", [(1 << 20) + 1024]),
        ("maxBytes 4194304", "Killed", [2 << 20]),
        ("maxBytes 1048576 step: 2(factor)", "Test NCCL failure", []),  # all rows are there
        ("maxBytes 4194304 step: 2(factor)", "# Avg bus bandwidth : 9\nKilled", []),
        ("maxBytes 4194304 step: 2(factor)", "", []),  # it may go on
    ],
)
def test_a_run_that_failed_behind_a_row_failed_at_the_next_size(
    sizes: str, ends: str, failed: list[int], tmp_path: Path
) -> None:
    text = "\n".join(["$ NCCL_ALGO=Tree ./all_reduce_perf", *output(80)[:-1], ends])
    summary, rows = imported(tmp_path / "log", text.replace("maxBytes 1048576", sizes))
    bad = [row for row in rows if row["status"] != "ok"]
    assert [row["size_bytes"] for row in bad] == failed
    assert {(row["status"], row["requested_algorithm"], row["reason"]) for row in bad} <= {
        ("failed", "Tree", ends)
    }
    assert len(rows) == 2 + len(failed)
    assert {row["reason"] for row in rows if row["status"] == "ok"} == {None}
    told = f", at {failed[0]} bytes: {ends}" if failed else "failed, at"
    assert (told in "".join(summary.files[0].remarks)) == bool(failed)


def test_a_run_without_an_end_failed_where_another_follows(tmp_path: Path) -> None:
    sizes = "maxBytes 4194304 step: 2(factor)"
    cut = ["$ NCCL_ALGO=Tree ./all_reduce_perf", *output(80)[:-1]]
    text = "\n".join([*cut, "$ NCCL_ALGO=Ring ./all_reduce_perf", *output(70)[:-1]])
    summary, rows = imported(tmp_path / "log", text.replace("maxBytes 1048576", sizes))
    bad = [(row["requested_algorithm"], row["size_bytes"]) for row in rows if row["reason"]]
    assert bad == [("Tree", 2 << 20)]
    assert "nothing from 2097152 bytes on: taken as going on" in "".join(summary.files[0].remarks)


def test_what_is_said_between_runs_is_of_the_second(tmp_path: Path) -> None:
    first, second = (CASES / "export_persists.log").read_text().rsplit("$ ./all", 1)
    header = second.split("\n", 1)[1]
    destroyed = "n1:7:7 [0] NCCL INFO comm 0x1 rank 0 nranks 4 - Destroy COMPLETE\n"
    first = first.replace("# Using", "NCCL version 2.26.2\n# Using")
    text = f"{first}{destroyed}NCCL version 2.27.3+cuda12.4\n{header}"
    _, rows = imported(tmp_path / "two.log", text)
    found = [(row["nccl_version"], row["time_us"]) for row in rows if not row["in_place"]]
    assert found == [("2.26.2", 80.0), ("2.27.3", 81.0)]


def output(time_us: int) -> list[str]:
    """What 4 ranks print, in place 10 us slower; of 0 us the header alone, below it a row."""
    if time_us < 0:
        return output(-time_us)[-2:-1]
    ranks = [f"# Rank {r} Pid 7 on n1 device {r} [0000:0{r}:00] H" for r in range(4)]
    names = "# size count type redop root" + 2 * " time algbw busbw #wrong"
    sides = [(t, (1 << 20) / t / 1e3) for t in (time_us, time_us + 10) if time_us]
    half = [f"{t}.00 {algbw:.2f} {1.5 * algbw:.2f} 0" for t, algbw in sides]
    rows = [f"1048576 262144 float sum -1 {' '.join(half)}", "# Avg bus bandwidth : 9"]
    head = ["# nThread 1 nGpus 4 minBytes 1048576 maxBytes 1048576", *ranks, names]
    return [*head, *rows] if time_us else head


@pytest.mark.parametrize(("shown", "wanted"), INPUTS["shown_runs"])
def test_runs_are_what_the_lines_around_them_say(shown: str, wanted: str, tmp_path: Path) -> None:
    each = [line.replace("AR", "./all_reduce_perf") for line in shown.split(" / ")]
    lines = [output(int(line[1:])) if line[0] == "@" else [line] for line in each]
    text = "\n".join(line for part in lines for line in part)
    _, rows = imported(tmp_path / "runs.log", text)
    rows.sort(key=lambda row: (row["run"], bool(row["in_place"])))
    runs = {row["run"]: row for row in reversed(rows)}
    assert "; ".join(map(told, reversed(runs.values()))).replace("AllReduce ", "") == wanted


def typed(draw: random.Random, env: dict[str, str]) -> tuple[list[str], str | None]:
    """Lines up to a command, and the algorithm that it has; `env` is what is exported."""
    run, algo = "./all_reduce_perf -b 1M", draw.choice(["Ring", "Tree"])
    kinds = {
        "plain": [run],
        "export": [f"export NCCL_ALGO={algo}", run],
        "late": [f"NCCL_ALGO={algo}", "export NCCL_ALGO", run],
        "unset": [f"export NCCL_ALGO={algo}", "unset NCCL_ALGO", run],
        "without": [f"env -u NCCL_ALGO {run}"],
        "comment": [f"# export NCCL_ALGO={algo}", f"#NCCL_ALGO={algo}", run],
        "never": ['if [ "$1" = x ]; then', f"  export NCCL_ALGO={algo}", "fi", run],
        "subshell": [f"(export NCCL_ALGO={algo}; make)", run],
        "inline": [f"NCCL_ALGO={algo} {run}"],
        "mpirun": ["mpirun -np 4 \\", f"  -x NCCL_ALGO={algo} \\", f"  {run}"],
        "loop": [f'for a in "{algo}"; do NCCL_ALGO=$a {run}; done'],
        "banner": [f"=== NCCL_ALGO={algo} ===", f"NCCL_ALGO=$X {run}"],
    }
    kind = draw.choice([*kinds])
    if kind in {"export", "late"}:
        env["NCCL_ALGO"] = algo
    elif kind == "unset":
        env.clear()
    lines = [draw.choice(["", "$ ", "me@n1:~$ "]) + line for line in kinds[kind]]
    if kind in {"export", "late", "unset"} and draw.random() < 0.3:
        lines.pop()  # the command is not shown
    if kind in {"inline", "mpirun", "loop", "banner"}:
        return lines, algo
    return lines, None if kind == "without" else env.get("NCCL_ALGO")


@pytest.mark.parametrize("seed", range(40))
def test_nothing_wrong_is_said_of_a_run(seed: int, tmp_path: Path) -> None:
    draw, env, truths, lines = random.Random(seed), dict[str, str](), list[str | None](), [""]
    for number in range(5):
        shown, algorithm = typed(draw, env)
        truths.append(algorithm)
        if number and "export" in shown[0] and draw.random() < 0.5:
            # Printed too early, among the last lines of the run before.
            lines.insert(len(lines) - draw.randrange(4), shown.pop(0))
        whole = output(50 + number)
        ends = (whole, whole, whole[:-1], whole[2:], [*whole[:4], "Killed"], whole[:6], whole * 2)
        lines += [*shown, *draw.choice(ends)]
    try:
        _, rows = imported(tmp_path / "runs.log", "\n".join([*lines, ""]))
    except OutputError:
        return  # nothing of it is taken, which is said
    for row in (row for row in rows if row["status"] == "ok" and not row["in_place"]):
        is_known = row["is_default"] or row["requested_algorithm"] is not None
        truth = truths[int(row["time_us"]) - 50]
        assert not is_known or row["requested_algorithm"] == truth, "\n".join(lines)


def test_what_a_files_name_says_is_not_known(tmp_path: Path) -> None:
    for name, forced in (("ar_tree_ll", None), ("tree", "Tree")):
        (tmp_path / name).mkdir()
        log = tmp_path / name / f"{name}.log"
        _, rows = imported(log, "\n".join(output(50)), algorithm=forced)
        found = {(row["is_default"], row["requested_algorithm"]) for row in rows}
        assert found == {(False, forced)}


def test_releases_that_contradict_are_not_filled(tmp_path: Path) -> None:
    old, new = "NCCL version 2.18.5+cuda12.2", "NCCL version 2.20.5+cuda12.4"
    tables = [output(50)[:-1], output(60)[:-1], [*output(70)[:5], old, *output(70)[5:]]]
    text = "\n".join([old, *tables[0], new, *tables[1], "", new, *tables[2]])
    _, rows = imported(tmp_path / "runs.log", text, nccl_version="2.29.7")
    found = {row["run"]: row["nccl_version"] for row in rows}
    assert [*found.values()] == ["2.18.5", "2.20.5", None]
