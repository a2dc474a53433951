"""The harness itself: it behaves as each release of NCCL, and what is wrong with a job, it finds.

The plugin here does on purpose what it is told, right or wrong.
"""

import re

import pytest

from tests.serve.jobs.conftest import Player
from tests.serve.jobs.play import Played, at, every, on_rank
from tests.serve.jobs.setting import NCCL_CODES

ACTS = {"WILFUL_ACT_FROM": "100"}
TUNER_OF = {"2.21": 2, "2.22": 3, "2.23": 3, "2.24": 4, "2.25": 4, "2.26": 4, "2.27": 4}
TUNER_OF |= {"2.28": 5, "2.29": 5, "2.30": 6}
PROFILER_OF = {"2.27": 4, "2.28": 5, "2.29": 6, "2.30": 6}


def events(played: Played, rank: int = 0) -> dict[str, int]:
    """What the wilful profiler counted."""
    (line,) = (line for line in played.ranks[rank].log if "profiler finalize" in line)
    return {name: int(count) for name, count in re.findall(r"(\w+) (\d+)", line)}


def test_ranks_that_act_alike_are_sound(play_wilful: Player) -> None:
    played = play_wilful(environment=ACTS, ranks=4, comms=4, threads=2)
    assert played.is_sound, played
    assert [len(comm.ranks) for comm in played.communicators] == [4, 2, 2, 2, 2, 2, 2]
    assert all(comm.first_acted == 100 for comm in played.communicators)
    assert played.switches == 7  # from NCCL's own choice, once for each


def test_one_rank_a_call_late_is_one_disagreement(play_wilful: Player) -> None:
    played = play_wilful(*on_rank(2, {"WILFUL_ACT_FROM": "101"}), environment=ACTS, ranks=4)
    assert (played.disagreements, played.acted_unevenly) == (1, 1)
    first = played.raw["first_disagreement"]
    assert (first["comm"], first["call"]) == (0, 100)
    assert [answer["acted"] for answer in first["answers"]] == [True, True, False, True]
    assert first["answers"][2]["protocol"] != "LL" or first["answers"][2]["num_channels"] != 4


def test_one_rank_without_the_plugin_is_found(play_wilful: Player) -> None:
    played = play_wilful("--without-plugin", "3", environment=ACTS, ranks=4)
    assert played.disagreements > 500
    assert played.acted_unevenly > 500
    assert played.ranks[3].asked == 0


def test_a_difference_in_channels_alone_is_found(play_wilful: Player) -> None:
    played = play_wilful(*on_rank(1, {"WILFUL_CHANNELS": "5"}), environment=ACTS, ranks=2)
    assert played.disagreements > 100
    assert played.acted_unevenly == 0


def test_a_difference_in_chunks_alone_is_found(play_wilful: Player) -> None:
    chunks = {"WILFUL_CHUNK": "8192"}
    played = play_wilful(environment=chunks, ranks=2, release="2.30")
    assert played.is_sound, played
    assert played.acted == played.calls
    other = on_rank(1, {"WILFUL_CHUNK": "4096"})
    played = play_wilful(*other, environment=chunks, ranks=2, release="2.30")
    assert played.disagreements == played.calls
    played = play_wilful(*other, environment=chunks, ranks=2, release="2.29")
    assert played.is_sound, played


def test_switches_are_counted(play_wilful: Player) -> None:
    changing = ACTS | {"WILFUL_ACT_FROM": "0", "WILFUL_SWITCH_EVERY": "200"}
    played = play_wilful(environment=changing, ranks=2, calls=2000, pattern=16)
    assert played.is_sound, played
    assert played.switches == 9
    played = play_wilful(environment=changing, ranks=2, calls=10**6, pattern=16, until_switches=20)
    assert played.is_sound, played
    assert 20 <= played.switches <= 30
    assert played.calls < 10_000


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"WILFUL_CELL": "20"}, "wrote into the unavailable cell 20"),
        ({"WILFUL_CHANNELS": "65"}, "asked for 65 channels"),
        ({"WILFUL_CHANNELS": "-1"}, "asked for -1 channels"),
        ({"WILFUL_CHUNK": "100"}, "a chunk of 100 bytes"),
        ({"WILFUL_LOG_FROM_THREAD": "1"}, "logged from a thread of its own"),
    ],
)
def test_what_nccl_does_not_survive_is_found(
    settings: dict[str, str], complaint: str, play_wilful: Player
) -> None:
    played = play_wilful(environment=ACTS | settings, ranks=2, release="2.30", calls=300)
    assert played.violations
    assert any(complaint in text for text in played.ranks[0].violations)


