"""Jobs in both modes, and the recorder alone: what NCCL and jobs do that must split nothing."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dynamiccl.libraries import PROFILER_NAME
from dynamiccl.nccl import Algorithm, Config, Protocol
from tests.serve.jobs.conftest import Adaptive, Player, Tuner, player_of
from tests.serve.jobs.play import ALL, at, every, on_rank
from tests.serve.jobs.setting import Setting, shapes_of, write_artifact
from tests.serve.jobs.thinking import look, ranks_in, records_of

Play = Tuner | Adaptive


@pytest.fixture(params=["table", "adaptive"])
def play(request: pytest.FixtureRequest, tuner: Tuner, adaptive: Adaptive) -> Play:
    """A job of mode table or of mode adaptive."""
    return tuner if request.param == "table" else adaptive


@pytest.mark.parametrize(("rank", "go_on"), [(0, 0), (2, 1)], ids=["all-abort", "survivors-go-on"])
def test_a_creation_that_is_aborted_splits_nothing(go_on: int, rank: int, play: Play) -> None:
    """The others may have the table by then: they wait in a collective, for the job's watchdog."""
    played = play(
        release="2.28",
        comms=2,
        abort_creation=rank,
        survivors_go_on=go_on,
        watchdog=0.2,
        calls=4000,
    )
    world = played.communicators[0]
    assert (world.calls == 4000) == bool(go_on)
    other = [comm for comm in played.communicators if comm.slot == 1]
    assert any(comm.acted for comm in other), played.log


@pytest.mark.parametrize("release", ["2.28", "2.30"])
def test_allgatherv_is_given_no_channels_that_are_not_there(release: str, play: Play) -> None:
    """It asks about an AllGather and takes the number as the index of a channel."""
    many = Config(Algorithm.Ring, Protocol.LL128, 64)
    artifact = write_artifact(play.setting.root / "many", many, shapes_of(4))
    play = replace(play, setting=replace(play.setting, artifact=artifact))
    played = play(*every(20, "bcasts=3", rank=ALL), release=release)
    assert played.acted > 0


def test_the_recorder_alone_agrees_on_nothing(job_build_dir: Path, setting: Setting) -> None:
    """In mode observe. Children write nothing into their parents' files."""
    seen, calls = setting.root / "look", setting.root / "calls"
    calls.mkdir(mode=0o700)
    own = {"DYNAMICCL_CALLS_DIR": str(calls), "DYNAMICCL_SAMPLE_PERCENT": "100"}
    played = player_of(job_build_dir, PROFILER_NAME)(
        *at(400, look(seen), rank=ALL),
        *every(300, "fork", rank=ALL),
        environment=setting.environment() | own,
        ranks=4,
        rate=1000,
        calls=700,
        max_group=1,
        release="2.28",
        kernel_drop=20,
    )
    assert played.acted == 0
    assert len(list(calls.iterdir())) == 4
    records = records_of(calls, 0)
    assert len(records) == played.calls
    assert 0.1 < (records["start_ns"] > 0).mean() < 0.7  # not of calls that lost an event
    for rank in ranks_in(seen):
        assert re.findall("^dynamiccl.*", rank, re.MULTILINE) == ["dynamiccl-calls"]
    assert len(ranks_in(seen)) == 4


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
