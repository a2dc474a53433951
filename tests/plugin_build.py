"""The plugin and its C++ tests, built once a session, for every test that needs them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from dynamiccl.serve.build import PLUGIN_NAME, build_plugin

BUILDS = Path(__file__).resolve().parents[1] / "out" / "test-plugin"


@cache
def built(sanitize: str = "") -> Path:
    """The build directory with the plugin and its C++ tests, built once a session, incrementally.

    Under out/ rather than a temporary directory: unchanged sources are then not compiled again.
    """
    name = {"": "plain", "address,undefined": "asan", "thread": "tsan"}[sanitize]
    return build_plugin(BUILDS / name, sanitize=sanitize, tests=True).parent


@cache
def built_with_torch() -> Path:
    """The build directory that has the TorchScript runtime as well, built once a session."""
    return build_plugin(BUILDS / "torch", tests=True, torch=True).parent


@pytest.fixture(scope="session")
def torch_build_dir() -> Path:
    return built_with_torch()


@pytest.fixture(scope="session")
def build_dir() -> Callable[[str], Path]:
    return built


@pytest.fixture(scope="session")
def plugin_path() -> Path:
    return built() / PLUGIN_NAME