def test_an_error_ends_the_communicator(play_wilful: Player) -> None:
    played = play_wilful(
        *on_rank(1, {"WILFUL_ERROR_AT": "50"}),
        environment=ACTS,
        ranks=3,
        max_group=1,
        watchdog=0.2,
    )
    assert played.errors == 1
    assert played.ranks[1].errors == ["comm 0 call 50: getCollInfo returned 5"]
    assert not played.hit_deadline
    assert played.calls < 50 + 2 * 64
    assert all(any("tuner finalize" in line for line in rank.log) for rank in played.ranks)


def test_a_failed_init_ends_the_communicator(play_wilful: Player) -> None:
    played = play_wilful(
        *on_rank(1, {"WILFUL_INIT_ERROR": "1"}), environment=ACTS, ranks=3, watchdog=0.2
    )
    assert played.ranks[1].errors == ["comm 0 call 0: the tuner's init returned 5"]
    assert played.calls == 0
    assert not played.hit_deadline


@pytest.mark.parametrize("release", NCCL_CODES)
def test_each_release_takes_the_newest_it_knows(release: str, play_wilful: Player) -> None:
    played = play_wilful(environment={}, ranks=2, calls=100, release=release)
    assert played.is_sound, played
    log = played.ranks[1].log
    tuner = next(i for i, line in enumerate(log) if "tuner v" in line)
    assert f"tuner v{TUNER_OF[release]} init: 2 ranks" in log[tuner]
    profilers = [i for i, line in enumerate(log) if "profiler v" in line]
    if release in PROFILER_OF:
        assert f"profiler v{PROFILER_OF[release]} init: rank 1 of 2" in log[profilers[0]]
        assert profilers[0] < tuner
        assert "tuner finalize" in log[-2]
        assert "profiler finalize" in log[-1]
    else:
        assert not profilers
    ids = {line.split()[3].rstrip(",") for line in played.log.splitlines() if " id " in line}
    assert len(ids) == (release in PROFILER_OF)  # one and the same for tuner and profiler


def test_2_21_asks_twice(play_wilful: Player) -> None:
    played = play_wilful(environment={}, ranks=2, max_group=1, release="2.21")
    assert played.ranks[0].asked == 2 * played.calls
    played = play_wilful(environment={}, ranks=2, max_group=1, release="2.22")
    assert played.ranks[0].asked == played.calls


@pytest.mark.parametrize("release", PROFILER_OF)
def test_profiler_hears_of_every_collective_that_its_release_tells(
    release: str, play_wilful: Player
) -> None:
    played = play_wilful(environment={"WILFUL_MASK": "66"}, ranks=2, release=release)
    assert played.is_sound, played
    counts = events(played)
    heard = counts["coll" if release == "2.27" else "coll_api"]
    assert heard >= played.calls  # some calls are aggregates
    # From 2.29 on a Broadcast is heard of by its call alone.
    assert (counts["coll"] < heard) == (release in {"2.29", "2.30"})
    assert counts["kernel"] > counts["coll"]
    assert counts["kernels_stopped"] == counts["kernel"]
    assert counts["threads"] == 2  # the caller and the proxy
    silent = play_wilful(environment={"WILFUL_MASK": "0"}, ranks=2, release=release)
    assert set(events(silent).values()) == {0}
    some = play_wilful(environment={"WILFUL_MASK": "2"}, ranks=2, release=release)
    assert events(some)["kernel"] == 0
    assert events(some)["coll"] == counts["coll"]


def test_kernel_events_come_late_twice_or_never(play_wilful: Player) -> None:
    played = play_wilful(
        environment={"WILFUL_MASK": "66"},
        ranks=2,
        calls=300,
        kernel_drop=50,
        kernel_duplicate=20,
        kernel_delay_us=3000,
    )
    assert played.is_sound, played
    counts = events(played)
    assert 0 < counts["kernels_stopped"] < counts["kernel"]


def test_a_simulated_group_asks_and_runs_nothing(play_wilful: Player) -> None:
    played = play_wilful(*at(50, "simulate=8", rank=1), environment={}, ranks=4)
    assert played.is_sound, played
    assert 0 < played.ranks[1].asked - played.ranks[0].asked <= 8
    shifted = play_wilful(*at(50, "simulate=8", rank=1), environment=ACTS, ranks=4)
    assert 0 < shifted.disagreements <= 8  # this plugin counts, and agrees on nothing


