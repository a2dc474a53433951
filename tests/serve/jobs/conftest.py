import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.libraries import ADAPTIVE_NAME, TUNER_NAME
from dynamiccl.serve.artifact import Artifact, PluginIndex
from tests.serve.jobs.arbiter import OFTEN, Arbiter, arbiter_of, assert_no_report
from tests.serve.jobs.play import Played, clean_environment, play
from tests.serve.jobs.setting import JOB, Setting, fingerprint, make_setting

#: Runs jobs under one plugin: options, `environment` and more that `play` takes.
Player = Callable[..., Played]


def player_of(directory: Path, plugin: str, law: str = "sound") -> Player:
    return partial(play, directory / "play_rank", directory / plugin, law=law)


@pytest.fixture(scope="session")
def job_build_dir(build_dir: Callable[[str], Path]) -> Path:
    """The plugin and its harness as they are built, or as DYNAMICCL_TEST_SANITIZE says."""
    return build_dir(os.environ.get("DYNAMICCL_TEST_SANITIZE", ""))


@dataclass(frozen=True)
class Adaptive:
    """Runs jobs in mode adaptive, of four ranks unless a test says otherwise."""

    directory: Path
    setting: Setting

    def __call__(
        self, *options: str, leader: Mapping[str, str] | None = None, **named: Any
    ) -> Played:
        """With an arbiter of its own, whose leader has the settings `leader`."""
        with self.arbiter(**(leader or {})) as arbiter:
            played = self.under(arbiter.address, *options, **named)
        assert_no_report(self.setting)
        return played

    def arbiter(self, **leader: str) -> Arbiter:
        return arbiter_of(self.directory, self.setting, **leader)

    def under(
        self,
        address: str,
        *options: str,
        environment: Mapping[str, str] | None = None,
        **named: object,
    ) -> Played:
        """With the arbiter that listens there; the ranks have the settings `environment` too."""
        ranks = self.setting.by_arbiter(address) | OFTEN | dict(environment or {})
        player = player_of(self.directory, ADAPTIVE_NAME)
        played = player(*options, environment=ranks, **JOB | named)
        assert played.asked_longest_ms < 20_000, played
        return played


@pytest.fixture
def adaptive(job_build_dir: Path, setting: Setting) -> Adaptive:
    return Adaptive(job_build_dir, setting)


@dataclass(frozen=True)
class Tuner:
    """Runs short jobs under the tuner only, of four ranks unless a test says otherwise."""

    directory: Path
    setting: Setting

    def __call__(
        self, *options: str, environment: Mapping[str, str] | None = None, **named: object
    ) -> Played:
        ranks = self.setting.environment() | dict(environment or {})
        player = player_of(self.directory, TUNER_NAME)
        return player(*options, environment=ranks, **{"rate": 4000, "calls": 800} | named)


@pytest.fixture
def tuner(job_build_dir: Path, setting: Setting) -> Tuner:
    return Tuner(job_build_dir, setting)


@dataclass(frozen=True)
class Inits:
    """Runs `init_ranks`: many ranks in the tuner's `init`, without the rest of NCCL."""

    directory: Path
    setting: Setting

    def __call__(
        self,
        environment: Mapping[str, str] | None = None,
        *,
        within: Sequence[str] = (),
        **options: int,
    ) -> dict[str, Any]:
        """`within`: the beginning of the command."""
        program = str(self.directory / "init_ranks")
        command = [*within, program, str(self.directory / TUNER_NAME)]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        done = subprocess.run(
            command,
            env=clean_environment() | self.setting.environment() | dict(environment or {}),
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout) | {"said": done.stderr}  # type: ignore[no-any-return]


@pytest.fixture
def inits(job_build_dir: Path, setting: Setting) -> Inits:
    return Inits(job_build_dir, setting)


@pytest.fixture(scope="session")
def play_wilful(build_dir: Callable[[str], Path]) -> Player:
    """Jobs under serve/plugin/tests/wilful_plugin.cpp, which does what WILFUL_* tells it."""
    return player_of(build_dir(""), "libwilful_v6.so", law="")


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    """Of jobs of up to eight ranks on one or two nodes."""
    made = make_setting(tmp_path, num_ranks=8, num_nodes=2)
    yield made
    made.sweep()


@pytest.fixture
def arbiter(job_build_dir: Path, setting: Setting) -> Iterator[Callable[..., Arbiter]]:
    """Starts arbiters that end with the test."""
    with contextlib.ExitStack() as stack:

        def start(limit_ms: int = 10_000) -> Arbiter:
            program = str(job_build_dir / "dynamiccl-arbiter")
            return stack.enter_context(Arbiter([program], setting.job, limit_ms))

        yield start


Voting = Callable[..., dict[str, str]]


@pytest.fixture
def voting(setting: Setting, arbiter: Callable[..., Arbiter]) -> Voting:
    """What ranks have in their environment that vote by a word, or by an arbiter."""

    def chosen(by_arbiter: bool, limit_ms: int = 10_000) -> dict[str, str]:
        found = setting.by_arbiter(arbiter(limit_ms).address) if by_arbiter else {}
        return found | {"DYNAMICCL_TEST_LIMIT_MS": str(limit_ms)}

    return chosen


@pytest.fixture
def known(small_artifact: Artifact, tmp_path: Path) -> Path:
    """A real artifact that knows the harness's machine."""
    copied = Path(shutil.copytree(small_artifact.directory, tmp_path / "known"))
    index = PluginIndex.read(copied).bound("box", fingerprint(22809))
    index.bound("box", fingerprint(23007)).write(copied)
    return copied
