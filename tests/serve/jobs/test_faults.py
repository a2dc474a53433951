"""Ranks that die, sleep, abort or count differently: no two answers, and no wait without an end."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dynamiccl.libraries import ADAPTIVE_NAME, TUNER_NAME
from dynamiccl.nccl import Algorithm, Config, Protocol
from tests.serve.jobs.conftest import Player, player_of
from tests.serve.jobs.play import assert_never_split, at, every
from tests.serve.jobs.setting import (
    FIRST,
    JOB,
    Setting,
    prepared,
    shapes_of,
    write_artifact,
)


@pytest.mark.parametrize("rank", [0, 2], ids=["leader", "worker"])
@pytest.mark.parametrize("call", [0, 20, 100, 400])
def test_a_killed_rank_leaves_no_two_answers(
    rank: int, call: int, play_job: Player, four_ranks: Setting
) -> None:
    played = play_job(
        *at(call, "kill", rank=rank),
        environment=four_ranks.environment(),
        ranks=4,
        comms=2,
        watchdog=0.2,
        run_ahead=1000,
        **JOB,
    )
    assert played.ranks[rank].signal == 9
    assert (played.disagreements, played.acted_unevenly, played.violations) == (0, 0, 0), played
    assert not played.hit_deadline, played
    assert played.abnormal_exits == 0, played


@pytest.mark.parametrize("rank", [0, 2], ids=["leader", "worker"])
@pytest.mark.parametrize("call", [5, 50, 200])
def test_survivors_that_go_on_agree_among_themselves(
    rank: int, call: int, play_job: Player, four_ranks: Setting
) -> None:
    played = play_job(
        *at(call, "kill", rank=rank),
        environment=four_ranks.environment(),
        ranks=4,
        survivors_go_on=1,
        **JOB,
    )
    assert (played.disagreements, played.acted_unevenly, played.violations) == (0, 0, 0), played
    assert not played.hit_deadline, played


@pytest.mark.parametrize("rank", [0, 2], ids=["leader", "worker"])
@pytest.mark.parametrize("go_on", [0, 1], ids=["all-abort", "survivors-go-on"])
@pytest.mark.parametrize("player", ["play_job", "play_tuner"])
def test_a_creation_that_is_aborted_splits_nothing(
    player: str, go_on: int, rank: int, request: pytest.FixtureRequest, four_ranks: Setting
) -> None:
    """The others may have the table by then: they wait in a collective, for the job's watchdog."""
    play: Player = request.getfixturevalue(player)
    played = play(
        environment=four_ranks.environment(),
        ranks=4,
        comms=2,
        abort_creation=rank,
        survivors_go_on=go_on,
        watchdog=0.2,
        **JOB,
    )
    assert_never_split(played)
    assert played.errors == 0, played
    world = played.communicators[0]
    assert (world.calls == JOB["calls"]) == bool(go_on)
    other = [comm for comm in played.communicators if comm.slot == 1]
    assert any(comm.acted for comm in other), played.log


@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "worker"])
def test_a_stopped_process_delays_and_splits_nothing(
    rank: int, play_job: Player, four_ranks: Setting
) -> None:
    played = play_job(
        *at(30, "stop=1.5", rank=rank),
        environment=four_ranks.environment(),
        ranks=4,
        rate=4000,
        calls=16000,  # what it slept is caught up with at full speed, with no time for agreeing
    )
    assert played.is_sound, played
    assert played.acted > 0


@pytest.mark.soak
@pytest.mark.parametrize("call", [0, 30, 300])
def test_a_leader_ten_seconds_late(call: int, play_job: Player, four_ranks: Setting) -> None:
    played = play_job(
        *at(call, "stop=10", rank=0),
        environment=four_ranks.environment() | {"DYNAMICCL_DECISION_LIMIT_S": "60"},
        ranks=4,
        comms=3,
        run_ahead=4000,
        deadline=90,
        rate=500,
        calls=8000,
    )
    assert played.is_sound, played
    assert played.acted > 0


@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "worker"])
@pytest.mark.parametrize("call", [0, 10, 100, 500])
def test_an_abort_at_any_time_leaves_no_two_answers(
    rank: int, call: int, play_job: Player, four_ranks: Setting
) -> None:
    played = play_job(
        *at(call, "abort=0", rank=rank, comm=1),
        environment=four_ranks.environment(),
        ranks=4,
        comms=3,
        threads=3,
        watchdog=0.2,
        rate=2000,
        calls=2000,
    )
    assert_never_split(played)
    world = next(comm for comm in played.communicators if comm.slot == 0)
    assert world.calls >= 2000  # the other communicators go on
    assert world.acted > 0


