"""The plugin's benchmarks run; what they measure is their own affair (`make bench`)."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

BENCHMARKS: Final = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench_plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bench_plugin")


def test_ranks_of_the_benchmark_agree(
    bench_plugin: ModuleType, build_dir: Callable[[str], Path]
) -> None:
    figures = bench_plugin.agree(build_dir(""), 2, 2, 500)
    assert figures["agreed_ms"] > 0
    assert figures["agreed_at_call"] > 0
    assert 0 < figures["worker_private_kib"] < 10_000
