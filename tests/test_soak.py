"""What chooses soak tests: all are found, and a commit's slice begins where its hash says."""

import json
from pathlib import Path

import pytest

from tests import soak

NAMES = ["a.py::test_a", "b.py::test_b", "c.py::test_c"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The entries that are run; `c` fails."""
    found: list[str] = []

    def run_entry(name: str, *_: object) -> int:
        found.append(name)
        return int("test_c" in name)

    monkeypatch.setattr(soak, "run_entry", run_entry)
    monkeypatch.setattr(soak, "head", lambda: "4" * 40)
    monkeypatch.setattr(soak, "RUNS", tmp_path / "runs.json")
    return found


@pytest.mark.soak
def test_sanitized_jobs_are_entries_of_one_name() -> None:
    names = soak.entries(soak.ROOT / "tests" / "serve" / "jobs", "test_sanitized.py")
    assert "tests/serve/jobs/test_sanitized.py::test_a_job_is_clean" in names
    assert not any("[" in name for name in names)


def test_a_slice_begins_where_the_commit_says_and_leaves_out_what_does_not_fit(
    ran: list[str],
) -> None:
    begin = int("4" * 40, 16) % 3
    soak.RUNS.write_text(json.dumps({NAMES[(begin + 1) % 3]: {"seconds": 1000}}))
    soak.run_slice(NAMES, 240.0, seed=0)
    assert ran == [NAMES[begin], NAMES[(begin + 2) % 3]]


def test_a_whole_run_records_what_passed(
    ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert soak.run_all(NAMES, seed=7, seconds=3.0) == 1
    assert ran == NAMES
    runs = json.loads(soak.RUNS.read_text())
    assert list(runs) == NAMES[:2]
    assert (runs[NAMES[0]]["seed"], runs[NAMES[0]]["commit"]) == (7, "4" * 12)
    assert "2 passed, 1 failed" in capsys.readouterr().out


def test_the_lines_of_an_entry_that_was_not_done_are_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    monkeypatch.setattr("sys.executable", str(python))
    for script, limit_s, code, shown in (
        ("echo 1 passed", 60.0, 0, "1 passed\n"),
        ("echo no tests ran; exec sleep 60", 0.5, None, ""),
    ):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        assert soak.run_entry(NAMES[0], 0, 1.0, limit_s) == code
        assert capfd.readouterr().out == shown
