"""The nccl-tests binaries for tests on GPUs."""

import os
import shutil
from pathlib import Path

import pytest

from tests.fakes.nccl_tests.install import install_stand_in
from tests.gpu.ranks import STAND_IN


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of nccl-tests' programs, or of their stand-ins; skips where nothing can run."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    if STAND_IN:
        return install_stand_in(tmp_path_factory.mktemp("bin"))
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no NVIDIA driver: nothing was checked")
    #   NCCL_TESTS_DIR  tests/gpu: the folder of nccl-tests' programs.
    named = os.environ.get("NCCL_TESTS_DIR")
    if named is None:
        pytest.skip("say where nccl-tests was built: NCCL_TESTS_DIR=...")
    return Path(named).resolve()