def test_an_abort_ends_a_call_that_waits_for_a_switch(
    play_job: Player, four_ranks: Setting
) -> None:
    """The leader is suspended once it has proposed the call of the switch, some 32 further on."""
    played = play_job(
        *at(300, f"swap={four_ranks.artifact},{four_ranks.other_artifact}"),
        *at(316, "stop=8"),
        *at(316, "abort=1", rank=1),
        environment=four_ranks.environment()
        | {"DYNAMICCL_DECISION_LIMIT_S": "60", "DYNAMICCL_LOOK_INTERVAL_S": "0.02"},
        ranks=4,
        run_ahead=1000,
        watchdog=0.2,
        rate=100,
        calls=500,
    )
    assert_never_split(played)
    # It waited, and neither for the leader nor for the limit.
    assert 200 < played.asked_longest_ms < 6000, played


def test_one_rank_that_simulates_ends_all_switching(play_job: Player, four_ranks: Setting) -> None:
    swap = f"swap={four_ranks.artifact},{four_ranks.other_artifact}"
    for call in (0, 10, 1000):
        played = play_job(
            *at(call, "simulate=4", rank=1),
            *at(1500, swap),
            environment=four_ranks.environment(),
            ranks=4,
            **JOB,
        )
        assert played.is_sound, played
        assert played.switches <= 1, played  # what is in force stays, whether ours or NCCL's


@pytest.mark.parametrize("max_group", [1, 4])
@pytest.mark.parametrize("call", [0, 40, 100])
def test_a_simulated_call_like_all_others(
    call: int, max_group: int, play_job: Player, four_ranks: Setting
) -> None:
    """No size or order tells that it never ran: without the launches NCCL tells of, ranks split."""
    played = play_job(
        *at(call, "simulate=1", rank=1),
        environment=four_ranks.environment(),
        ranks=4,
        pattern=1,
        max_group=max_group,
        run_ahead=200,
        **JOB,
    )
    assert played.is_sound, played


@pytest.mark.parametrize("player", ["play_job", "play_tuner"])
def test_a_chunk_size_of_a_table_is_never_asked_for(
    player: str, request: pytest.FixtureRequest, four_ranks: Setting
) -> None:
    """A sweep's alone: a rank that simulates a group would have NCCL's, and the others ours."""
    shapes = shapes_of(4)
    alone = write_artifact(four_ranks.root / "alone", Config(None, None, None, 1 << 16), shapes)
    beside = write_artifact(four_ranks.root / "beside", replace(FIRST, chunk_bytes=1 << 16), shapes)
    for artifact, acts in ((alone, False), (beside, True)):
        play: Player = request.getfixturevalue(player)
        played = play(
            *at(1000, "simulate=4", rank=1),
            environment=four_ranks.environment() | prepared(artifact),
            ranks=4,
            release="2.30",
            **JOB,
        )
        assert played.is_sound, played
        assert (played.acted > 0) == acts
        assert re.search("the artifact's table|decisions of ", played.log), played.log


@pytest.mark.parametrize("rank", [1, "all"])
@pytest.mark.parametrize("release", ["2.27", "2.28", "2.30"])
def test_a_send_after_a_simulated_call_is_not_its_launch(
    rank: int | str, release: str, play_job: Player, four_ranks: Setting
) -> None:
    """Its kernel would make a call that never ran count as one that did, and ranks split."""
    played = play_job(
        *at(40, "simulate=1", rank=1),
        *at(40, "p2p", rank=rank),
        environment=four_ranks.environment(),
        ranks=4,
        release=release,
        pattern=1,
        run_ahead=200,
        **JOB,
    )
    assert played.is_sound, played


@pytest.mark.parametrize("release", ["2.28", "2.30"])
def test_sends_of_some_ranks_hinder_no_agreement(
    release: str, play_job: Player, four_ranks: Setting
) -> None:
    played = play_job(
        *every(7, "p2p", rank=1),
        *every(11, "p2p", rank=2),
        environment=four_ranks.environment() | {"DYNAMICCL_SAMPLE_PERCENT": "100"},
        ranks=4,
        release=release,
        **JOB,
    )
    assert played.is_sound, played
    assert played.acted > 0


