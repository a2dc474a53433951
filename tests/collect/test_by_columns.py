"""The collective of an output that does not name it, by its columns and bandwidths."""

import shutil
from pathlib import Path

import pytest

from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.collect.nccl_tests import parse_text
from dynamiccl.datasets import store
from dynamiccl.errors import OutputError
from dynamiccl.nccl import Collective
from tests.collect.test_text_layouts import NAMES, ROW_1M

LOGS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "logs"
OLD = "#  size count type {}time algbw busbw error time algbw busbw error\n"


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        (
            "root ",
            "1048576 262144 float 0 100.0 10.49 10.49 N/A 102.0 10.28 10.28 N/A",
            "Broadcast",
        ),
        (
            "redop root ",
            "1048576 262144 float sum 0 100.0 10.49 10.49 N/A 102.0 10.28 10.28 N/A",
            "Reduce",
        ),
        (
            "redop ",
            "1048576 262144 float sum 100.0 10.49 9.18 N/A 102.0 10.28 9.00 N/A",
            "ReduceScatter",
        ),
        (
            "redop ",
            "1048576 262144 float sum 100.0 10.49 18.35 N/A 102.0 10.28 18.00 N/A",
            "AllReduce",
        ),
    ],
)
def test_collective_follows_from_the_columns(
    columns: str, row: str, expected: str, tmp_path: Path
) -> None:
    log = tmp_path / "run1.log"
    log.write_text(OLD.format(columns) + row + "\n")
    summary = import_files([log], tmp_path / "out", options=ImportOptions(system="s"))
    assert store.read(tmp_path / "out")["collective"].unique().to_list() == [expected]
    assert f"collective {expected} follows from the columns" in summary.files[0].remarks


def test_option_that_the_columns_contradict_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "run1.log"
    log.write_text(NAMES + ROW_1M)
    options = ImportOptions(system="s", collective="Broadcast")
    with pytest.raises(OutputError, match="columns are of AllReduce, not of Broadcast; leave --c"):
        import_files([log], tmp_path / "out", options=options)
    assert not (tmp_path / "out").exists()


def test_file_name_that_the_columns_contradict_is_not_believed(tmp_path: Path) -> None:
    log = tmp_path / "broadcast.log"
    log.write_text("1048576 32768 float none -1 100.0 10.49 9.18 0 102.0 10.28 9.00 0\n")
    with pytest.raises(OutputError, match="does not say which collective"):
        import_files([log], tmp_path / "out", options=ImportOptions(system="s"))


@pytest.mark.parametrize("name", ["broadcast", "reduce", "allreduce"])
def test_real_logs_without_a_name_are_known_by_their_columns(name: str, tmp_path: Path) -> None:
    real = LOGS / f"superbenchmark_{name}.log"
    if not real.is_file():
        pytest.skip("the real logs are not here")
    log = tmp_path / "a.log"
    shutil.copy(real, log)
    import_files([log], tmp_path / "out", options=ImportOptions(system="s"))
    assert store.read(tmp_path / "out")["collective"].str.to_lowercase().unique().to_list() == [
        name
    ]


def test_a_caller_who_started_the_program_is_believed() -> None:
    """As a sweep is: its output may have the columns of a release that nobody knows yet."""
    found = parse_text(NAMES + ROW_1M, where="doc", collective=Collective.Broadcast)
    assert {row["collective"] for row in found.rows} == {"Broadcast"}
