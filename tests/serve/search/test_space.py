"""Subspaces, ordered knobs, and what is not there."""

import pytest

from dynamiccl.nccl import Algorithm, Config, Protocol, Transport
from dynamiccl.serve.search.autoccl import DEFAULT, Choice, SearchSpace
from tests.serve.search.worlds import CELLS, CHANNELS, CHUNKS, grid

RING = Algorithm.Ring, Protocol.Simple


def ring(*channels: int | None) -> list[Choice]:
    return [Choice(Config(*RING, n)) for n in channels]


def test_cells_are_subspaces_and_transports_too() -> None:
    space = grid()
    assert len(space.subspaces) == len(CELLS)
    assert {len(actions) for actions in space.subspaces} == {len(CHANNELS) * len(CHUNKS)}
    assert space.subspace_of[space.default] == -1
    two = SearchSpace(
        [DEFAULT, *(Choice(Config(*RING, 2), transport=t) for t in (Transport.P2P, Transport.SHM))]
    )
    assert len(two.subspaces) == 2


def test_a_knob_that_is_left_to_nccl_is_its_largest() -> None:
    space = SearchSpace([DEFAULT, *ring(None, 1, 16, 4)])
    assert [space.step(1, 0, -1), space.step(3, 0, 1)] == [3, 1]
    assert space.step(1, 0, 1) is None


def test_a_step_passes_over_holes_and_stops_at_the_end() -> None:
    configs = [(1, 10), (2, 10), (4, 10), (1, 20), (4, 20)]
    space = SearchSpace([DEFAULT, *(Choice(Config(*RING, n, c)) for n, c in configs)])
    assert space.step(4, 0, 1) == 5  # 2 channels with chunk 20 is a hole
    assert space.step(1, 0, 5) == 3
    assert space.step(2, 2, 1) is None
    assert sorted(space.neighbours(1)) == [2, 4]
    assert space.neighbours(space.default) == []


def test_threads_are_an_axis_of_their_own() -> None:
    space = SearchSpace([DEFAULT, *(Choice(Config(*RING), n) for n in (128, 512, 256))])
    assert space.step(1, 1, 1) == 3
    assert space.step(1, 0, 1) is None


def test_a_descent_starts_at_what_ncclss_own_choice_runs() -> None:
    space = grid()
    number = space.default_subspace()
    assert number == CELLS.index(RING)
    config = space.choices[space.start(number)].config
    assert (config.num_channels, config.chunk_bytes) == (8, 1 << 18)
    unknown = SearchSpace([DEFAULT, *ring(1, None, 4)])
    assert unknown.start(0) == 2
    assert unknown.default_subspace() is None


def test_what_may_not_be_played_is_left_out_and_keeps_its_index() -> None:
    space = SearchSpace([DEFAULT, *ring(1, 2, 4)], playable=[1, 3])
    assert space.actions == (0, 1, 3)
    assert space.step(1, 0, 1) == 3
    assert space.subspace_of.tolist() == [-1, 0, -1, 0]


def test_spaces_that_cannot_be_searched_are_refused() -> None:
    with pytest.raises(ValueError, match="own choice"):
        SearchSpace(ring(1))
    with pytest.raises(ValueError, match="twice"):
        SearchSpace([DEFAULT, *ring(1, 1)])
    with pytest.raises(ValueError, match="cannot begin at Ring/Simple/2ch"):
        SearchSpace([DEFAULT, *ring(1, 2)], [1], begin=ring(2)[0])
