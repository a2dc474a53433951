"""The benchmark of NCCL's default: its bar where the record is, a clear word where it is not."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

from dynamiccl.errors import MissingPath

ROOT: Final = Path(__file__).parents[2]
DATA: Final = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not here")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("simulator_default")


@needs_data
def test_default_agrees_on_95_of_100_decisions(benchmark: ModuleType) -> None:
    figures = benchmark.figures(DATA)
    assert figures["default_agreement"] >= 0.95
    assert figures["default_agreement_held_out"] >= 0.95
    assert (figures["default_decisions"], figures["default_decisions_held_out"]) == (925, 300)
    assert figures["default_read_back_agreement_rtx5090-sockets"] >= 0.95
    # Every figure of disagreement has its line.
    wrong = sum(
        round((1 - figures[f"default_{how}_agreement_{name}"]) * figures[key])
        for name, how in benchmark.SEEN.values()
        for key in [f"default_{how}_choices_{name}"]
    )
    wrong += round((1 - figures["default_channels_agreement"]) * 925)
    assert len(benchmark.disagreements(DATA)) == wrong


def test_missing_data_is_named(benchmark: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(MissingPath, match=r"nccl_default_decisions\.csv"):
        benchmark.figures(tmp_path)
