"""What a policy sees: columns of the context, of the window and of the past, and NCCL's costs."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dynamiccl.datasets import features
from dynamiccl.datasets import history as hist
from dynamiccl.datasets.costs import COST_KEY, NUM_CELLS, log_costs, read_costs
from dynamiccl.datasets.history import (
    HISTORY_FEATURES,
    WINDOW_COLUMN,
    WINDOW_LENGTH,
    Call,
    Float32Array,
)
from dynamiccl.datasets.schema import COSTS
from dynamiccl.datasets.store import read, write_part
from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.simulator import system
from dynamiccl.simulator.h100 import default_model
from tests.calls import history_arrays
from tests.data_sets import SWEEP, make_data
from tests.rows import default, frame

PROFILES = ("default", "tuned")
FACTS: dict[str, Any] = {
    "compute_capability": 9.0,
    "nvlink_generation": 4,
    "nvlinks_per_gpu": 18,
    "nvswitch": True,
    "nic_kind": "infiniband",
    "nic_gbits_per_s": 400.0,
    "nics_per_node": 8,
    "cpu_vendor": "intel",
}
UNKNOWN: dict[str, Any] = {
    **dict.fromkeys(FACTS),
    "nccl_version": None,
    "num_ranks": None,
    "num_nodes": None,
    "ranks_per_node": None,
    "gpu": None,
}


def tasks(*rows: dict[str, Any], noise: float | None = 0.02) -> pl.DataFrame:
    return frame(*rows).with_columns(noise_band=pl.lit(noise, dtype=pl.Float64))


def cold(row: dict[str, Any], noise: float | None = 0.02) -> dict[str, float]:
    [values] = features.cold_observations(tasks(row, noise=noise), PROFILES).context
    names = [entry["name"] for entry in features.feature_table(PROFILES)]
    return dict(zip(names, map(float, values), strict=True))


def call(time_us: float = 8.0, **changes: Any) -> Call:
    plain: dict[str, Any] = {
        "size_bytes": 16_000,
        "algorithm": Algorithm.Ring,
        "protocol": Protocol.LL,
        "num_channels": 4,
    }
    return Call(time_us=time_us, **{**plain, **changes})


def history(*calls: Call) -> tuple[Float32Array, dict[str, float]]:
    window, values = history_arrays(calls)
    return window, {f.name: float(v) for f, v in zip(HISTORY_FEATURES, values, strict=True)}


def test_table_of_the_manifest_is_the_order_of_the_columns() -> None:
    sizes = [1 << 20, 8, 1 << 30]
    observed = features.cold_observations(tasks(*(default(size_bytes=n) for n in sizes)), PROFILES)
    assert observed.context[:, features.CONTEXT_COLUMN["log2_size"]].tolist() == [20.0, 3.0, 30.0]
    # Cold knows no history.
    assert not observed.window.any()
    assert not observed.context[:, features.HISTORY_SLICE].any()
    assert observed.context.shape == (3, len(features.feature_table(PROFILES)))
    assert observed.window.shape == (3, WINDOW_LENGTH, len(features.window_table()))
    for table in (features.feature_table(PROFILES), features.window_table()):
        assert len({entry["name"] for entry in table}) == len(table)
    assert [entry["name"] for entry in features.feature_table(PROFILES)] == [
        *(feature.name for feature in features.FEATURES),
        "profile:default",
        "profile:tuned",
    ]
    assert [entry["name"] for entry in features.feature_table(())] == list(features.CONTEXT_COLUMN)


def test_one_row_by_hand() -> None:
    row = default(
        collective="AllGather",
        size_bytes=1 << 20,
        num_ranks=32,
        num_nodes=4,
        ranks_per_node=8,
        nccl_version="2.27.5",
        launch_profile="tuned",
        **FACTS,
    )
    expected = {
        "log2_size": 20.0,
        "log2_bytes_per_rank": 15.0,
        "collective_AllGather": 1.0,
        "log2_ranks": 5.0,
        "log2_nodes": 2.0,
        "log2_ranks_per_node": 3.0,
        "gpu_known": 1.0,
        "compute_capability": 9.0,
        "nvlink_known": 1.0,
        "nvlink_generation": 4.0,
        "log2_nvlinks": math.log2(19),
        "nvswitch": 1.0,
        "nic_infiniband": 1.0,
        "log2_nic_speed": math.log2(401),
        "log2_nics": math.log2(9),
        "cpu_intel": 1.0,
        "nccl_known": 1.0,
        "nccl_minor": 2.705,
        "noise_known": 1.0,
        "noise_band": math.log(1.02),
        "profile:tuned": 1.0,
    }
    found = {name: value for name, value in cold(row).items() if value != 0.0}
    assert found == pytest.approx(expected, rel=1e-6)


def test_unknown_facts_are_zero_and_say_so() -> None:
    values = cold(default(**UNKNOWN), noise=None)
    known = [name for name in values if name.endswith("_known")]
    assert len(known) == 8
    assert all(values[name] == 0.0 for name in known)
    found = {name for name, value in values.items() if value != 0.0}
    assert found == {"log2_size", "collective_AllReduce", "profile:default"}
    # What no feature names lights no flag; and no NVLink is not an unknown one.
    others: dict[str, Any] = {"nic_kind": "slingshot", "cpu_vendor": "power"}
    others |= {"launch_profile": "never seen", "nvlinks_per_gpu": 0, "nvswitch": False}
    values = cold(default(**others, nvlink_generation=0))
    flags = [n for n in values if n.startswith(("nic_", "cpu_", "profile:"))]
    assert len(flags) == 10
    assert not any(values[name] for name in flags)
    assert (values["nvlink_known"], values["nvlink_generation"]) == (1.0, 0.0)


def test_window_row_by_hand() -> None:
    window, _ = history(call(8.0), call(16.0, protocol=Protocol.Simple, interference=0.5))
    newest = dict(zip(WINDOW_COLUMN, map(float, window[-1]), strict=True))
    # 16000 B in 16 us are 1 GB/s; over 4 channels 2^-2.
    expected = {
        "valid": 1.0,
        "log2_time": 4.0,
        "log2_channel_throughput": -2.0,
        "algorithm_Ring": 1.0,
        "protocol_Simple": 1.0,
        "log2_channels": 2.0,
        "changed": 1.0,
        "interference": 0.5,
    }
    assert {name: value for name, value in newest.items() if value} == pytest.approx(expected)
    # One that fell out of the window, the first and equal configs have not changed.
    counts = [1, *(4,) * (WINDOW_LENGTH - 2), 8, 8]
    window, values = history(*(call(num_channels=count) for count in counts))
    changed = window[:, WINDOW_COLUMN["changed"]].tolist()
    assert changed == [0.0] * (WINDOW_LENGTH - 2) + [1.0, 0.0]
    # An unknown config is all zero.
    window, values = history(call(algorithm=None, protocol=None, num_channels=None))
    used = ("algorithm", "protocol", "log2_channel")
    assert not any(window[-1, at] for name, at in WINDOW_COLUMN.items() if name.startswith(used))
    assert (values["last_algorithm_Tree"], values["last_known"]) == (0.0, 1.0)


def test_network_sense_by_hand() -> None:
    # 16000 B: in 8 us 2 GB/s, in 16 us 1 GB/s, in 4 us 4 GB/s.
    _, values = history(call(8.0), call(4.0), call(16.0, skew_us=3.0))
    assert (values["log2_ebb"], values["log2_btlbw"], values["log2_rtprop"]) == (0.0, 2.0, 2.0)
    assert values["inflight_over_bdp"] == pytest.approx(1.0)
    assert (values["skew_known"], values["log2_skew"]) == (1.0, 2.0)
    assert (values["last_known"], values["sense_known"]) == (1.0, 1.0)
    assert (values["last_algorithm_Ring"], values["last_log2_channels"]) == (1.0, 2.0)
    # Bytes in flight are bounded; no interference is not an unknown one.
    _, values = history(call(8.0, size_bytes=16), call(8.0, interference=0.0))
    assert (values["inflight_over_bdp"], values["interference_known"]) == (1.0, 1.0)
    _, values = history(call(800.0, size_bytes=16_000), call(8.0, size_bytes=1_600_000))
    assert values["inflight_over_bdp"] <= 8.0
    assert values["interference_known"] == 0.0


# --- NCCL's own costs of a task, from what it logged of its cells ---


def test_costs_of_a_simulated_sweep_are_those_of_the_cost_model(data_dir: Path) -> None:
    tasks = read(data_dir).unique([*COST_KEY, "size_bytes"])
    found = log_costs(tasks, read_costs(data_dir))
    assert found.shape == (tasks.height, NUM_CELLS) == (30, len(features.COST_FEATURES))
    for row, told in zip(found, tasks.select("collective", "size_bytes").iter_rows(), strict=True):
        collective, size = Collective.parse(told[0]), told[1]
        wanted = (
            default_model().cost_table(system.Call(system.Group(4, 8), collective, size)).ravel()
        )
        assert (np.isnan(row) == (wanted < 0.0)).all()
        known = wanted > 0.0
        # The log has one decimal.
        assert np.allclose(np.exp(row[known]), wanted[known], rtol=0.01)


def test_a_group_that_logged_several_tables_has_none(tmp_path: Path) -> None:
    make_data(tmp_path, SWEEP)
    make_data(tmp_path, SWEEP.replace('name = "tiny"', 'name = "other"'))
    costs = read_costs(tmp_path)  # both sweeps logged the same
    assert costs.height > 0
    assert costs.unique([*COST_KEY, "algorithm", "protocol"]).height == costs.height
    table = read(tmp_path, "costs").with_columns(latency_us=pl.col("latency_us") + 1.0)
    table = table.filter(pl.col("algorithm") == "Ring")  # of other cells there is one value
    write_part(tmp_path, table.to_arrow().cast(COSTS), kind="costs", provenance={})
    assert read_costs(tmp_path).is_empty()


def test_a_data_set_without_costs_has_an_empty_table(tmp_path: Path) -> None:
    costs = read_costs(tmp_path)
    assert costs.is_empty()
    tasks = frame(default(nccl_version=None))
    assert np.isnan(log_costs(tasks, costs)).all()
    assert log_costs(tasks.clear(), costs).shape == (0, NUM_CELLS)


# --- What the network was sensed to be ---


def test_a_longer_route_moves_rtprop_once_the_old_one_has_expired() -> None:
    sense = hist.NetworkSense()
    assert (sense.ebb_gbytes_per_s, sense.btlbw.value, sense.bdp_bytes) == (None, None, None)
    for time_us in (100.0, *[300.0] * (hist.RTPROP_WINDOW - 1)):
        sense.add(1000.0, time_us)
    assert sense.rtprop.value == 100.0
    sense.add(1000.0, 300.0)
    assert sense.rtprop.value == 300.0


def test_the_stream_and_the_features_of_a_policy_say_the_same() -> None:
    numbers = np.random.default_rng(3)
    calls, sense = [], hist.NetworkSense()
    for _ in range(hist.WINDOW_LENGTH):
        size_bytes, time_us = int(numbers.integers(10_000, 99_999)), float(numbers.uniform(5, 50))
        calls.append(call(time_us, size_bytes=size_bytes))
        sense.add(size_bytes, time_us)
        _, values = history(*calls)
        told = (sense.ebb_gbytes_per_s, sense.btlbw.value, sense.rtprop.value)
        for name, value in zip(("log2_ebb", "log2_btlbw", "log2_rtprop"), told, strict=True):
            assert value is not None
            assert values[name] == pytest.approx(np.log2(value), abs=1e-5)
        assert sense.bdp_bytes is not None
        inflight = min(8.0, size_bytes / sense.bdp_bytes)
        assert values["inflight_over_bdp"] == pytest.approx(inflight, rel=1e-5)
