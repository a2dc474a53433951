"""A column of the past is written once: numpy's windows, rows of steps and TorchScript have it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dynamiccl.datasets import history as hist
from dynamiccl.datasets.steps import Steps
from dynamiccl.serve.brain import CALL_COLUMNS
from dynamiccl.serve.brain_module import traced_features
from tests.datasets.test_features import call, history
from tests.steps import make_steps


def _slower(past: hist.Past) -> Any:
    return past.xp.log2(past.time_us / past.before(past.time_us))


def wider() -> hist.HistoryColumns:
    """With a column in the middle of both, where it moves all that follows."""
    meaning = "than the call before"
    slower = hist.Columns((hist.Feature("slower", "log2", meaning),), _slower)
    last = hist.Columns(
        (hist.Feature("last_slower", "log2", meaning),), lambda p: p.last(_slower(p))
    )
    columns = hist.HISTORY_COLUMNS
    return replace(
        columns,
        window=(*columns.window[:2], slower, *columns.window[2:]),
        history=(*columns.history[:3], last, *columns.history[3:]),
    )


def seen(steps: Steps) -> tuple[hist.CallColumns, np.typing.NDArray[np.bool_]]:
    """Each step's window of the calls before it."""
    rows = np.arange(len(steps))
    index = rows[:, None] + np.arange(-hist.WINDOW_LENGTH, 0)
    valid = index >= steps.starts[steps.episode_of(rows)][:, None]
    return steps.calls.take(np.maximum(index, 0)), valid


def by_script(
    calls: hist.CallColumns, valid: np.typing.NDArray[np.bool_], columns: hist.HistoryColumns
) -> tuple[hist.Float32Array, hist.Float32Array]:
    """Windows and history as an exported brain computes them."""
    facts = [valid if name == "valid" else getattr(calls, name) for name in CALL_COLUMNS]
    raw = np.stack(facts, axis=2).astype(np.float64) * valid[:, :, None]
    scripted: Any = torch.jit.script(traced_features(columns))
    window, history = scripted(torch.from_numpy(raw))
    return window.numpy(), history.numpy()


def assert_same_everywhere(
    columns: hist.HistoryColumns,
) -> tuple[hist.Float32Array, hist.Float32Array]:
    steps = make_steps(lengths=(1, 2, 5, 9, 20, 30))
    calls, valid = seen(steps)
    window, history = hist.history_features(calls, valid, columns)
    found_window, found_history = by_script(calls, valid, columns)
    np.testing.assert_allclose(found_window, window, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found_history, history, rtol=1e-6, atol=1e-6)
    assert window.shape[2] == len(hist.features_of(columns.window))
    assert history.shape[1] == len(hist.features_of(columns.history))
    return window, history


def test_a_column_that_is_added_is_in_all_three_and_leaves_the_others_as_they_are() -> None:
    columns = wider()
    window, history = assert_same_everywhere(columns)
    at, in_history = (
        hist.positions(hist.features_of(columns.window)),
        hist.positions(hist.features_of(columns.history)),
    )
    others = assert_same_everywhere(hist.HISTORY_COLUMNS)
    kept = [at[feature.name] for feature in hist.features_of(hist.HISTORY_COLUMNS.window)]
    np.testing.assert_array_equal(window[:, :, kept], others[0])
    kept = [in_history[feature.name] for feature in hist.features_of(hist.HISTORY_COLUMNS.history)]
    np.testing.assert_array_equal(history[:, kept], others[1])
    valid = window[:, :, at["valid"]] > 0.0
    log2_time = window[:, :, at["log2_time"]]
    slower = np.where(valid[:, :-1], np.diff(log2_time, axis=1), 0.0)
    np.testing.assert_allclose(window[:, 1:, at["slower"]], slower, atol=1e-5)
    assert not window[:, 0, at["slower"]].any()
    np.testing.assert_array_equal(
        history[:, in_history["last_slower"]], window[:, -1, at["slower"]]
    )
    assert not history[~valid[:, -1]].any()


def test_a_longer_route_moves_rtprop_once_the_old_one_has_expired() -> None:
    sense = hist.NetworkSense(rtprop_window=4)
    assert (sense.ebb_gbytes_per_s, sense.btlbw.value, sense.bdp_bytes) == (None, None, None)
    for time_us in (100.0, 300.0, 300.0, 300.0):
        sense.add(1000.0, time_us)
    assert sense.rtprop.value == 100.0
    sense.add(1000.0, 300.0)
    assert sense.rtprop.value == 300.0


def test_the_stream_and_the_features_of_a_policy_say_the_same() -> None:
    numbers = np.random.default_rng(3)
    calls, sense = [], hist.NetworkSense(hist.WINDOW_LENGTH, hist.WINDOW_LENGTH)
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
