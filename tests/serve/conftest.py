from pathlib import Path

import pytest

from dynamiccl.serve.abi import TunerPlugin
from dynamiccl.serve.artifact import Artifact
from tests.serve.brains import make_artifact


@pytest.fixture(scope="session")
def plugin(plugin_path: Path) -> TunerPlugin:
    return TunerPlugin(plugin_path)


@pytest.fixture(scope="session")
def small_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """One whose policy has random weights and looks at the history."""
    return make_artifact(tmp_path_factory.mktemp("small"))
