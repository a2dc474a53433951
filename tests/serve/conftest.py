"""Fixtures of the tests of `serve`: the plugin, and the shell and artifact of the commands."""

import subprocess
from pathlib import Path

import pytest

from dynamiccl.serve.artifact import Artifact
from tests.cli.conftest import artifact_fixture as artifact_fixture  # noqa: PLC0414
from tests.cli.conftest import exported_fixture as exported_fixture  # noqa: PLC0414
from tests.cli.conftest import policy_fixture as policy_fixture  # noqa: PLC0414
from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414
from tests.serve.abi import TunerPlugin
from tests.serve.brains import make_artifact


@pytest.fixture(scope="session")
def plugin(plugin_path: Path) -> TunerPlugin:
    """The tuner of jobs."""
    return TunerPlugin(plugin_path)


@pytest.fixture(name="libnccl", scope="session")
def libnccl_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fake libnccl with version 2.28.9."""
    folder = tmp_path_factory.mktemp("nccl")
    source = folder / "nccl.c"
    source.write_text("int ncclGetVersion(int *version) { *version = 22809; return 0; }\n")
    library = folder / "libnccl.so.2"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.fixture(scope="session")
def small_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """One whose policy has random weights and looks at the history."""
    return make_artifact(tmp_path_factory.mktemp("small"))
