import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.libraries import ADAPTIVE_NAME, TUNER_NAME
from dynamiccl.serve.artifact import Artifact, PluginIndex
from tests.serve.jobs.arbiter import OFTEN, Arbiter, arbiter_of, assert_no_report
from tests.serve.jobs.play import Played, clean_environment, play
from tests.serve.jobs.setting import Setting, fingerprint, make_setting

#: Runs jobs under one plugin: options, `environment` and more that `play` takes.
Player = Callable[..., Played]


def player_of(directory: Path, plugin: str, law: str = "sound") -> Player:
    return partial(play, directory / "play_rank", directory / plugin, law=law)


@pytest.fixture(scope="session")
def job_build_dir(build_dir: Callable[[str], Path]) -> Path:
    """The plugin and its harness as they are built, or as DYNAMICCL_TEST_SANITIZE says."""
    return build_dir(os.environ.get("DYNAMICCL_TEST_SANITIZE", ""))


class Adaptive:
    """Runs jobs in mode adaptive."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._play = player_of(directory, ADAPTIVE_NAME)

    def __call__(
        self, setting: Setting, *options: str, leader: Mapping[str, str] | None = None, **named: Any
    ) -> Played:
        """With an arbiter of its own, whose leader has the settings `leader`."""
        with arbiter_of(self.directory, setting, **(leader or {})) as arbiter:
            played = self.under(arbiter.address, setting, *options, **named)
        assert_no_report(setting)
        return played

    def under(
        self,
        address: str,
        setting: Setting,
        *options: str,
        environment: Mapping[str, str] | None = None,
        **named: object,
    ) -> Played:
        """With the arbiter that listens there; the ranks have the settings `environment` too."""
        ranks = setting.by_arbiter(address) | OFTEN | dict(environment or {})
        played = self._play(*options, environment=ranks, **named)
        assert played.asked_longest_ms < 20_000, played
        return played


@pytest.fixture(scope="session")
def play_adaptive(job_build_dir: Path) -> Adaptive:
    return Adaptive(job_build_dir)


@pytest.fixture(scope="session")
def play_tuner(job_build_dir: Path) -> Player:
    """Jobs under the tuner only."""
    return player_of(job_build_dir, TUNER_NAME)


class Inits:
    """Runs `init_ranks`: many ranks in the tuner's `init`, without the rest of NCCL."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(
        self, environment: Mapping[str, str], *, within: Sequence[str] = (), **options: int
    ) -> dict[str, Any]:
        """`within`: the beginning of the command."""
        program = str(self._directory / "init_ranks")
        command = [*within, program, str(self._directory / TUNER_NAME)]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        done = subprocess.run(
            command,
            env=clean_environment() | dict(environment),
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout) | {"said": done.stderr}  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def inits(job_build_dir: Path) -> Inits:
    return Inits(job_build_dir)


@pytest.fixture(scope="session")
def play_wilful(build_dir: Callable[[str], Path]) -> Player:
    """Jobs under serve/plugin/tests/wilful_plugin.cpp, which does what WILFUL_* tells it."""
    return player_of(build_dir(""), "libwilful_v6.so", law="")


def setting_of(num_ranks: int, num_nodes: int) -> Callable[..., Iterator[Setting]]:
    def made(tmp_path: Path) -> Iterator[Setting]:
        setting = make_setting(tmp_path, num_ranks=num_ranks, num_nodes=num_nodes)
        yield setting
        setting.sweep()

    return made


four_ranks = pytest.fixture(setting_of(4, 1), name="four_ranks")
eight_ranks = pytest.fixture(setting_of(8, 1), name="eight_ranks")
two_nodes = pytest.fixture(setting_of(8, 2), name="two_nodes")


@pytest.fixture
def arbiter(job_build_dir: Path) -> Iterator[Callable[..., Arbiter]]:
    """Starts arbiters that end with the test."""
    with contextlib.ExitStack() as stack:

        def start(setting: Setting, *, job: str = "", limit_ms: int = 10_000) -> Arbiter:
            program = str(job_build_dir / "dynamiccl-arbiter")
            return stack.enter_context(Arbiter([program], job or setting.job, limit_ms))

        yield start


@pytest.fixture
def known(small_artifact: Artifact, tmp_path: Path) -> Path:
    """A real artifact that knows the harness's machine."""
    copied = Path(shutil.copytree(small_artifact.directory, tmp_path / "known"))
    index = PluginIndex.read(copied).bound("box", fingerprint(22809))
    index.bound("box", fingerprint(23007)).write(copied)
    return copied
