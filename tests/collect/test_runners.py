"""Which library a sweep is played by."""

from pathlib import Path

import pytest

from dynamiccl.collect.runners import find_plugin
from dynamiccl.errors import MissingPath, UserError
from dynamiccl.libraries import JOB_NAMES, SWEEP_NAME
from tests.collect.benchmark.sweeps import sweep


def test_a_sweep_takes_the_library_that_it_names(tmp_path: Path) -> None:
    named = tmp_path / SWEEP_NAME
    file = sweep(runner=f'{{ plugin = "{named}" }}').file
    with pytest.raises(MissingPath, match=r"runner\.plugin"):
        find_plugin(file)
    named.touch()
    assert find_plugin(file) == named


@pytest.mark.parametrize("name", JOB_NAMES)
def test_a_jobs_library_plays_no_sweep(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"is for jobs and plays no schedule; name {SWEEP_NAME}"):
        find_plugin(sweep(runner=f'{{ plugin = "{tmp_path / name}" }}').file)
