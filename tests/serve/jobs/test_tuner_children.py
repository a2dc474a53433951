"""The tuner under all ways in which NCCL makes communicators: one choice on all ranks of each."""

from typing import Final

import pytest

from tests.serve.jobs.conftest import Player
from tests.serve.jobs.play import Played, at, every
from tests.serve.jobs.setting import Setting

SHORT: Final = {"ranks": 4, "rate": 4000, "calls": 400}
#: Splits of the world by three colourings, splits of a colouring again, one more world.
SPLITS: Final = {"comms": 8}


def assert_all_acted(played: Played) -> None:
    assert played.is_sound, played
    for comm in played.communicators:
        assert comm.acted == comm.calls > 0, played.log


@pytest.mark.parametrize(
    ("actions", "named"),
    [
        pytest.param((), SPLITS, id="split-and-split-again"),
        pytest.param((), SPLITS | {"create_at_once": 1}, id="in-one-group"),
        pytest.param((), SPLITS | {"threads": 4}, id="threads"),
        pytest.param((), SPLITS | {"lifetime": 100}, id="destroyed-and-made-anew"),
        pytest.param((), {"comms": 5, "max_group": 1, "pattern": 1}, id="one-call-again-and-again"),
        pytest.param(every(150, "fork", rank="all"), SPLITS, id="forks"),
        pytest.param(every(100, "p2p", rank="all"), {"comms": 2}, id="send-and-receive"),
        pytest.param(at(100, "capture=5,20", rank=1), {"comms": 2}, id="one-rank-captures"),
        pytest.param(at(100, "simulate=5", rank=1), {"comms": 2}, id="one-rank-simulates"),
    ],
)
@pytest.mark.parametrize("release", ["2.27", "2.30"])
def test_all_ranks_of_a_communicator_run_the_same(
    actions: tuple[str, ...],
    named: dict[str, object],
    release: str,
    play_tuner: Player,
    four_ranks: Setting,
) -> None:
    played = play_tuner(
        *actions, environment=four_ranks.environment(), release=release, **(SHORT | named)
    )
    assert_all_acted(played)


@pytest.mark.parametrize("release", ["2.28", "2.29", "2.30"])
def test_broadcasts_of_several_roots_stay_within_the_channels(
    release: str, play_tuner: Player, four_ranks: Setting
) -> None:
    """From 2.29 on an AllGatherV, which takes a tuner's number as the index of a channel."""
    played = play_tuner(
        *every(50, "bcasts=3", rank="all"),
        environment=four_ranks.environment(),
        release=release,
        **SHORT,
    )
    assert_all_acted(played)


@pytest.mark.parametrize("release", ["2.27", "2.30"])
@pytest.mark.parametrize("lifetime", [0, 100])
def test_what_comes_of_two_disjoint_shrinks_abstains(
    release: str, lifetime: int, play_tuner: Player, four_ranks: Setting
) -> None:
    """Both halves shrink the world at once, under one id, and split that, under one id again.

    With a lifetime each does it again, as one does whose shrink failed, and a process that has been
    in a shrink has no new table of the world's next ones either.
    """
    played = play_tuner(
        environment=four_ranks.environment(),
        release=release,
        comms=4,
        shrinks=1,
        lifetime=lifetime,
        **SHORT,
    )
    assert played.is_sound, played
    for comm in played.communicators:
        assert comm.first_acted == (0 if comm.slot == 0 else None), played.log
        assert comm.generations_acted == (comm.slot == 0), played.log


@pytest.mark.soak
@pytest.mark.parametrize("release", ["2.27", "2.30"])
def test_communicators_are_destroyed_and_made_a_thousand_times(
    release: str, play_tuner: Player, four_ranks: Setting
) -> None:
    played = play_tuner(
        environment=four_ranks.environment(),
        release=release,
        ranks=4,
        comms=4,
        threads=2,
        calls=11_000,
        lifetime=10,
        deadline=300,
    )
    assert_all_acted(played)
    assert min(comm.generations for comm in played.communicators) >= 1000
