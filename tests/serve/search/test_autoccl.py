"""The space, and AutoCCL's search: every subspace, one valley each."""

import numpy as np
import pytest

from dynamiccl.nccl import Algorithm, Config, Protocol, Transport
from dynamiccl.serve.search.autoccl import DEFAULT, AutoCcl, Choice, SearchSpace
from tests.serve.search.worlds import CELLS, CHANNELS, CHUNKS, KEY, drive, grid, scatter, valleys

SPACE = grid()
TIMES = valleys(SPACE)
BEST = int(np.argmin(TIMES))


def test_descent_finds_the_best_where_every_subspace_has_one_valley() -> None:
    tuner = AutoCcl(lambda _: SPACE)
    assert not tuner.is_over(KEY)
    ran = drive(tuner, TIMES, 100)
    assert tuner.best(KEY) == ran[-1] == BEST
    assert tuner.is_over(KEY)
    probed = set(ran) - {SPACE.default}
    assert len({SPACE.choices[action].subspace for action in probed}) == 4
    assert len(probed) < len(SPACE.actions) / 2
    # Nothing is measured twice but the incumbent.
    others = [action for action in ran if action != BEST]
    assert len(others) == len(set(others))
    # It never searches again.
    tuner.alarm()
    assert tuner.is_over(KEY)


def test_candidates_are_repeated_as_told_and_their_median_counts() -> None:
    tuner = AutoCcl(lambda _: SPACE, repeats=3)
    ran = drive(tuner, TIMES, 240, noise=lambda call: 5.0 if call % 3 == 1 else 1.0)
    assert tuner.best(KEY) == BEST
    assert ran[:3] == [SPACE.default] * 3
    assert len(set(ran[3:6])) == 1


def test_time_of_another_action_is_no_answer_and_keys_are_searched_apart() -> None:
    tuner = AutoCcl(lambda _: SPACE)
    drive(tuner, TIMES, 2)
    wanted = tuner.ask(KEY)
    for _ in range(5):  # the decision takes effect some calls later
        tuner.tell(KEY, 1.0, SPACE.default)
        assert tuner.ask(KEY) == wanted
    tuner.tell(KEY, float(TIMES[wanted]), wanted)
    assert tuner.ask(KEY) != wanted
    ran: dict[str, list[int]] = {"a": [], "b": []}
    for key in ["a", "b", "b"] * 30:
        ran[key].append(tuner.ask(key))
        tuner.tell(key, float(TIMES[ran[key][-1]]))
    assert ran["a"] == ran["b"][:30]


def test_noise_misleads_it_and_it_never_looks_again() -> None:
    worse = 0
    for seed in range(20):
        tuner = AutoCcl(lambda _: SPACE)
        drive(tuner, TIMES, 400, noise=scatter(0.1, seed))
        worse += TIMES[tuner.best(KEY)] > 1.02 * TIMES[BEST]
    assert worse > 5


RING = Algorithm.Ring, Protocol.Simple


def ring(*channels: int | None) -> list[Choice]:
    return [Choice(Config(*RING, n)) for n in channels]


def test_cells_are_subspaces_and_transports_too_and_threads_an_axis_of_their_own() -> None:
    space = grid()
    assert {len(actions) for actions in space.subspaces} == {len(CHANNELS) * len(CHUNKS)}
    assert len(space.subspaces) == len(CELLS)
    ways = (Transport.P2P, Transport.SHM)
    two = SearchSpace([DEFAULT, *(Choice(Config(*RING, 2), transport=way) for way in ways)])
    assert len(two.subspaces) == 2
    threads = SearchSpace([DEFAULT, *(Choice(Config(*RING), n) for n in (128, 512, 256))])
    assert [threads.step(1, 1, 1), threads.step(1, 0, 1)] == [3, None]


def test_a_step_passes_over_holes_and_stops_at_the_end() -> None:
    configs = [(1, 10), (2, 10), (4, 10), (1, 20), (4, 20)]
    space = SearchSpace([DEFAULT, *(Choice(Config(*RING, n, c)) for n, c in configs)])
    assert space.step(4, 0, 1) == 5  # 2 channels with chunk 20 is a hole
    assert space.step(1, 0, 5) == 3
    assert space.step(2, 2, 1) is None
    assert sorted(space.neighbours(1)) == [2, 4]
    assert space.neighbours(space.default) == []
    # A knob that is left to NCCL is its largest; what may not be played keeps its index.
    space = SearchSpace([DEFAULT, *ring(None, 1, 16, 4)])
    assert [space.step(1, 0, by) for by in (-1, 1)] + [space.step(3, 0, 1)] == [3, None, 1]
    space = SearchSpace([DEFAULT, *ring(1, 2, 4)], playable=[1, 3])
    assert (space.actions, space.subspaces, space.step(1, 0, 1)) == ((0, 1, 3), ((1, 3),), 3)


def test_a_descent_starts_at_what_ncclss_own_choice_runs() -> None:
    space = grid()
    number = space.default_subspace()
    assert number == CELLS.index(RING)
    config = space.choices[space.start(number)].config
    assert (config.num_channels, config.chunk_bytes) == (8, 1 << 18)
    unknown = SearchSpace([DEFAULT, *ring(1, None, 4)])
    assert unknown.start(0) == 2
    assert unknown.default_subspace() is None


def test_spaces_that_cannot_be_searched_and_times_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="own choice"):
        SearchSpace(ring(1))
    with pytest.raises(ValueError, match="twice"):
        SearchSpace([DEFAULT, *ring(1, 1)])
    with pytest.raises(ValueError, match=r"0\.0 us"):
        AutoCcl(lambda _: SPACE).tell(KEY, 0.0)
    with pytest.raises(ValueError, match="cannot begin at Ring/Simple/2ch"):
        SearchSpace([DEFAULT, *ring(1, 2)], [1], begin=ring(2)[0])
