"""Fixtures of the tests of `serve`: the plugin, and the shell and artifact of the commands."""

from pathlib import Path

import pytest

from dynamiccl.serve.abi import TunerPlugin
from tests.cli.conftest import artifact_fixture as artifact_fixture  # noqa: PLC0414
from tests.cli.conftest import policy_fixture as policy_fixture  # noqa: PLC0414
from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414


@pytest.fixture(scope="session")
def plugin(plugin_path: Path) -> TunerPlugin:
    return TunerPlugin(plugin_path)
