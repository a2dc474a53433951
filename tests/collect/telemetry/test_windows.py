"""Verdicts on a stretch of time, and the rows that are kept of it."""

from datetime import UTC, datetime

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamiccl.collect.telemetry.samples import Key, ReadError, Samples, Series
from dynamiccl.collect.telemetry.windows import (
    UNKNOWN,
    Health,
    Window,
    health,
    telemetry_table,
    worst,
)
from dynamiccl.datasets.schema import TELEMETRY

REASONS = ("gpu0", "clock_event_reasons")
ECC = ("gpu0", "ecc_uncorrected_errors")
MIG = ("gpu0", "mig_mode")
IDLE, HOT, POWER_CAP, APP_CLOCKS = 0x1, 0x40, 0x4, 0x2


def series(*points: tuple[float, float]) -> Series:
    times, values = zip(*points, strict=True)
    return Series(np.array(times, dtype=np.float64), np.array(values, dtype=np.float64))


def samples(given: dict[Key, Series], *errors: ReadError) -> Samples:
    return Samples("n1", 10.0, given, errors)


def every_second(*values: float) -> Series:
    return series(*((float(t), v) for t, v in enumerate(values)))


@pytest.mark.parametrize(
    ("bits", "verdict"),
    [
        (IDLE, False),
        (APP_CLOCKS, False),
        (0, False),
        (HOT, True),
        (POWER_CAP | IDLE, True),
        (0x8, True),
        (0x20, True),
        (0x80, True),
        (0x10, False),
        (0x100, False),
    ],
)
def test_only_heat_and_power_count_as_throttling(bits: int, verdict: bool) -> None:
    steady = samples({REASONS: every_second(bits, bits, bits)})
    assert health(steady, 0.2, 1.8).throttled is verdict


def test_a_window_between_two_readings_is_judged_by_both() -> None:
    cooling = samples({REASONS: every_second(IDLE, HOT, IDLE, IDLE)})
    assert health(cooling, 1.2, 1.3).throttled is True
    assert health(cooling, 2.2, 2.3).throttled is False


def test_a_window_without_a_reading_on_one_side_is_not_known() -> None:
    ended = samples({REASONS: every_second(IDLE, IDLE)})
    assert health(ended, 0.5, 5.0).throttled is None
    assert health(ended, -3.0, 0.5).throttled is None


def test_a_hole_in_the_readings_is_not_known() -> None:
    stalled = samples({REASONS: series((0.0, IDLE), (1.0, IDLE), (9.0, IDLE), (10.0, IDLE))})
    assert health(stalled, 0.5, 9.5).throttled is None
    assert health(stalled, 9.2, 9.8).throttled is False


def test_what_was_seen_counts_even_when_the_rest_is_not_known() -> None:
    died_hot = samples({REASONS: every_second(IDLE, HOT), ECC: every_second(0, 2)})
    assert health(died_hot, 0.5, 50.0) == Health(throttled=True, ecc_errors=2, mig=None)


def test_one_gpu_of_the_node_is_enough() -> None:
    given = {
        REASONS: every_second(IDLE, IDLE, IDLE),
        ("gpu1", "clock_event_reasons"): every_second(IDLE, HOT, IDLE),
    }
    assert health(samples(given), 0.5, 1.5).throttled is True


def test_a_gpu_that_does_not_answer_leaves_the_others_unknown() -> None:
    denied = ReadError("gpu1", "clock_event_reasons", "Insufficient Permissions")
    lost = ReadError("gpu1", "nvml", "GPU is lost")
    good = {REASONS: every_second(IDLE, IDLE, IDLE)}
    assert health(samples(good, denied), 0.5, 1.5).throttled is None
    assert health(samples(good, lost), 0.5, 1.5).throttled is None


def test_an_error_that_passed_does_not_make_a_gpu_unknown() -> None:
    passing = ReadError("gpu0", "clock_event_reasons", "Timeout")
    steady = samples({REASONS: every_second(IDLE, IDLE, IDLE)}, passing)
    assert health(steady, 0.5, 1.5).throttled is False


def test_memory_errors_are_those_counted_inside_the_window() -> None:
    given = {
        ECC: every_second(5, 5, 7, 7, 8),
        ("gpu1", "ecc_uncorrected_errors"): every_second(0, 0, 1, 1, 1),
    }
    counted = samples(given)
    assert health(counted, 1.5, 2.5).ecc_errors == 3
    assert health(counted, 2.5, 2.9).ecc_errors == 0
    assert health(counted, 0.1, 3.9).ecc_errors == 4


