"""What a sampler writes is what is read back, whatever a crash leaves of the file."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamiccl.collect.telemetry.record import FORMAT, KEY_PERIOD_S, Recorder, tidy
from dynamiccl.collect.telemetry.samples import ReadError, Samples, read_samples
from dynamiccl.errors import CorruptFile, MissingPath

ABOUT = {"format": FORMAT, "host": "n1", "rate_hz": 10.0, "pid": 7}
COLUMNS = {"fast": [("gpu0", "power_w")], "slow": [("gpu0", "mig_mode")]}


def record(path: Path, ticks: int, *, began_s: float = 1000.0, period_s: float = 0.1) -> None:
    """A sampler's file: key records every 30 s, slow readings every second."""
    with Recorder(path, clock=lambda: began_s) as recorder:
        recorder.add({"sampler": ABOUT})
        recorder.error("gpu0", "temperature_c", "Not Supported")
        for tick in range(ticks):
            now_s = began_s + tick * period_s
            if tick % round(KEY_PERIOD_S / period_s) == 0:
                recorder.key(ABOUT, COLUMNS)
            values = {"fast": tidy([float(tick)])}
            if tick % 10 == 0:
                values["slow"] = [0]
            recorder.add(values, time_s=now_s)


def power(samples: Samples) -> list[float]:
    return [float(value) for value in samples.series["gpu0", "power_w"].values]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    record(tmp_path / "s", 25)
    samples = read_samples(tmp_path / "s")
    assert (samples.host, samples.rate_hz) == ("n1", 10.0)
    assert power(samples) == [float(tick) for tick in range(25)]
    assert samples.series["gpu0", "mig_mode"].times_s.tolist() == [1000.0, 1001.0, 1002.0]
    assert samples.errors == (ReadError("gpu0", "temperature_c", "Not Supported"),)


@given(cut=st.integers(min_value=0, max_value=1500))
def test_a_file_cut_anywhere_loses_only_what_was_cut(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "s"
    record(path, 25)
    whole = path.read_bytes()
    kept = whole[: max(0, len(whole) - cut)]
    path.write_bytes(kept)
    if b"\n" not in kept:
        with pytest.raises(CorruptFile, match="first line is missing"):
            read_samples(path)
        return
    samples = read_samples(path)
    readings = sum(
        b'"fast":[' in line and b"columns" not in line for line in kept.split(b"\n")[:-1]
    )
    series = samples.series.get(("gpu0", "power_w"))
    assert ([] if series is None else series.values.tolist()) == [float(i) for i in range(readings)]


def test_a_sampler_that_starts_anew_goes_on_behind_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "s"
    record(path, 3)
    path.write_bytes(path.read_bytes()[:-5])
    with Recorder(path, clock=lambda: 2000.0) as recorder:
        recorder.add({"sampler": ABOUT})
        recorder.key(ABOUT, {"fast": [("gpu0", "power_w"), ("gpu1", "power_w")]})
        recorder.add({"fast": [7, 8]})
    samples = read_samples(path)
    assert power(samples) == [0.0, 1.0, 7.0]
    assert samples.series["gpu1", "power_w"].values.tolist() == [8.0]


def test_a_reading_that_failed_is_absent(tmp_path: Path) -> None:
    with Recorder(tmp_path / "s", clock=lambda: 5.0) as recorder:
        recorder.key(ABOUT, COLUMNS)
        recorder.add({"fast": [None]})
        recorder.add({"fast": [3]})
    assert power(read_samples(tmp_path / "s")) == [3.0]


def test_lines_that_came_late_are_put_in_order(tmp_path: Path) -> None:
    with Recorder(tmp_path / "s", clock=lambda: 5.0) as recorder:
        recorder.key(ABOUT, COLUMNS)
        recorder.add({"fast": [2]}, time_s=5.2)
        recorder.add({"fast": [1]}, time_s=5.1)
    assert read_samples(tmp_path / "s").series["gpu0", "power_w"].times_s.tolist() == [5.1, 5.2]


@cache
def whole(path: Path) -> Samples:
    return read_samples(path)


@given(since=st.floats(min_value=900.0, max_value=2100.0))
def test_reading_from_a_moment_gives_what_the_whole_file_has_from_it(
    long_file: Path, since: float
) -> None:
    everything = whole(long_file)
    part = read_samples(long_file, since)
    assert part.errors == everything.errors
    for key, series in everything.series.items():
        wanted = series.times_s >= since
        got = part.series.get(key)
        if got is None:
            assert not wanted.any()
            continue
        chosen = got.times_s >= since
        assert np.array_equal(got.times_s[chosen], series.times_s[wanted])
        assert np.array_equal(got.values[chosen], series.values[wanted])


def test_reading_from_a_moment_does_not_read_the_night_before_it(long_file: Path) -> None:
    part = read_samples(long_file, 1950.0)
    assert part.series["gpu0", "power_w"].times_s[0] >= 1947.0


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough to be searched and not only read: 1000 s, a quarter of a megabyte."""
    path = tmp_path_factory.mktemp("long") / "s"
    record(path, 10_000)
    assert path.stat().st_size > 250_000
    return path


def test_damage_in_the_middle_is_said(tmp_path: Path) -> None:
    record(tmp_path / "s", 5)
    lines = (tmp_path / "s").read_bytes().split(b"\n")
    lines[4] = b'{"t": 3, "fast'
    (tmp_path / "s").write_bytes(b"\n".join(lines))
    with pytest.raises(CorruptFile, match="damaged at byte"):
        read_samples(tmp_path / "s")


def test_readings_that_do_not_fit_their_columns_are_said(tmp_path: Path) -> None:
    with Recorder(tmp_path / "s", clock=lambda: 5.0) as recorder:
        recorder.key(ABOUT, COLUMNS)
        recorder.add({"fast": [1, 2]})
    with pytest.raises(CorruptFile, match="group 'fast' do not fit"):
        read_samples(tmp_path / "s")


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_text(json.dumps({"t": 1, "sampler": {**ABOUT, "format": 2}}) + "\n")
    with pytest.raises(CorruptFile, match="telemetry format 2, this release reads 1"):
        read_samples(tmp_path / "s")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingPath, match="no telemetry file at"):
        read_samples(tmp_path / "none")
