"""The plugin and its C++ tests, built once a session, for every test that needs them."""

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from dynamiccl.serve.build import PLUGIN_NAME, build_plugin
from tests.once import locked

BUILDS = Path(__file__).resolve().parents[1] / "out" / "test-plugin"
#: The thin tuner alone; the rest of a sanitized build is for soak tests.
THIN_TARGET = ("nccl-tuner-dynamiccl-thin",)


@cache
def built(sanitize: str = "", targets: tuple[str, ...] = ()) -> Path:
    """The build directory with the plugin and its C++ tests, built once a session, incrementally.

    Under out/ rather than a temporary directory: unchanged sources are then not compiled again.
    The plain build has the TorchScript runtime too, where there is torch.
    """
    name = {"": "plain", "address,undefined": "asan", "thread": "tsan"}[sanitize]
    torch = not sanitize and importlib.util.find_spec("torch") is not None
    with locked(BUILDS / f"{name}.lock"):
        return build_plugin(
            BUILDS / name, sanitize=sanitize, tests=True, torch=torch, targets=targets
        ).parent


@pytest.fixture(scope="session")
def torch_build_dir() -> Path:
    pytest.importorskip("torch", reason="torch is not installed: no TorchScript runtime")
    return built()


@pytest.fixture(scope="session")
def build_dir() -> Callable[[str], Path]:
    return built


@pytest.fixture(scope="session")
def plugin_path() -> Path:
    return built() / PLUGIN_NAME


if __name__ == "__main__":
    built(targets=("all", "benchmarks"))
