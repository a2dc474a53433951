"""The build of the plugin and its C++ tests, once a session."""

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from dynamiccl.libraries import ADAPTIVE_NAME, SWEEP_NAME, TUNER_NAME
from dynamiccl.serve.build import build_plugin
from tests.once import locked

BUILDS = Path(__file__).resolve().parents[1] / "out" / "test-plugin"
#: The tuner alone; the rest of a sanitized build is for soak tests.
TUNER_TARGET = ("nccl-tuner-dynamiccl",)
#: What a build may be checked by, and the name of its directory.
SANITIZERS = {"": "plain", "address,undefined": "asan", "thread": "tsan"}


@cache
def built(sanitize: str = "", targets: tuple[str, ...] = ()) -> Path:
    """The build directory with the plugin and its C++ tests, built once a session, incrementally.

    Under out/ rather than a temporary directory: unchanged sources are then not compiled again.
    The plain build has the TorchScript runtime too, where there is torch.
    """
    name = SANITIZERS[sanitize]
    torch = not sanitize and importlib.util.find_spec("torch") is not None
    with locked(BUILDS / f"{name}.lock"):
        options = ("-DDYNAMICCL_TESTS=ON", f"-DDYNAMICCL_SANITIZE={sanitize}")
        return build_plugin(BUILDS / name, *options, torch=torch, targets=targets).parent


@pytest.fixture(scope="session")
def torch_build_dir() -> Path:
    pytest.importorskip("torch", reason="torch is not installed: no TorchScript runtime")
    return built()


@pytest.fixture(scope="session")
def build_dir() -> Callable[[str], Path]:
    return built


@pytest.fixture(scope="session")
def plugin_path() -> Path:
    """Path of the tuner of jobs; the other libraries are beside it."""
    return built() / TUNER_NAME


@pytest.fixture(scope="session")
def sweep_path(plugin_path: Path) -> Path:
    return plugin_path.with_name(SWEEP_NAME)


@pytest.fixture(scope="session")
def adaptive_path(plugin_path: Path) -> Path:
    return plugin_path.with_name(ADAPTIVE_NAME)


if __name__ == "__main__":
    built(targets=("all", "bench"))
