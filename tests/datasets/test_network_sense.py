import numpy as np
import pytest

from dynamiccl.datasets.features import WINDOW_LENGTH
from dynamiccl.datasets.network_sense import NetworkSense, Windowed
from tests.datasets.test_features import call, history


def test_nothing_is_known_before_the_first_transfer() -> None:
    sense = NetworkSense()
    assert (sense.ebb_gbytes_per_s, sense.btlbw.value, sense.bdp_bytes) == (None, None, None)


def test_a_window_forgets_what_is_older_than_it() -> None:
    least = Windowed(min, 3)
    seen = []
    for value in (5.0, 1.0, 4.0, 3.0, 6.0, 7.0):
        least.add(value)
        seen.append(least.value)
    assert seen == [5.0, 1.0, 1.0, 1.0, 3.0, 3.0]


def test_a_longer_route_moves_rtprop_once_the_old_one_has_expired() -> None:
    sense = NetworkSense(rtprop_window=4)
    for time_us in (100.0, 300.0, 300.0, 300.0):
        sense.add(1000.0, time_us)
    assert sense.rtprop.value == 100.0
    sense.add(1000.0, 300.0)
    assert sense.rtprop.value == 300.0


def test_by_hand() -> None:
    sense = NetworkSense()
    # 16000 B: in 8 us 2 GB/s, in 16 us 1 GB/s, in 4 us 4 GB/s.
    for time_us in (8.0, 4.0, 16.0):
        sense.add(16_000.0, time_us)
    assert (sense.ebb_gbytes_per_s, sense.btlbw.value, sense.rtprop.value) == (1.0, 4.0, 4.0)
    assert sense.bdp_bytes == 16_000.0


def test_the_stream_and_the_features_of_a_policy_say_the_same() -> None:
    numbers = np.random.default_rng(3)
    calls, sense = [], NetworkSense(WINDOW_LENGTH, WINDOW_LENGTH)
    for _ in range(20):
        size_bytes, time_us = int(numbers.integers(10_000, 99_999)), float(numbers.uniform(5, 50))
        calls.append(call(time_us, size_bytes=size_bytes))
        sense.add(size_bytes, time_us)
        _, values = history(*calls)
        assert sense.ebb_gbytes_per_s is not None
        assert sense.btlbw.value is not None
        assert sense.rtprop.value is not None
        assert values["log2_ebb"] == pytest.approx(np.log2(sense.ebb_gbytes_per_s), abs=1e-5)
        assert values["log2_btlbw"] == pytest.approx(np.log2(sense.btlbw.value), abs=1e-5)
        assert values["log2_rtprop"] == pytest.approx(np.log2(sense.rtprop.value), abs=1e-5)
        assert sense.bdp_bytes is not None
        assert values["inflight_over_bdp"] == pytest.approx(
            min(8.0, size_bytes / sense.bdp_bytes), rel=1e-5
        )
