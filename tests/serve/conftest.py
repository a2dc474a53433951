"""Fixtures of the tests of `serve`: the plugin, and the shell and artifact of the commands."""

from pathlib import Path

import pytest

from dynamiccl.serve.abi import TunerPlugin
from dynamiccl.serve.artifact import Artifact
from tests.cli.conftest import artifact_fixture as artifact_fixture  # noqa: PLC0414
from tests.cli.conftest import policy_fixture as policy_fixture  # noqa: PLC0414
from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414
from tests.serve.brains import make_artifact


@pytest.fixture(scope="session")
def plugin(plugin_path: Path) -> TunerPlugin:
    return TunerPlugin(plugin_path)


@pytest.fixture(scope="session")
def small_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """One whose policy has random weights and looks at the history."""
    return make_artifact(tmp_path_factory.mktemp("small"))
