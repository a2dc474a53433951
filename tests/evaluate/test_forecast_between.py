"""What sizes between measured ones gain, where NCCL's own choice stays and where it changes."""

import numpy as np
import pytest

from dynamiccl.evaluate.forecast.between import AtSize, Choice, Found, between
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from tests.rows import MIB

TREE, RING = (Algorithm.Tree, Protocol.LL128), (Algorithm.Ring, Protocol.Simple)
CONFIGS = (ABSTAIN, Config(*TREE), Config(*RING))
RUNS = ("a", "b", "c")


def task(size: int, tree: float, ring: float, ran: Choice | None) -> AtSize:
    """Gains of both configs over NCCL's own choice, the same in all runs."""
    logs = np.repeat([[0.0], [tree], [ring]], len(RUNS), axis=1)
    return AtSize(size, logs, RUNS, 100.0, 0.0, ran)


def found(tasks: list[AtSize], size: int, ran: Choice | None = None) -> Found:
    answer = between(tasks, size, CONFIGS, ran)
    assert isinstance(answer, Found)
    return answer


def test_under_one_choice_gains_are_the_mean_by_distance() -> None:
    both = [task(MIB, 0.4, 0.0, RING), task(4 * MIB, 0.2, 0.0, RING)]
    answer = found(both, 2 * MIB)
    assert answer.logs[1] == pytest.approx(0.3)
    assert answer.sizes == (MIB, 4 * MIB)
    assert answer.blur[1] == pytest.approx(0.5 * 0.25 * 0.2)


def test_what_asks_for_nccls_own_choice_gains_nothing() -> None:
    assert found([task(MIB, 0.4, 0.07, RING)], MIB).logs[2] == pytest.approx(0.0)


def test_where_nccls_choice_changes_both_are_possible() -> None:
    """Tree below and Ring above: at the middle Tree gains 0 over Tree, or 0.2 over Ring."""
    both = [task(MIB, 0.0, -0.1, TREE), task(4 * MIB, 0.3, 0.0, RING)]
    answer = found(both, 2 * MIB)
    over_ring = 0.5 * (0.3 + 0.1)
    assert answer.logs[1] == pytest.approx(over_ring / 2)
    assert answer.blur[1] == pytest.approx(over_ring / 2)
    assert answer.logs[0] == pytest.approx(0.0)


def test_the_jobs_own_record_says_which_choice_it_was() -> None:
    both = [task(MIB, 0.0, -0.1, TREE), task(4 * MIB, 0.3, 0.0, RING)]
    assert found(both, 2 * MIB, RING).logs[1] == pytest.approx(0.2)
    assert found(both, 2 * MIB, TREE).logs[1] == pytest.approx(0.0)


def test_a_job_that_ran_something_else_is_not_covered() -> None:
    other = (Algorithm.NVLS, Protocol.Simple)
    answer = between([task(MIB, 0.4, 0.0, RING)], MIB, CONFIGS, other)
    assert answer == "NCCL ran NVLS/Simple in the job and Ring/Simple in the sweep"


def test_beyond_an_octave_nothing_is_known_and_within_one_it_is_blurred() -> None:
    tasks = [task(MIB, 0.4, 0.0, RING), task(2 * MIB, 0.2, 0.0, RING)]
    answer = found(tasks, 3 * MIB)
    assert answer.logs[1] == pytest.approx(0.2)
    # Tree's gain falls by 0.2 an octave here and Ring's by nothing.
    assert answer.blur[1] == pytest.approx(np.log2(1.5) * np.sqrt(0.2**2 / 2))
    assert "within an octave" in str(between(tasks, 5 * MIB, CONFIGS, None))
