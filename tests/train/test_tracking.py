"""MLflow behind our own functions: where runs go."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dynamiccl.train import DEFAULT_TRACKING_URI
from dynamiccl.train.tracking import Run, open_run, reopen_run, start_run
from tests.stores import new_store, uri_of


def test_the_default_store_is_that_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each in turn, in one process: a notebook's, or a test's."""
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        new_store(folder)
        monkeypatch.chdir(folder)
        with start_run(DEFAULT_TRACKING_URI, "where", name) as run:
            pass
        assert reopen_run(uri_of(folder), run.run_id).directory == run.directory
        assert run.directory is not None
        assert run.directory.is_relative_to(folder)


def test_trials_that_log_the_same_data_at_once_all_do(tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    runs = [open_run(uri, "study", f"trial {number}") for number in range(4)]
    together = threading.Barrier(len(runs))

    def log(run: Run, digest: str) -> None:
        together.wait()
        run.log_data(str(tmp_path), digest)

    with ThreadPoolExecutor(len(runs)) as pool:
        for number in range(3):
            list(pool.map(log, runs, [f"{number:012x}"] * len(runs)))
