"""Removes the user's own settings from the environment of the stand-in."""

import os

import pytest

from tests.collect.benchmark.stand_in import ROOT


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("NCCL_", "FAKE_", "DYNAMICCL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
