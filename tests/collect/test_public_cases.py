"""Outputs of several runs, with settings between them and runs that failed: a table of cases."""

from pathlib import Path

import pytest

from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.datasets import store
from dynamiccl.errors import OutputError
from tests.collect.parsed import INPUTS, imported
from tests.published import COPIES, WHOLE, published

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
    # Each launch has the settings of its own command: the shell's lines have no launcher's prefix.
    lines = text.splitlines()
    tagged = [line if line.startswith("$") else f"[1,0]<stdout>:{line}" for line in lines]
    (tmp_path / "tagged").mkdir()
    _, rows = imported(tmp_path / "tagged" / "runs.log", "\n".join(tagged))
    found = [(r["requested_algorithm"], r["num_ranks"], r["status"]) for r in rows]
    assert list(dict.fromkeys(found)) == [("NVLS", 4, "failed"), ("Ring", 4, "ok")]


def test_settings_that_the_shell_and_nccl_say_otherwise_are_not_known(tmp_path: Path) -> None:
    info = "n1:77:77 [0] NCCL INFO NCCL_ALGO set by environment to Ring\n# Using devices"
    text = (CASES / "export_persists.log").read_text().replace("# Using devices", info, 1)
    summary, rows = imported(tmp_path / "two.log", text)
    told = [(r["is_default"], r["requested_algorithm"], r["launch_profile"]) for r in rows]
    assert told == [(False, None, "algo=?")] * 2 + [(False, "Tree", "default")] * 2
    assert any("NCCL_ALGO cannot be read, or is two" in x for x in summary.files[0].remarks)


def test_what_nccl_says_between_two_runs_is_of_the_second(tmp_path: Path) -> None:
    first, second = (CASES / "export_persists.log").read_text().rsplit("$ ./all", 1)
    header = second.split("\n", 1)[1]
    destroyed = "n1:7:7 [0] NCCL INFO comm 0x1 rank 0 nranks 4 - Destroy COMPLETE\n"
    first = first.replace("# Using", "NCCL version 2.26.2\n# Using")
    text = f"{first}{destroyed}NCCL version 2.27.3+cuda12.4\n{header}"
    _, rows = imported(tmp_path / "releases.log", text)
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


@pytest.mark.parametrize(("name", "forced"), [("ar_tree_ll.log", None), ("tree.log", "Tree")])
def test_forced_runs_that_only_the_name_of_the_file_tells_are_not_known(
    name: str, forced: str | None, tmp_path: Path
) -> None:
    _, rows = imported(tmp_path / name, "\n".join(output(50)), algorithm=forced)
    told = {(row["is_default"], row["requested_algorithm"]) for row in rows}
    assert told == {(False, forced)}


def test_releases_that_contradict_each_other_are_not_filled_by_the_option(tmp_path: Path) -> None:
    old, new = "NCCL version 2.18.5+cuda12.2", "NCCL version 2.20.5+cuda12.4"
    tables = [output(50)[:-1], output(60)[:-1], [*output(70)[:5], old, *output(70)[5:]]]
    text = "\n".join([old, *tables[0], new, *tables[1], "", new, *tables[2]])
    _, rows = imported(tmp_path / "runs.log", text, nccl_version="2.29.7")
    found = {row["run"]: row["nccl_version"] for row in rows}
    assert [*found.values()] == ["2.18.5", "2.20.5", None]
