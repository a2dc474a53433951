"""The quiet calls that a Trigger learns from: calls of jobs, iterations, and averages at need."""

from pathlib import Path

import numpy as np
import pytest

from dynamiccl.datasets.store import write_part
from dynamiccl.errors import NotEnoughData
from dynamiccl.train.trigger_fit import BLOCK, Series, read_series
from tests.calls import call, calls_table, traced
from tests.train.trigger.streams import made_up_series, t3


def write_calls(data: Path, log_times: np.ndarray, **columns: object) -> None:
    rows = [call(i, float(np.exp(t)), **columns) for i, t in enumerate(log_times)]
    write_part(data, calls_table(*rows), kind="calls", provenance={})


def test_a_series_is_a_task_key_under_one_config(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = [
        call(
            i,
            float(np.exp(5.0 + 0.05 * random.standard_normal())),
            comm=f"{i % 2:016x}",
            actual_protocol=("LL", "SIMPLE")[i // 2 % 2],
            ranks_agree=i != 17,
        )
        for i in range(400)
    ]
    write_part(tmp_path, calls_table(*rows), kind="calls", provenance={})
    series, counts = read_series(tmp_path)
    assert np.diff(series.starts).tolist().count(100) == 3
    assert (counts.series, counts.calls, counts.averages) == (4, 399, 0)
    assert series.usual_scale == pytest.approx(0.05, rel=0.2)
    assert np.median(series.values) == pytest.approx(0.0, abs=0.1)


def test_a_stretch_that_was_slow_is_left_out_and_single_slow_calls_stay(tmp_path: Path) -> None:
    times = 5.0 + t3(np.random.default_rng(0), 1_000, 1, 0.05)[:, 0]
    stretch, single = times.copy(), times.copy()
    stretch[400:600] += np.log(1.5)
    write_calls(tmp_path / "stretch", stretch)
    series, counts = read_series(tmp_path / "stretch")
    assert 200 <= counts.disturbed <= 240
    assert series.usual_scale == pytest.approx(0.05, rel=0.15)
    assert np.mean(series.values > 5.0) < 0.02
    single[::50] += 1.0
    write_calls(tmp_path / "single", single)
    series, counts = read_series(tmp_path / "single")
    assert counts.disturbed == 0
    assert (series.values > 10.0).sum() >= 20


def test_times_of_traces_that_do_not_tell_the_config_are_no_quiet_times(tmp_path: Path) -> None:
    rows = [*(call(i, 100.0 + i % 7) for i in range(300)), *(traced(i, 1.0) for i in range(300))]
    write_part(tmp_path, calls_table(*rows), kind="calls", provenance={})
    _, counts = read_series(tmp_path)
    assert (counts.calls, counts.unusable) == (300, 300)


def test_too_few_calls_are_refused_with_what_to_do(tmp_path: Path) -> None:
    write_calls(tmp_path, np.full(100, 5.0))
    with pytest.raises(NotEnoughData, match=r"100 quiet calls .* 256 .*DYNAMICCL_CALLS_DIR"):
        read_series(tmp_path)


def test_averages_stand_in_where_there_is_nothing_else_and_are_told(data_dir: Path) -> None:
    _, counts = read_series(data_dir)
    assert counts.calls == counts.iterations == 0
    assert counts.averages >= 256


def test_what_is_drawn_keeps_what_neighbours_have_in_common() -> None:
    random = np.random.default_rng(0)
    wander = np.zeros((3_000, 2), dtype=np.float32)
    for step in range(1, 3_000):
        wander[step] = 0.9 * wander[step - 1] + random.standard_normal(2)
    series = Series.of(list(wander.T), [np.zeros(3_000, dtype=np.float32)] * 2)
    values, sizes, scales = series.draw(random, 50, 1_000)
    assert values.shape == sizes.shape == (1_000, 50)
    assert scales.shape == (50,)
    inside = np.arange(999) % BLOCK != BLOCK - 1
    pairs = np.corrcoef(values[:-1][inside].ravel(), values[1:][inside].ravel())
    assert pairs[0, 1] == pytest.approx(0.9, abs=0.03)
    borders = np.corrcoef(values[:-1][~inside].ravel(), values[1:][~inside].ravel())
    assert abs(borders[0, 1]) < 0.2
    short = Series.of(list(wander[:400].T.reshape(-1, 20)), [wander[:20, 0] * 0.0] * 40)
    assert np.isfinite(short.draw(random, 5, 200)[0]).all()  # they are drawn together


def test_a_split_is_by_time_and_loses_nothing() -> None:
    series = made_up_series(keys=3, calls=100)
    first, rest = series.split(0.6)
    assert np.diff(first.starts).tolist() == [60] * 3
    assert np.diff(rest.starts).tolist() == [40] * 3
    np.testing.assert_array_equal(first.values[:60], series.values[:60])
    np.testing.assert_array_equal(rest.values[:40], series.values[60:100])