@pytest.mark.parametrize("library", [TUNER_NAME, ADAPTIVE_NAME])
@pytest.mark.parametrize("release", ["2.28", "2.29", "2.30"])
def test_allgatherv_is_given_no_channels_that_are_not_there(
    library: str, release: str, job_build_dir: Path, four_ranks: Setting
) -> None:
    """It asks about an AllGather and takes the number as the index of a channel."""
    many = Config(Algorithm.Ring, Protocol.LL128, 64)
    artifact = write_artifact(four_ranks.root / "many", many, [(1, 4)])
    played = player_of(job_build_dir, library)(
        *every(20, "bcasts=3", rank="all"),
        environment=four_ranks.environment() | prepared(artifact),
        ranks=4,
        release=release,
        **JOB,
    )
    assert played.is_sound, played
    assert played.acted > 0


def test_ranks_that_all_simulate_count_alike(play_job: Player, four_ranks: Setting) -> None:
    played = play_job(
        *every(100, "simulate=3", rank="all"),
        environment=four_ranks.environment(),
        ranks=4,
        **JOB,
    )
    assert played.is_sound, played
    assert played.acted > 0


@pytest.mark.parametrize("call", [0, 40, 400])
def test_one_rank_that_captures_splits_nothing(
    call: int, play_job: Player, four_ranks: Setting
) -> None:
    played = play_job(
        *at(call, "capture=20,30", rank=1), environment=four_ranks.environment(), ranks=4, **JOB
    )
    assert played.is_sound, played


@pytest.mark.parametrize("ranks", [1, "all"])
def test_a_capture_across_the_switch(
    ranks: int | str, play_job: Player, four_ranks: Setting
) -> None:
    """One rank's graph would go on with its captured choice, and the others with the table."""
    played = play_job(
        *at(5, "capture=20,30", rank=ranks),
        environment=four_ranks.environment(),
        ranks=4,
        **JOB,
    )
    assert played.is_sound, played
    assert (played.acted > 0) == (ranks == "all")
    if ranks == 1:
        assert "not made, simulated and captured the same calls as rank" in played.log


def test_ranks_that_all_capture_replay_one_choice(play_job: Player, four_ranks: Setting) -> None:
    played = play_job(
        *at(1000, "capture=20,30", rank="all"),
        environment=four_ranks.environment(),
        ranks=4,
        comms=2,
        **JOB,
    )
    assert played.is_sound, played
    assert played.acted > 0
    assert played.communicators[0].calls >= 4000


def test_a_job_that_destroys_nothing_ends_as_well(play_job: Player, four_ranks: Setting) -> None:
    for calls in (10, 2000):
        played = play_job(
            environment=four_ranks.environment(), ranks=4, comms=3, destroy=0, calls=calls
        )
        assert played.is_sound, played


def test_the_library_may_be_closed_and_opened_again(play_job: Player, four_ranks: Setting) -> None:
    played = play_job(environment=four_ranks.environment(), ranks=4, lifetime=20, calls=2000)
    assert played.is_sound, played
    assert played.communicators[0].generations >= 50


def test_forked_children_are_no_ranks(play_job: Player, four_ranks: Setting) -> None:
    played = play_job(
        *every(200, "fork", rank="all"), environment=four_ranks.environment(), ranks=4, **JOB
    )
    assert played.is_sound, played
    assert played.acted > 0


@pytest.mark.parametrize("release", ["2.28", "2.29", "2.30"])
def test_kernel_events_may_be_late_twice_or_lost(
    release: str, play_job: Player, four_ranks: Setting
) -> None:
    played = play_job(
        environment=four_ranks.environment() | {"DYNAMICCL_SAMPLE_PERCENT": "100"},
        ranks=4,
        comms=2,
        release=release,
        kernel_drop=20,
        kernel_duplicate=10,
        kernel_delay_us=5000,
        **JOB,
    )
    assert played.is_sound, played


def test_a_rank_without_the_profiler_splits_nothing(play_job: Player, four_ranks: Setting) -> None:
    played = play_job(
        "--without-profiler", "2", environment=four_ranks.environment(), ranks=4, **JOB
    )
    assert played.is_sound, played
