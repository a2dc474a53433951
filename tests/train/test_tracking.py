"""MLflow behind our own functions: where runs go."""

from pathlib import Path

import pytest

from dynamiccl.train import DEFAULT_TRACKING_URI
from dynamiccl.train.tracking import reopen_run, start_run
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
