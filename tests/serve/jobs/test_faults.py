"""Jobs in both modes, and the recorder alone: what NCCL and jobs do that must split nothing."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from dynamiccl.libraries import ADAPTIVE_NAME, PROFILER_NAME, TUNER_NAME
from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from tests.serve.jobs.arbiter import OFTEN, arbiter_of
from tests.serve.jobs.conftest import Adaptive, Player, player_of
from tests.serve.jobs.play import ALL, Played, at, every, on_rank
from tests.serve.jobs.setting import JOB, Setting, shapes_of, write_artifact
from tests.serve.jobs.thinking import look, ranks_in, records_of

Play = Callable[..., Played]


@pytest.fixture(params=["table", "adaptive"])
def play(request: pytest.FixtureRequest, play_tuner: Player, play_adaptive: Adaptive) -> Play:
    """A job of four ranks."""

    def run(setting: Setting, *options: str, **named: object) -> Played:
        chosen: dict[str, Any] = JOB | {"ranks": 4} | named
        if request.param == "adaptive":
            return play_adaptive(setting, *options, **chosen)
        return play_tuner(*options, environment=setting.environment(), **chosen)

    return run


@pytest.mark.parametrize(("rank", "go_on"), [(0, 0), (2, 1)], ids=["all-abort", "survivors-go-on"])
def test_a_creation_that_is_aborted_splits_nothing(
    go_on: int, rank: int, play: Play, four_ranks: Setting
) -> None:
    """The others may have the table by then: they wait in a collective, for the job's watchdog."""
    played = play(
        four_ranks,
        release="2.28",
        comms=2,
        abort_creation=rank,
        survivors_go_on=go_on,
        watchdog=0.2,
    )
    world = played.communicators[0]
    assert (world.calls == JOB["calls"]) == bool(go_on)
    other = [comm for comm in played.communicators if comm.slot == 1]
    assert any(comm.acted for comm in other), played.log


@pytest.mark.parametrize("release", ["2.28", "2.30"])
def test_allgatherv_is_given_no_channels_that_are_not_there(
    release: str, play: Play, four_ranks: Setting
) -> None:
    """It asks about an AllGather and takes the number as the index of a channel."""
    many = Config(Algorithm.Ring, Protocol.LL128, 64)
    setting = replace(
        four_ranks, artifact=write_artifact(four_ranks.root / "many", many, shapes_of(4))
    )
    played = play(setting, *every(20, "bcasts=3", rank=ALL), release=release)
    assert played.acted > 0


Recording = Callable[..., tuple[Played, npt.NDArray[np.void]]]


@pytest.fixture
def record(job_build_dir: Path, four_ranks: Setting) -> Recording:
    """A job under the recorder alone (mode observe), and what it kept of rank 0."""

    def run(
        *options: str, percent: int = 100, **named: object
    ) -> tuple[Played, npt.NDArray[np.void]]:
        calls_dir = four_ranks.root / "calls"
        calls_dir.mkdir(mode=0o700)
        own = {"DYNAMICCL_CALLS_DIR": str(calls_dir), "DYNAMICCL_SAMPLE_PERCENT": str(percent)}
        played = player_of(job_build_dir, PROFILER_NAME)(
            *options, environment=four_ranks.environment() | own, **named
        )
        assert played.acted == 0
        assert len(list(calls_dir.iterdir())) == len(played.ranks)
        return played, records_of(calls_dir, 0)

    return run


def test_the_recorder_alone_agrees_on_nothing(record: Recording, tmp_path: Path) -> None:
    """Children write nothing into their parents' files."""
    seen, forks = tmp_path / "look", every(300, "fork", rank=ALL)
    record(*at(400, look(seen), rank=ALL), *forks, ranks=4, rate=1000, calls=700)
    for rank in ranks_in(seen):
        assert re.findall("^dynamiccl.*", rank, re.MULTILINE) == ["dynamiccl-calls"]
    assert len(ranks_in(seen)) == 4


@pytest.mark.parametrize(
    ("release", "drop"), [("2.27", 0), ("2.28", 20), ("2.29", 20), ("2.30", 0)]
)
def test_all_calls_are_heard_of_and_those_that_lose_no_event_are_timed(
    drop: int, release: str, record: Recording
) -> None:
    played, records = record(ranks=2, release=release, max_group=1, rate=1000, kernel_drop=drop)
    assert len(records) == played.calls
    # From 2.29 on a Broadcast is heard of by its call alone.
    is_told = (records["collective"] != Collective.Broadcast) | (release in {"2.27", "2.28"})
    is_timed = records["start_ns"] > 0
    assert not is_timed[~is_told].any()
    assert is_timed[is_told].mean() > 0.95 if drop == 0 else is_timed.mean() < 0.7


