"""How test_sweep_report.py judges, without a GPU."""

import numpy as np
import pytest

from tests.gpu.paired import Shift

NOISE = np.random.default_rng(5).normal(0.0, 0.02, 12)


def test_noise_is_no_shift() -> None:
    found = Shift.of(list(NOISE))
    assert found.is_none
    assert found.least_seen == pytest.approx(3 * 0.02 / np.sqrt(12), rel=0.5)


def test_pairs_that_all_differ_the_same_way_are_one() -> None:
    found = Shift.of(list(NOISE + 0.05))
    assert not found.is_none
    assert found.ratio == pytest.approx(1.05, abs=0.02)


def test_a_steady_shift_that_is_tiny_does_not_matter() -> None:
    found = Shift.of([0.001] * 12)
    assert found.p_value == pytest.approx(2 / 4096)
    assert found.is_none
