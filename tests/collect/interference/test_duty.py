import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamiccl.collect.interference import duty
from dynamiccl.collect.interference.cpu import shares


@given(busy=st.floats(1e-4, 1.0), level=st.floats(0.01, 1.0))
def test_rest_makes_the_level_the_share_of_busy_time(busy: float, level: float) -> None:
    assert busy / (busy + duty.idle_seconds(busy, level)) == pytest.approx(level)


@pytest.mark.parametrize("level", [0.0, -0.5, 1.5])
def test_other_levels_are_refused(level: float) -> None:
    with pytest.raises(ValueError, match="level is"):
        duty.idle_seconds(0.01, level)


def test_what_a_rest_overslept_is_taken_off_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    # Clock: work takes 1 s, the first rest takes 5 s where 1 s was asked, and so on.
    times = iter([0.0, 1.0, 6.0, 6.0, 7.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    asked: list[float] = []

    def rest(seconds: float) -> bool:
        asked.append(seconds)
        return len(asked) == 2

    duty.repeat(lambda: None, 0.5, rest)
    assert asked == [1.0, 0.0]


def test_work_is_repeated_until_it_is_over() -> None:
    done, rests = [], itertools.count(1)
    duty.repeat(lambda: done.append(1), 1.0, lambda _: next(rests) == 3)
    assert len(done) == 3


@given(level=st.floats(0.001, 1.0), cores=st.integers(1, 512))
def test_shares_of_cores_add_up_to_the_level(level: float, cores: int) -> None:
    parts = shares(level, cores)
    assert sum(parts) == pytest.approx(level * cores, abs=1e-6)
    assert all(0 < part <= 1 for part in parts)
    assert len(parts) <= cores
