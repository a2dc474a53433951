"""Thresholds keep the rate of false alarms that was wanted, and the bars are met."""

import numpy as np
import pytest
from bench_trigger import count_false_alarms

from dynamiccl.train.policy import script
from dynamiccl.train.trigger import RUNGS, TriggerModule
from dynamiccl.train.trigger_fit import (
    Peaks,
    delays_of,
    find_peaks,
    scale_of_rung,
    watch_with,
)
from tests.train.trigger.streams import Calibration, made_up_series, t3


def test_peaks_are_the_largest_values_between_rests() -> None:
    peaks = Peaks(2)
    for first, second in ((1, 0), (3, 2), (0, 5), (4, 0), (0, 1)):
        values = np.array([first, second], dtype=float)
        peaks.take(values, values <= 0)
    peaks.end()
    assert peaks.all().tolist() == [5.0, 4.0, 3.0, 1.0]
    assert peaks.calls == 10


def test_a_threshold_in_the_middle_is_read_off_and_one_in_the_tail_is_extrapolated() -> None:
    peaks = Peaks(50_000)
    with pytest.raises(ValueError, match="never left its rest"):
        peaks.threshold(0.1)
    drawn = np.random.default_rng(0).exponential(2.0, 50_000)
    peaks.take(drawn, np.ones(50_000, dtype=np.bool_))
    for share in (0.2, 0.02, 2e-4, 2e-6):
        assert peaks.threshold(share) == pytest.approx(-2.0 * np.log(share), abs=1.5)


def test_rarer_alarms_and_smaller_reference_values_need_higher_thresholds() -> None:
    module = TriggerModule(0.1).eval()
    before = module.thresholds.tolist()
    peaks = find_peaks(module, made_up_series(), 100_000, seed=0)
    assert len(peaks) == len(RUNGS)
    assert module.thresholds.tolist() == before
    for each in peaks:
        assert each.threshold(1e-6) > each.threshold(1e-5) > each.threshold(1e-3) > 0.0
    thresholds = [each.threshold(1e-4) for each in peaks]
    assert thresholds == sorted(thresholds)


@pytest.fixture(scope="module", params=[200_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def calls(request: pytest.FixtureRequest) -> int:
    """By how many calls thresholds are calibrated, and on how many they are tried."""
    return int(request.param)


@pytest.fixture(scope="module")
def calibration(calls: int) -> Calibration:
    return Calibration(made_up_series(), calls)


@pytest.mark.parametrize("sigma", [0.02, 0.1, scale_of_rung(0.25)])
def test_a_wanted_rate_of_false_alarms_is_kept_on_calls_that_are_fresh(
    sigma: float, calls: int, calibration: Calibration
) -> None:
    module = script(calibration.trigger(per_call=2e-5))
    quiet = t3(np.random.default_rng(5), 256 + calls // 500, 500, sigma) + np.float32(5.0)
    onsets, _ = count_false_alarms(watch_with(module, 500), quiet, 256)
    # Three times the Poisson deviation is allowed, and a fifth for the threshold's own.
    wanted = 2e-5 * calls
    assert onsets <= 1.2 * wanted + 3.0 * np.sqrt(wanted) + 1.0


@pytest.mark.soak
def test_the_bars_are_met_at_sigma_0_1(calls: int, calibration: Calibration) -> None:
    module = script(calibration.trigger(per_call=0.5e-5))
    random = np.random.default_rng(6)
    quiet = t3(random, 256 + calls // 500, 500, 0.1) + np.float32(5.0)
    onsets, _ = count_false_alarms(watch_with(module, 500), quiet, 256)
    assert 1e5 * onsets / quiet[256:].size <= 1.0
    for factor, bar in ((1.5, 10), (1.15, 60)):
        streams = t3(random, 256 + 300, 1_024, 0.1) + np.float32(5.0)
        streams[256:] += np.float32(np.log(factor))
        found = delays_of(watch_with(module, 1_024), streams, 256)
        assert len(found) >= 1_000
        assert np.median(found) <= bar


def test_delays_count_from_the_first_slow_call_and_leave_out_who_was_alarmed() -> None:
    alarms = iter(np.array([[0, 0, 1], [0, 0, 1], [1, 0, 1], [1, 0, 1]], dtype=bool))
    found = delays_of(lambda _times: next(alarms), np.zeros((4, 3), dtype=np.float32), 1)
    assert found.tolist() == [2.0, np.inf]


def test_false_alarms_are_counted_once_each() -> None:
    alarms = iter(np.array([[1, 0], [1, 1], [0, 1], [1, 0]], dtype=bool))
    found = count_false_alarms(lambda _times: next(alarms), np.zeros((4, 2), dtype=np.float32), 1)
    assert found == (2, 4)
