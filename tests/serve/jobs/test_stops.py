"""Jobs in mode adaptive: tables change inside calls, in which all ranks vote (agree/stops.h)."""

import signal
import time
from pathlib import Path
from typing import Any, Final

import pytest

from dynamiccl.libraries import ADAPTIVE_NAME
from tests.serve.jobs.arbiter import REPLY_BYTES, Between
from tests.serve.jobs.conftest import Adaptive
from tests.serve.jobs.play import ALL, at, every, on_rank
from tests.serve.jobs.setting import JOB


@pytest.mark.parametrize(
    ("options", "named", "least"),
    [
        ((), {"release": "2.28"}, 4),
        ((), {"nodes": 2}, 4),
        # From call 10 on all that is asked about is captured: so is the call of each stop. What a
        # graph replays is not counted.
        (every(5, "capture=5,2", rank=ALL), {"max_group": 1}, 0),
        ((), {"comms": 2, "opposite": 1, "run_ahead": 256}, 1),
    ],
    ids=["one-node", "two-nodes", "captured", "opposite-order"],
)
def test_probes_switch_there_and_back(
    options: tuple[str, ...], named: dict[str, Any], least: int, adaptive: Adaptive
) -> None:
    """NCCL's own choice for a moment, again and again; the table is there from call 0."""
    played = adaptive(*options, **named)
    assert 0 < played.acted < played.calls
    for comm in played.communicators:
        assert comm.first_acted == 0
        assert comm.switches >= least, played


NO_PROFILER: Final = {"NCCL_PROFILER_PLUGIN": None}
#: Why -> the release, the environment of all ranks, and options.
ABSTAINING: Final[dict[str, tuple[str, dict[str, str], list[str]]]] = {
    "mode adaptive needs NCCL 2.28 or later": ("2.27", {}, []),
    "another release of NCCL than": ("2.31", {}, []),
    "NCCL_COMM_ID is set": ("2.30", {"NCCL_COMM_ID": "127.0.0.1:1"}, []),
    "NCCL_PROFILER_PLUGIN does not name this library": ("2.30", {}, on_rank(2, NO_PROFILER)),
    "3 of 4 ranks voted in time": ("2.30", {}, on_rank(2, {"DYNAMICCL_DISABLE": "1"})),
}


@pytest.mark.parametrize("why", ABSTAINING)
def test_who_cannot_vote_leaves_nccls_own_choice(why: str, adaptive: Adaptive) -> None:
    release, environment, options = ABSTAINING[why]
    played = adaptive(*options, environment=environment, release=release, calls=2000)
    assert played.acted == 0
    assert why in played.log


def test_two_builds_of_one_version_share_no_table(adaptive: Adaptive, tmp_path: Path) -> None:
    """Rank 2 loads a library whose sources had another digest."""
    header = (adaptive.directory / "generated" / "build_digest.h").read_text()
    digest = header.partition('"')[2].partition('"')[0].encode()
    library = (adaptive.directory / ADAPTIVE_NAME).read_bytes()
    assert library.count(digest) == 1
    (tmp_path / ADAPTIVE_NAME).write_bytes(library.replace(digest, digest[::-1]))
    own = str(tmp_path / ADAPTIVE_NAME)
    variables = {"NCCL_TUNER_PLUGIN": own, "NCCL_PROFILER_PLUGIN": own}
    played = adaptive(*on_rank(2, variables))
    assert played.acted == 0
    assert "rank 2" in played.log
    assert "plugin" in played.log


@pytest.mark.parametrize(
    "what",
    [
        at(1500, "simulate=3", rank=1),
        at(1500, "simulate=1", rank=1) + at(1500, "p2p", rank=ALL),
        every(700, "simulate=1", rank=ALL),
        at(1500, "capture=5,20", rank=ALL),
        at(1500, "capture=5,20", rank=1),
        every(4, "capture=4,2", rank=ALL),
        every(100, "p2p", rank=1),
        at(1500, "bcasts=3", rank=ALL),
        every(50, "symmetric=2", rank=1),
        every(500, "fork", rank=1),
    ],
    ids=lambda what: "-".join(part for each in what[1::2] for part in each.split(":")[1::2]),
)
def test_what_makes_counts_differ_splits_nothing(what: tuple[str, ...], adaptive: Adaptive) -> None:
    """All calls are equal: nothing but NCCL's marks tells one from the next."""
    adaptive(*what, pattern=1)


