from pathlib import Path

import pytest

from dynamiccl.serve.abi import TunerPlugin


@pytest.fixture(scope="session")
def plugin(plugin_path: Path) -> TunerPlugin:
    return TunerPlugin(plugin_path)
