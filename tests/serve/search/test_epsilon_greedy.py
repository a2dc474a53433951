"""Epsilon-greedy on worlds whose best config is known."""

import numpy as np
import pytest

from dynamiccl.serve.search.epsilon_greedy import EpsilonGreedy
from dynamiccl.serve.search.tuner import State
from tests.serve.search.worlds import KEY, drive, grid, valleys

SPACE = grid()
TIMES = valleys(SPACE)
LEAST = float(TIMES.min())


def test_it_begins_where_the_space_does_and_settles_on_the_best() -> None:
    tuner = EpsilonGreedy(lambda _: SPACE, epsilon=0.2, seed=1)
    assert tuner.state(KEY) is State.IDLE
    ran = drive(tuner, TIMES, 4000)
    assert ran[0] == SPACE.begin
    assert TIMES[tuner.best(KEY)] == pytest.approx(LEAST)
    assert np.isclose(TIMES[ran[-1000:]], LEAST).mean() == pytest.approx(0.8, abs=0.05)
    assert set(ran) == set(SPACE.actions)
    assert tuner.state(KEY) is State.PROBING
    tuner.alarm()
    assert TIMES[tuner.best(KEY)] == pytest.approx(LEAST)


def test_a_decision_stands_until_a_call_of_it_is_told() -> None:
    tuner = EpsilonGreedy(lambda _: SPACE, epsilon=1.0, seed=3)
    first = tuner.ask(KEY)
    other = next(action for action in SPACE.actions if action != first)
    for _ in range(10):
        tuner.tell(KEY, 5.0, other)
        assert tuner.ask(KEY) == first
    tuner.tell(KEY, 5.0)
    assert len({tuner.ask(KEY) for _ in range(10)}) == 1
    with pytest.raises(ValueError, match=r"0\.0 us"):
        tuner.tell(KEY, 0.0)


def test_equal_seeds_search_alike() -> None:
    one, same, other = (
        drive(EpsilonGreedy(lambda _: SPACE, seed=s), TIMES, 200) for s in (4, 4, 5)
    )
    assert one == same != other
