"""The harness finds what is wrong with a job; the plugin here does what it is told."""

from dynamiccl.nccl import Protocol
from tests.serve.jobs.conftest import Player
from tests.serve.jobs.play import ALL, at, on_rank

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
