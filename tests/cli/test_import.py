"""`dynamiccl-collect import`: what people are told, and directories."""

from pathlib import Path

from tests.cli.conftest import LOG_ROW, Shell, refused

HEAD = "# Collective test starting: all_reduce_perf\n# nThread 1 nGpus 8 minBytes 8 maxBytes 64\n"
IMPORT = ("dynamiccl-collect", "import", "--out", "data", "--system", "box")


def test_people_are_told_what_json_says(shell: Shell, tmp_path: Path) -> None:
    wrong = LOG_ROW.replace(" 0 102.0", " 3 102.0")
    (tmp_path / "a.log").write_text(HEAD + wrong)
    (tmp_path / "allgather.log").write_text(
        "1048576 32768 float none -1 100.0 10.49 9.18 0 102.0 10.28 9.00 0\n"
    )
    told = shell(*IMPORT, "a.log", "allgather.log")
    assert told.code == 0
    assert "a.log: 1 measurements had wrong values" in told.err
    assert "a.log (and 1 more files): the output shows no NCCL_* setting: taken as" in told.err
    assert "with --algorithm, --protocol, --channels)" in told.err
    assert "collective AllGather taken from the file's name" in told.err
    assert "were there already" not in told.out
    again = shell(*IMPORT, "a.log", "allgather.log")
    assert "4 measurements written; 4 were there already" in again.out


def test_a_directory_stands_for_the_files_in_it(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "logs" / "deep").mkdir(parents=True)
    (tmp_path / "logs" / "deep" / "a.log").write_text(HEAD + LOG_ROW)
    (tmp_path / "logs" / "b.csv").write_text(
        "collective,size_bytes,time_us\nallreduce,2097152,140\n"
    )
    (tmp_path / "logs" / "notes.txt").write_text("remember the milk\n")
    (tmp_path / "logs" / "systems.toml").write_text("[systems.box]\nnic_gbits_per_s = 400\n")
    told = shell(*IMPORT, "logs", "--systems", "logs/systems.toml")
    assert told.out.startswith("2 rows read, 3 measurements written")
    assert "systems.toml" not in told.err
    assert "logs/notes.txt: left alone, no kind that is known" in told.err
    (tmp_path / "empty").mkdir()
    why = refused(shell(*IMPORT, "empty"), 2)
    assert "empty: no nccl-tests output, CSV," in why
    assert "leaves *.dcc files, and none is there" in why


def test_only_the_first_lines_are_shown(shell: Shell, tmp_path: Path) -> None:
    names = ["a", "aa", "aaa", "aaaa", "aaaaa"]
    for name in names:
        rows = "".join(f"allreduce,{size},100\n" for size in (len(name), *"vwxyz"))
        (tmp_path / f"{name}.csv").write_text(f"collective,size_bytes,time_us\n{rows}")
    told = shell(*IMPORT, *(f"{name}.csv" for name in names))
    assert "5 measurements written, 0 dropped, 0 duplicates, 25 rejected" in told.out
    assert told.err.count(": size_bytes: Input should be a valid integer") == 20
    assert told.err.endswith("... and 6 more (with --json)\n")