def test_a_counter_that_began_anew_has_counted_what_it_shows() -> None:
    reloaded = samples({ECC: every_second(5, 5, 1, 1)})
    assert health(reloaded, 0.5, 2.5).ecc_errors == 1


def test_mig_is_a_mode_and_its_absence_an_answer() -> None:
    assert health(samples({MIG: every_second(1, 1)}), 0.1, 0.9).mig is True
    assert health(samples({MIG: every_second(0, 0)}), 0.1, 0.9).mig is False
    old = ReadError("gpu0", "mig_mode", "nvmlDeviceGetMigMode: Not Supported")
    denied = ReadError("gpu0", "mig_mode", "nvmlDeviceGetMigMode: Insufficient Permissions")
    assert health(samples({}, old), 0.1, 0.9).mig is False
    assert health(samples({}, denied), 0.1, 0.9).mig is None


def test_without_a_driver_nothing_is_known() -> None:
    none = ReadError("gpu", "nvml", "nvmlInit: NVML Shared Library Not Found")
    assert health(samples({}, none), 0.0, 1.0) == UNKNOWN


def test_a_bad_node_makes_the_window_bad_and_no_node_makes_it_unknown() -> None:
    fine, bad = Health(False, 0, False), Health(True, 3, True)
    assert worst([fine, fine]) == fine
    assert worst([fine, UNKNOWN, bad]) == bad
    assert worst([fine, UNKNOWN]) == UNKNOWN
    assert worst([]) == UNKNOWN


def rows(given: dict[Key, Series], *windows: Window) -> pl.DataFrame:
    table = telemetry_table(samples(given), windows, system="lab", sweep="night")
    assert table.schema.equals(TELEMETRY, check_metadata=True)
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def window(begin_s: float, end_s: float, trial: str = "t") -> Window:
    return Window(trial, "cycle-0", "launch-0", begin_s, end_s)


def test_a_row_names_its_trial_and_place() -> None:
    found = rows({("gpu0", "power_w"): series((1.0, 300.5))}, window(0.5, 1.5))
    assert found.rows(named=True) == [
        {
            "system": "lab",
            "sweep": "night",
            "trial": "t",
            "run": "cycle-0",
            "launch": "launch-0",
            "timestamp": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
            "host": "n1",
            "device": "gpu0",
            "counter": "power_w",
            "value": 300.5,
        }
    ]


def test_gauges_keep_every_reading_and_totals_only_what_changed() -> None:
    given = {
        ("gpu0", "power_w"): every_second(7, 7, 7, 7),
        ("gpu0", "nvlink_tx_bytes"): every_second(5, 5, 5, 9, 9, 9),
        REASONS: every_second(1, 1, 1, 1),
    }
    found = rows(given, window(0.0, 5.0))
    assert found.filter(pl.col("counter") == "power_w").height == 4
    sent = found.filter(pl.col("counter") == "nvlink_tx_bytes")
    assert sent["value"].to_list() == [5.0, 9.0, 9.0]
    assert sent["timestamp"].dt.epoch("s").to_list() == [0, 3, 5]
    assert found.filter(pl.col("counter") == REASONS[1])["value"].to_list() == [1.0, 1.0]


def test_a_reading_may_belong_to_two_windows_and_a_far_one_to_none() -> None:
    given = {("gpu0", "power_w"): series((1.0, 10.0), (2.0, 20.0), (50.0, 30.0))}
    found = rows(given, window(0.9, 1.1, "a"), window(1.9, 2.1, "b"), window(30.0, 31.0, "c"))
    assert found.select("trial", "value").rows() == [
        ("a", 10.0),
        ("a", 20.0),
        ("b", 10.0),
        ("b", 20.0),
    ]


def test_no_windows_make_no_rows() -> None:
    assert rows({("gpu0", "power_w"): every_second(1)}).height == 0


@given(
    steps=st.lists(st.integers(0, 3), min_size=2, max_size=40),
    begin=st.floats(0, 38),
    length=st.floats(0, 38),
)
def test_a_totals_difference_survives_thinning(
    steps: list[int], begin: float, length: float
) -> None:
    total = every_second(*np.cumsum(steps).astype(float))
    ends = min(begin + length, float(len(steps) - 1))
    if begin > ends:
        return
    found = rows({("eth0", "tx_bytes"): total}, window(begin, ends))["value"].to_list()
    first, last = int(np.floor(begin)), int(np.ceil(ends))
    assert found[-1] - found[0] == total.values[last] - total.values[first]
