"""Fixtures of the tests of `serve`: the plugin, and the shell and artifact of the commands."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from dynamiccl.serve.artifact import Artifact, PluginIndex
from dynamiccl.serve.install import install
from tests.cli.conftest import artifact_fixture as artifact_fixture  # noqa: PLC0414
from tests.cli.conftest import exported_fixture as exported_fixture  # noqa: PLC0414
from tests.cli.conftest import policy_fixture as policy_fixture  # noqa: PLC0414
from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414
from tests.serve.abi import TunerPlugin, fake_nccl
from tests.serve.brains import make_artifact

MACHINE = "gpu=none*0;mig=0;nic=none*0"


@pytest.fixture(scope="session")
def plugin(plugin_path: Path) -> TunerPlugin:
    """The tuner of jobs."""
    return TunerPlugin(plugin_path)


@pytest.fixture(name="libnccl", scope="session")
def libnccl_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fake libnccl with version 2.28.9."""
    return fake_nccl(tmp_path_factory.mktemp("nccl") / "libnccl.so.2")


@pytest.fixture(scope="session")
def small_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """One whose policy has random weights and looks at the history."""
    return make_artifact(tmp_path_factory.mktemp("small"))


@pytest.fixture
def copied(small_artifact: Artifact, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(small_artifact.directory, tmp_path / "copy"))


@pytest.fixture(name="home")
def home_fixture(artifact: Path, plugin_path: Path, tmp_path: Path) -> Path:
    """An installation, whose artifact knows a made-up machine that has nothing."""
    PluginIndex.read(artifact).bound("box", f"{MACHINE};nccl=22809").write(artifact)
    (tmp_path / "machine").mkdir()
    return Path(install(artifact, tmp_path / "home", plugin_path)["directory"])


class Runner:
    """Runs `dynamiccl-run` on that machine, with an environment that is all its own."""

    def __init__(self, home: Path, shell: str = "sh") -> None:
        self.home, self._shell = home, shell
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(home.parent),
            "DYNAMICCL_TEST_ROOT": str(home.parent / "machine"),
        }

    def __call__(
        self, *arguments: str, env: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [self._shell, str(self.home / "bin" / "dynamiccl-run"), *arguments],
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )

    def shown(self, *options: str, said: str = "", **env: str) -> dict[str, str]:
        """The command's environment; on stderr are words of `said`, or nothing."""
        done = self(*options, "env", env=env)
        assert done.returncode == 0, done.stderr
        assert said in done.stderr if said else done.stderr == ""
        return dict(line.split("=", 1) for line in done.stdout.splitlines())