@pytest.mark.parametrize(("percent", "silent"), [(0, 95), (100, 76)])
def test_a_replay_is_heard_of_only_with_host_nodes(
    percent: int, silent: int, record: Recording
) -> None:
    """A graph has them that was captured while times were taken: the first of five."""
    captures = at(100, "capture=5,20", rank=ALL)
    played, records = record(*captures, percent=percent, ranks=2, max_group=1, rate=1000, calls=500)
    assert played.calls - len(records) == silent


ACTS = {"WILFUL_ACT_FROM": "100"}


def test_what_differs_and_what_nccl_does_not_survive_is_found(play_wilful: Player) -> None:
    played = play_wilful(environment=ACTS, ranks=4, comms=4, threads=2)
    assert [len(comm.ranks) for comm in played.communicators] == [4, 2, 2, 2, 2, 2, 2]
    assert all(comm.first_acted == 100 for comm in played.communicators)
    assert played.switches == 7  # from NCCL's own choice, once for each
    late = play_wilful(*on_rank(2, {"WILFUL_ACT_FROM": "101"}), environment=ACTS, ranks=4)
    assert (late.disagreements, late.acted_unevenly) == (1, 1)
    answers = late.first_disagreement
    assert [(answer["call"], answer["acted"]) for answer in answers] == [
        *((100, 1), (100, 1), (100, 0), (100, 1))
    ]
    assert (answers[2]["protocol"], answers[2]["num_channels"]) != (Protocol.LL, 3)
    for name, value, complaint in (
        ("CELL", "20", "wrote into the unavailable cell 20"),
        ("CHANNELS", "65", "asked for 65 channels"),
        ("LOG_FROM_THREAD", "1", "logged from a thread of its own"),
    ):
        wilful = ACTS | {f"WILFUL_{name}": value}
        played = play_wilful(environment=wilful, ranks=2, release="2.30", calls=300)
        assert any(complaint in text for text in played.ranks[0].violations)


def test_marks_are_told_as_nccl_tells_them_and_what_hangs_is_ended(play_wilful: Player) -> None:
    """This plugin counts, and agrees on nothing."""
    shifted = play_wilful(*at(50, "simulate=8", rank=1), environment=ACTS, ranks=4)
    assert 0 < shifted.disagreements <= 8
    both = play_wilful(*at(100, "capture=5,20", rank=ALL), environment=ACTS, ranks=4)
    assert both.is_sound, both
    assert both.ranks[0].asked == both.ranks[1].asked < both.calls
    played = play_wilful(*at(10, "sleep=60", rank=0), environment=ACTS, ranks=4, deadline=1)
    assert (played.hit_deadline, played.abnormal_exits, played.is_sound) == (True, 4, False)


DEVICE: Final = "cable"
ADDRESSES: Final = ("10.77.13.1", "10.77.13.2")


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], check=False, capture_output=True).returncode == 0


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Names of two namespaces, in which the other one is at the end of a cable."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and ip")
    both = (f"job-a-{os.getpid()}", f"job-b-{os.getpid()}")
    if not all(ip("netns", "add", node) for node in both):
        pytest.skip("no network namespaces here")
    try:
        cable = ("link", "add", DEVICE, "netns", both[0], "type", "veth", "peer", "name", DEVICE)
        assert ip(*cable, "netns", both[1])
        for node, address in zip(both, ADDRESSES, strict=True):
            assert ip("-n", node, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                assert ip("-n", node, "link", "set", device, "up")
        yield both
    finally:
        for node in both:
            ip("netns", "delete", node)


@pytest.mark.parametrize(
    ("library", "call"),
    [(TUNER_NAME, 0), (TUNER_NAME, 1000), (ADAPTIVE_NAME, 60), (ADAPTIVE_NAME, 600)],
)
def test_a_cut_that_heals_splits_and_fails_nobody(
    call: int, library: str, nodes: tuple[str, str], job_build_dir: Path, two_nodes: Setting
) -> None:
    """The arbiter is on the first node; communicators are made anew while the cable is down."""
    cable = f"ip netns exec {nodes[1]} ip link set {DEVICE}"
    cut = f"sh={cable} down; (sleep 1.5; {cable} up) &"
    places = [("--netns", f"{rank}:{nodes[rank // 4]}") for rank in range(8)]
    with arbiter_of(job_build_dir, two_nodes, within=("ip", "netns", "exec", nodes[0])) as arbiter:
        played = player_of(job_build_dir, library)(
            *chain.from_iterable(places),
            *at(call, cut),
            environment=two_nodes.by_arbiter(f"{ADDRESSES[0]}:{arbiter.port}") | OFTEN,
            release="2.30",
            ranks=8,
            nodes=2,
            comms=2,
            lifetime=1000,
            rate=1000,
            calls=4000,
            deadline=60,
        )
    assert all(comm.generations_acted > 0 for comm in played.communicators), played.log
    assert any(comm.switches for comm in played.communicators) == (library == ADAPTIVE_NAME)
