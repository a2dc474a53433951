"""Other tables while a job runs: a new artifact, a bad one, the kill file."""

from pathlib import Path
from typing import Final

import pytest

from tests.serve.jobs.conftest import Player
from tests.serve.jobs.play import at, every
from tests.serve.jobs.setting import Setting

#: Long enough for a change on disk to be noticed, agreed and in force.
LONG_JOB: Final = {"rate": 1000, "calls": 5000}


def test_a_new_artifact_is_taken_at_one_call(play_job: Player, four_ranks: Setting) -> None:
    swap = f"swap={four_ranks.artifact},{four_ranks.other_artifact}"
    played = play_job(
        *at(1000, swap), environment=four_ranks.environment(), ranks=4, comms=3, **LONG_JOB
    )
    assert played.is_sound, played
    # From NCCL's own choice to the first table, and from that to the second.
    assert [comm.switches for comm in played.communicators] == [2] * 5


def spoil_table(artifact: Path) -> None:
    """The table is not the one that the index speaks of."""
    for path in artifact.rglob("*.dct"):
        path.write_bytes(path.read_bytes()[:-1] + b"\0")


def spoil_index(artifact: Path) -> None:
    (artifact / "plugin.index").write_text("dynamiccl-index\t99\n")


def empty(artifact: Path) -> None:
    for path in artifact.rglob("*"):
        if path.is_file():
            path.unlink()


def open_to_all(artifact: Path) -> None:
    (artifact / "plugin.index").chmod(0o666)


@pytest.mark.parametrize("spoil", [spoil_table, spoil_index, empty, open_to_all])
def test_a_bad_artifact_is_refused_and_the_old_one_stays(
    spoil: object, play_job: Player, four_ranks: Setting
) -> None:
    assert callable(spoil)
    spoil(four_ranks.other_artifact)
    swap = f"swap={four_ranks.artifact},{four_ranks.other_artifact}"
    played = play_job(*at(1000, swap), environment=four_ranks.environment(), ranks=4, **LONG_JOB)
    assert played.is_sound, played
    assert played.switches == 1
    assert played.communicators[0].last_acted == played.communicators[0].calls - 1


def test_the_kill_file_returns_everything_to_nccl(play_job: Player, four_ranks: Setting) -> None:
    kill_file = four_ranks.artifact / "kill"
    played = play_job(
        *at(1000, f"sh=touch {kill_file}"),
        environment=four_ranks.environment(),
        ranks=4,
        comms=3,
        **LONG_JOB,
    )
    assert played.is_sound, played
    for comm in played.communicators:
        assert comm.acted
        assert comm.last_acted is not None
        assert 1000 <= comm.last_acted < 4000
        assert comm.switches == 2


def test_without_the_kill_file_the_table_comes_back(play_job: Player, four_ranks: Setting) -> None:
    kill_file = four_ranks.root / "stop-it"
    played = play_job(
        *at(1000, f"sh=touch {kill_file}"),
        *at(3000, f"sh=rm {kill_file}"),
        environment=four_ranks.environment() | {"DYNAMICCL_KILL_FILE": str(kill_file)},
        ranks=4,
        rate=1000,
        calls=6000,
    )
    assert played.is_sound, played
    assert played.switches == 3
    assert played.communicators[0].last_acted == played.communicators[0].calls - 1


def test_a_kill_file_that_cannot_be_followed_says_so(play_job: Player, four_ranks: Setting) -> None:
    """One rank has simulated a call, so that nothing can be agreed any more."""
    kill_file = four_ranks.artifact / "kill"
    played = play_job(
        *at(1500, "simulate=1", rank=1),
        *at(2000, f"swap={four_ranks.artifact},{four_ranks.other_artifact}"),
        *at(3500, f"sh=touch {kill_file}"),
        environment=four_ranks.environment(),
        ranks=4,
        rate=1000,
        calls=6000,
    )
    assert played.is_sound, played
    assert played.switches == 1
    assert "no table after this one: " in played.log
    assert "nothing can be agreed any more: the table stays in force" in played.log
    assert "back to NCCL's own choice" not in played.log


def test_a_file_system_that_stalls_stops_no_call(play_job: Player, four_ranks: Setting) -> None:
    """The thread that votes reads no file: ranks agree on the table while looking takes 3 s."""
    played = play_job(
        environment=four_ranks.environment() | {"DYNAMICCL_TEST_STALL_S": "3"},
        ranks=4,
        comms=2,
        rate=1000,
        calls=2500,
    )
    assert played.is_sound, played
    assert played.acted > 0
    assert played.asked_longest_ms < 1500  # half of one look


@pytest.mark.soak
def test_four_hundred_thousand_calls_while_artifacts_change(
    play_job: Player, four_ranks: Setting
) -> None:
    swap = f"swap={four_ranks.artifact},{four_ranks.other_artifact}"
    played = play_job(
        *every(5000, swap),
        environment=four_ranks.environment() | {"DYNAMICCL_LOOK_INTERVAL_S": "0.05"},
        ranks=4,
        comms=2,
        calls=140_000,
        deadline=300,
    )
    assert played.is_sound, played
    assert played.calls >= 400_000
    assert played.switches > 10


@pytest.mark.soak
def test_ten_thousand_switches_under_load(play_job: Player, four_ranks: Setting) -> None:
    swap = f"swap={four_ranks.artifact},{four_ranks.other_artifact}"
    played = play_job(
        *every(200, swap),
        environment=four_ranks.environment() | {"DYNAMICCL_LOOK_INTERVAL_S": "0.005"},
        ranks=4,
        comms=16,
        threads=2,
        calls=10**8,
        until_switches=10_000,
        deadline=540,
    )
    assert played.is_sound, played
    assert played.switches >= 10_000