def test_a_captured_group_asks_once(play_wilful: Player) -> None:
    played = play_wilful(*at(100, "capture=5,20", rank=1), environment={}, ranks=4)
    assert played.is_sound, played
    assert sum(comm["replayed"] for comm in played.raw["comms"]) >= 100
    assert played.ranks[0].asked - played.ranks[1].asked >= 95
    both = play_wilful(*at(100, "capture=5,20", rank="all"), environment=ACTS, ranks=4)
    assert both.is_sound, both
    assert both.ranks[0].asked == both.ranks[1].asked < both.calls


@pytest.mark.parametrize(("mask", "at_replay"), [(2, False), (66, True)])
def test_a_replay_has_events_only_with_host_nodes(
    mask: int, at_replay: bool, play_wilful: Player
) -> None:
    played = play_wilful(
        *at(100, "capture=5,20", rank="all"),
        environment={"WILFUL_MASK": str(mask)},
        ranks=2,
        max_group=1,
    )
    assert played.is_sound, played
    missing = played.calls - events(played)["coll"]
    assert missing == (0 if at_replay else 95)


@pytest.mark.parametrize("release", ["2.27", "2.28"])
def test_communicators_of_one_group_are_created_at_once(release: str, play_wilful: Player) -> None:
    played = play_wilful(environment=ACTS, ranks=4, comms=8, create_at_once=1, release=release)
    assert played.is_sound, played
    assert len(played.communicators) == 14
    log = played.ranks[0].log
    assert sum("tuner v" in line for line in log) == sum("profiler v" in line for line in log) == 8


def test_communicators_come_and_go(play_wilful: Player) -> None:
    played = play_wilful(environment=ACTS, ranks=4, comms=5, threads=3, lifetime=150)
    assert played.is_sound, played
    assert {comm.generations for comm in played.communicators} == {7}
    ids = [line.split()[3] for line in played.ranks[0].log if "tuner id" in line]
    assert len(set(ids)) == len(ids) == 35


def test_a_killed_rank_ends_the_job_and_is_told(play_wilful: Player) -> None:
    played = play_wilful(*at(100, "kill", rank=2), environment=ACTS, ranks=4, watchdog=0.3)
    assert played.ranks[2].signal == 9
    assert played.abnormal_exits == 0  # it was told to
    assert not played.hit_deadline
    assert played.disagreements == 0
    assert played.calls < 200  # the others wait for it, as for a GPU's queue, and then abort
    assert [rank.exit for rank in played.ranks] == [0, 0, None, 0]
    going_on = play_wilful(*at(100, "kill", rank=2), environment=ACTS, ranks=4, survivors_go_on=1)
    assert going_on.calls >= 1000


def test_a_rank_waits_inside_the_plugin_and_is_aborted(play_wilful: Player) -> None:
    waits = {"WILFUL_WAIT_AT": "80"}
    alone = play_wilful(*on_rank(1, waits), environment=ACTS, ranks=3, deadline=2)
    assert alone.hit_deadline  # nobody is lost, so nobody aborts
    played = play_wilful(
        *on_rank(1, waits), *at(80, "abort=0.4", rank=1), environment=ACTS, ranks=3, watchdog=0.2
    )
    assert not played.hit_deadline
    assert played.asked_longest_ms > 100
    assert all(any("tuner finalize" in line for line in rank.log) for rank in played.ranks)


def test_a_job_may_end_without_destroying(play_wilful: Player) -> None:
    played = play_wilful(environment=ACTS, ranks=2, destroy=0)
    assert played.is_sound, played
    assert "finalize" not in played.log


def test_a_forked_child_is_no_rank(play_wilful: Player) -> None:
    played = play_wilful(*every(100, "fork", rank="all"), environment=ACTS, ranks=2)
    assert played.is_sound, played


def test_a_stopped_rank_goes_on(play_wilful: Player) -> None:
    played = play_wilful(*at(100, "stop=0.5", rank=1), environment=ACTS, ranks=4)
    assert played.is_sound, played
    assert played.raw["wall_s"] > 0.5
    assert played.calls >= 1000


def test_a_job_that_hangs_is_ended(play_wilful: Player) -> None:
    played = play_wilful(*at(10, "sleep=60", rank=0), environment=ACTS, ranks=4, deadline=1)
    assert played.hit_deadline
    assert played.abnormal_exits == 4
    assert not played.is_sound


def test_what_is_not_an_option_is_refused(play_wilful: Player) -> None:
    for words in (["--rank", "2"], ["--at", "5:jump"], ["--ranks", "x"], ["--release", "2.20"]):
        with pytest.raises(AssertionError, match="play_job: "):
            play_wilful(*words, environment={})
