from pathlib import Path

import pytest

from tests.fakes.nvml.build import build_fake_nvml


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the fake libnvidia-ml.so.1."""
    return build_fake_nvml(tmp_path_factory.mktemp("nvml"))