@pytest.mark.parametrize(("lifetime", "calls"), [(1, 60), (1500, 6000)])
def test_communicators_come_and_go(lifetime: int, calls: int, adaptive: Adaptive) -> None:
    played = adaptive(calls=calls, comms=5, threads=2, lifetime=lifetime, create_at_once=1)
    assert all(comm.first_acted == 0 for comm in played.communicators), played.log


@pytest.mark.parametrize("seed", range(2))
def test_disjoint_shrinks_split_nothing(seed: int, adaptive: Adaptive) -> None:
    """Their members' processes vote no more, and keep the tables that they have."""
    played = adaptive(comms=2, shrinks=1, seed=seed)
    world, *halves = played.communicators
    assert world.acted == world.calls
    assert [half.acted for half in halves] == [0] * len(halves)
    assert "a communicator was shrunk before" in played.log


def test_an_abort_wakes_a_call_that_waits_at_a_stop(adaptive: Adaptive) -> None:
    """All ranks confirm at their first stop, and no answer of the arbiter's comes any more.

    NCCL finalizes the tuner while the call is inside, for up to the answer limit of 30 s here.
    """
    answers = [2 * REPLY_BYTES] * 4 + [REPLY_BYTES] * 4  # in `init`; "still there?" alone
    for _ in range(3):
        with (
            adaptive.arbiter(DYNAMICCL_PROBE_CALLS="0") as arbiter,
            Between(arbiter.port, answers=answers) as cutter,
        ):
            played = adaptive.under(
                cutter.address,
                *at(60, "abort=3", rank=1),
                watchdog=0.2,
                law="alike",
            )
        if played.asked_longest_ms > 500:
            break  # else a rank was late on a busy machine: the stop failed before they confirmed
    # The first stop is 500 calls on: a second of it on a busy machine.
    assert 500 < played.asked_longest_ms < 5000, played
    assert cutter.num_connections > 2 * 4, "they have not asked again"


@pytest.mark.parametrize(
    ("call", "go_on"),
    [
        pytest.param(0, 1, id="survivors-go-on"),
        pytest.param(64, 0, id="all-abort"),
        pytest.param(1500, 1, id="survivors-go-on-later"),
    ],
)
def test_a_killed_rank_is_noticed_at_once(call: int, go_on: int, adaptive: Adaptive) -> None:
    kill = at(call, "kill", rank=2)
    began = time.monotonic()
    played = adaptive(
        *kill,
        comms=2,
        survivors_go_on=go_on,
        watchdog=0.2,
        run_ahead=1000,
        law="alike",
    )
    assert played.ranks[2].exit == -signal.SIGKILL
    assert played.asked_longest_ms < 2000, played
    assert time.monotonic() - began < 8 + 4 * go_on


def test_without_an_arbiter_the_table_stays(adaptive: Adaptive) -> None:
    """Both processes are killed between two stops: nothing fails, and nothing changes any more."""
    with adaptive.arbiter(DYNAMICCL_PROBE_CALLS="0") as arbiter:
        kill = f"sh=kill -9 {' '.join(map(str, arbiter.processes()))}"
        played = adaptive.under(arbiter.address, *at(500, kill))
    assert played.acted == played.calls


@pytest.mark.parametrize(
    ("percent", "calls", "most", "least"), [("0.1", 6000, 3, 0), ("100", 2000, 1000, 5)]
)
def test_stops_take_no_more_time_than_they_may(
    percent: str, calls: int, most: int, least: int, adaptive: Adaptive
) -> None:
    """Ranks wait for each other at each stop, and in six seconds they may for 6 ms."""
    chosen = {"DYNAMICCL_STOP_PERCENT": percent}
    with (
        adaptive.arbiter(**chosen) as arbiter,
        Between(arbiter.port) as cutter,
    ):
        played = adaptive.under(
            cutter.address,
            environment=chosen,
            jitter_us=300,
            run_ahead=8,
            rate=1000,
            calls=calls,
        )
    # One for each rank's `init`, and one for each stop at which it voted.
    stops = cutter.num_connections / 4 - 1
    assert least <= stops <= most, played


def test_ranks_on_one_thread_never_wait_for_each_other(adaptive: Adaptive) -> None:
    """The second context of an id in a process ends voting: the first table stays."""
    with (
        adaptive.arbiter() as arbiter,
        Between(arbiter.port) as cutter,
    ):
        played = adaptive.under(cutter.address, ranks=8, rate=0, one_thread=1)
    assert played.acted == played.calls >= JOB["calls"]
    assert cutter.num_connections == 8, played  # those of `init`
