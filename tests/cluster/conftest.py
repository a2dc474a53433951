"""A Slurm cluster shared by all tests that need one; skips where none can be started."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm, missing
from tests.fakes.nccl_tests.install import install_stand_in


@pytest.fixture(scope="session")
def running_slurm() -> Iterator[Slurm]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    slurm = Slurm()
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


@pytest.fixture
def slurm(running_slurm: Slurm) -> Iterator[Slurm]:
    """The cluster with all nodes up and no job, before and after the test."""
    yield running_slurm
    running_slurm.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the stand-in for nccl-tests in `bin`."""
    install_stand_in(tmp_path / "bin")
    yield tmp_path
    shutil.rmtree(tmp_path / "out" / ".journal", ignore_errors=True)
