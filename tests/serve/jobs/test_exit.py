"""Jobs that end while a leader's brain is at work: brains use what exit() destroys."""

import shutil
from pathlib import Path

import pytest

from dynamiccl.libraries import ADAPTIVE_NAME
from tests.serve.jobs.conftest import Player, player_of
from tests.serve.jobs.setting import Setting
from tests.serve.jobs.thinking import adaptive


@pytest.fixture
def play_slow_brain(job_build_dir: Path, tmp_path: Path) -> Player:
    """The plugin beside a brain of which SLOW_BRAIN says what takes it a second."""
    beside = tmp_path / "slow"
    beside.mkdir()
    for name in ("play_job", ADAPTIVE_NAME):
        shutil.copy(job_build_dir / name, beside)
    shutil.copy(job_build_dir / "libslow_brain.so", beside / "libdynamiccl-torch.so")
    return player_of(beside, ADAPTIVE_NAME)


def slow(setting: Setting, what: str) -> dict[str, str]:
    environment = adaptive(setting, SLOW_BRAIN=what)
    del environment["DYNAMICCL_BRAIN_SOCKET"]
    return environment


@pytest.mark.parametrize("what", ["open", "decide", "close"])
def test_exit_of_the_thread_that_calls_waits_for_the_brain(
    what: str, play_slow_brain: Player, four_ranks: Setting
) -> None:
    played = play_slow_brain(environment=slow(four_ranks, what), ranks=4, rate=1000, calls=900)
    assert played.is_sound, str(played)
    assert played.acted > 0


@pytest.mark.parametrize("what", ["decide", "close"])
def test_exit_of_another_thread_waits_for_a_brain_that_has_been_used(
    what: str, play_slow_brain: Player, four_ranks: Setting
) -> None:
    environment = slow(four_ranks, what)
    played = play_slow_brain(environment=environment, ranks=4, threads=2, rate=1000, calls=2500)
    assert played.is_sound, str(played)
    assert played.acted > 0
