"""A Slurm cluster shared by all tests that need one; skips where none can be started."""

from collections.abc import Iterator

import pytest

from tests.cluster.slurm import Slurm, missing


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
