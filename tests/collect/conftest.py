import os
from pathlib import Path

import pytest

from tests.collect.benchmark.stand_in import Lab
from tests.fakes.nvml.build import build_fake_nvml

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the user's own settings; programs find this tree."""
    for name in [name for name in os.environ if name.startswith(("NCCL_", "FAKE_", "DYNAMICCL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def lab(tmp_path: Path, sweep_path: Path) -> Lab:
    return Lab(tmp_path, sweep_path)


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the fake libnvidia-ml.so.1."""
    return build_fake_nvml(tmp_path_factory.mktemp("nvml"))
