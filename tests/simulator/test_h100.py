"""The simulator of H100 nodes against figures computed here by hand."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from dynamiccl.simulator import h100
from dynamiccl.simulator.noise import Noise
from tests.published import folder

HERE = Path(__file__).parents[2] / "dynamiccl" / "simulator"
MODEL = folder("model")
MIB = 1 << 20
GROUP = h100.Group(4, 8)
AR, AG = Collective.AllReduce, Collective.AllGather
RING, TREE, NVLS_TREE = Algorithm.Ring, Algorithm.Tree, Algorithm.NVLSTree
LL, LL128, SIMPLE = Protocol.LL, Protocol.LL128, Protocol.Simple


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_shipped_ramps_are_those_of_the_source() -> None:
    # Not applied: the second ramp that its source fits to rings of part of a node.
    left_out = {"ring_multinode_ramp", "ring_sync_per_node", "alltoall_nic_ramp"}
    source = rows_of(MODEL / "h100_corrections.csv")
    shipped = rows_of(HERE / "h100_corrections.csv")
    assert len(shipped) == 74
    assert shipped == [row for row in source if row["table"] not in left_out]


# NCCL's model of 4 x 8 ranks (latency us, GB/s), on 8 rings of 48 GB/s and 8 NVLS heads of 24:
#   AllReduce  Ring LL 78.8 20.4 x 32/62   Ring LL128 144.4 8 x 36.7 x 32/62
#              Ring Simple 282.8 384 x 32/62
#   AllReduce  Tree LL 35.2 20.4 x 0.85/2  Tree LL128 65.5 8 x 29 x 0.85/2
#              NVLSTree Simple 81.0 8 x 24 x 5/6
#   AllGather  Ring LL 42.7 20.4 x 32/31   Ring LL128 79.2 8 x 36.7 x 32/31
#              Ring Simple 145.6 384 x 32/31
def test_tree_by_hand() -> None:
    # 8 MiB / 64 = 2^17: entry 17 of NCCL's LL128 tree correction is 0.9; Tree has no ramp.
    expected = 65.5 + 8 * MIB / (1000 * 98.6 * 0.9)
    assert h100.true_us(GROUP, AR, TREE, LL128, 8 * MIB) == pytest.approx(expected, rel=1e-12)
    assert h100.predicted_us(GROUP, AR, TREE, LL128, 8 * MIB) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("size", "correction"),
    [
        (63, 1.0),  # below 64 bytes there is no entry
        (64, 1.0),
        (64 << 10, 0.6),
        ((64 << 10) - 1, 0.7),  # entry 9
        (64 << 13, 0.4),
        (64 << 22, 1.0),
        (64 << 23, 1.0),  # from here on uncorrected
        (64 << 30, 1.0),
    ],
)
def test_tree_correction_follows_the_size(size: int, correction: float) -> None:
    expected = 35.2 + size / (1000 * 20.4 * 0.85 / 2 * correction)
    assert h100.predicted_us(GROUP, AR, TREE, LL, size) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("per_gpu", "factor"),
    [
        (64, 1.0),  # below the fitted sizes the source holds 1.0
        (16 << 10, 0.1),
        (32 << 10, 0.1),
        (64 << 10, 0.15),
        (256 << 10, 0.41),
        (MIB, 0.72),
        (4 * MIB, 1.0),
        (1 << 30, 1.0),
    ],
)
def test_nvls_tree_reaches_its_bandwidth_late(per_gpu: int, factor: float) -> None:
    size = per_gpu * 32
    expected = 81.0 + size / (1000 * 160.0 * factor)
    assert h100.true_us(GROUP, AR, NVLS_TREE, SIMPLE, size) == pytest.approx(expected, rel=1e-12)
    predicted = 81.0 + size / (1000 * 160.0)
    assert h100.predicted_us(GROUP, AR, NVLS_TREE, SIMPLE, size) == pytest.approx(predicted)


def test_ramp_is_linear_in_the_logarithm_between_its_points() -> None:
    # sqrt(2) MiB per GPU lies half-way between 1 MiB (0.72) and 2 MiB (0.88).
    size = round(2**20.5) * 32
    expected = 81.0 + size / (1000 * 160.0 * 0.80)
    found = h100.true_us(GROUP, AR, NVLS_TREE, SIMPLE, size)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("per_gpu", "factor"),
    [(1, 0.01), (64, 0.01), (4 << 10, 0.25), (MIB, 0.68), (32 * MIB, 0.87), (1 << 30, 1.0)],
)
def test_ring_over_all_gpus_of_a_node_is_slower_than_nccl_thinks(
    per_gpu: int, factor: float
) -> None:
    size = per_gpu * 32
    bandwidth = 8 * 36.7 * 32 / 31
    expected = 79.2 + size / (1000 * bandwidth * factor)
    assert h100.true_us(GROUP, AG, RING, LL128, size) == pytest.approx(expected, rel=1e-12)
    assert h100.predicted_us(GROUP, AG, RING, LL128, size) == pytest.approx(
        79.2 + size / (1000 * bandwidth), rel=1e-12
    )


def test_ring_over_part_of_a_node_is_as_fast_as_nccl_thinks() -> None:
    group = h100.Group(4, 4)
    for size in (1 << 10, MIB, 1 << 30):
        truth = h100.true_us(group, AG, RING, LL, size)
        assert truth == h100.predicted_us(group, AG, RING, LL, size)


@pytest.mark.parametrize(("size", "factor"), [(32767, 1.0), (32768, 1.4), (1 << 30, 1.4)])
def test_ring_simple_has_a_plateau_from_64_bytes_per_channel_and_rank(
    size: int, factor: float
) -> None:
    # 64 B x 16 channels x 32 ranks = 32768 B.
    expected = 282.8 * factor + size / (1000 * 384 * 32 / 62)
    assert h100.predicted_us(GROUP, AR, RING, SIMPLE, size) == pytest.approx(expected, rel=1e-12)


def test_plateau_is_of_all_reduce_ring_simple_alone() -> None:
    size = 1 << 30
    assert h100.predicted_us(GROUP, AR, RING, LL128, size) == pytest.approx(
        144.4 + size / (1000 * 8 * 36.7 * 32 / 62)
    )
    assert h100.predicted_us(GROUP, AG, RING, SIMPLE, size) == pytest.approx(
        145.6 + size / (1000 * 384 * 32 / 31)
    )


@given(level=st.floats(0.0, 10.0), size=st.integers(64, 1 << 34))
@settings(deadline=None, max_examples=50)
def test_congestion_stretches_the_transfer_and_not_the_latency(level: float, size: int) -> None:
    quiet = h100.true_us(GROUP, AR, TREE, LL128, size)
    loud = h100.true_us(GROUP, AR, TREE, LL128, size, congestion=level)
    assert loud - 65.5 == pytest.approx((quiet - 65.5) * (1.0 + level), rel=1e-9)


def argmin(size: int, time: Callable[..., float]) -> Config:
    cells = h100.cells(GROUP, AR)
    return Config(*min(cells, key=lambda cell: time(GROUP, AR, *cell, size)))


def test_default_decides_by_what_nccl_believes_and_not_by_what_is_true() -> None:
    sizes = [1 << k for k in range(10, 33)]
    assert all(
        h100.default_config(GROUP, AR, size) == argmin(size, h100.predicted_us) for size in sizes
    )
    wrong = [
        size for size in sizes if argmin(size, h100.true_us) != argmin(size, h100.predicted_us)
    ]
    # Where NVLSTree has not reached its bandwidth yet, NCCL takes it too early.
    assert 8 * MIB in wrong
    assert h100.default_config(GROUP, AR, 32 * MIB) == Config(NVLS_TREE, SIMPLE)


def test_cost_table_is_what_a_tuner_is_given() -> None:
    table = h100.cost_table(GROUP, AR, 8 * MIB)
    assert table.shape == (7, 3)
    assert table.dtype == np.dtype(np.float32)
    available = {(int(a), int(p)) for a, p in np.argwhere(table != -1.0)}
    assert available == {(int(a), int(p)) for a, p in h100.cells(GROUP, AR)}
    assert available == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (5, 2)}
    assert table[0, 1] == np.float32(65.5 + 8 * MIB / (1000 * 98.6 * 0.9))


def test_tables_hold_27_groups_and_5_collectives() -> None:
    groups = h100.groups()
    assert len(groups) == 27
    assert groups[:8] == [*(h100.Group(1, ranks) for ranks in range(2, 9)), h100.Group(2, 1)]
    tuned = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce"}
    assert {c.wire for c in h100.collectives()} == tuned


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("collective", h100.collectives())
def test_default_is_what_nccl_s_own_code_chose(collective: Collective, num_nodes: int) -> None:
    """NCCL 2.27.7's recorded decisions for one and two nodes of eight GPUs."""
    decisions: dict[int, list[dict[str, str]]] = {}
    for row in rows_of(MODEL / "nccl_default_decisions.csv"):
        here = row["topology"] == "sm90_8gpu_nvswitch18_8x400gbps"
        here &= row["num_nodes"] == str(num_nodes)
        if here and Collective.parse(row["collective"]) is collective:
            decisions.setdefault(int(row["size_bytes"]), []).append(row)
    assert len(decisions) == 37
    group = h100.Group(num_nodes, 8)
    held = h100.cells(group, collective)
    agreed = compared = 0
    for size, rows in decisions.items():
        costs = {
            (Algorithm.parse(row["algorithm"]), Protocol.parse(row["protocol"])): row
            for row in rows
        }
        assert set(costs) == set(held)
        for cell in held:
            predicted = h100.predicted_us(group, collective, *cell, size)
            assert predicted == pytest.approx(float(costs[cell]["cost_us"]), rel=0.002)
        [chosen] = [cell for cell, row in costs.items() if row["chosen"] == "true"]
        if chosen in held:
            compared += 1
            agreed += h100.default_config(group, collective, size) == Config(*chosen)
    assert (agreed, compared) == (37, 37)


NOISE = Noise(seed=1, sigma=0.015, tail_probability=0.02, drift_sigma=0.005)


def test_noise_is_the_same_in_any_order() -> None:
    keys = [(f"cycle-{c}", f"trial-{t}") for c in range(3) for t in range(20)]
    forward = {key: NOISE.factor(*key) for key in keys}
    backward = {key: NOISE.factor(*key) for key in reversed(keys)}
    assert forward == backward
    assert len(set(forward.values())) == len(keys)


def test_noise_differs_by_seed() -> None:
    other = Noise(seed=2, sigma=0.015, tail_probability=0.02, drift_sigma=0.005)
    assert NOISE.factor("a", "b") != other.factor("a", "b")


def test_noise_is_around_one_with_a_heavy_tail() -> None:
    factors = np.array([NOISE.factor(f"c{i % 50}", f"t{i}") for i in range(4000)])
    assert np.median(factors) == pytest.approx(1.0, abs=0.004)
    assert np.all(factors > 0.9)
    # 2 % of launches are in the tail; without one, 1.1 would be six standard deviations away.
    assert 0.005 < np.mean(factors > 1.1) < 0.03
    assert factors.max() > 1.5


def test_without_strength_there_is_no_noise() -> None:
    silent = Noise(seed=1, sigma=0.0, tail_probability=0.0, drift_sigma=0.0)
    assert silent.factor("a", "b") == 1.0


def test_each_run_draws_the_noise_of_a_trial_anew() -> None:
    steady = Noise(seed=1, sigma=0.1, tail_probability=0.0, drift_sigma=0.0)
    assert len({steady.factor(f"cycle-{run}", "a") for run in range(5)}) == 5


def test_drift_is_shared_by_a_run() -> None:
    drifting = Noise(seed=1, sigma=0.0, tail_probability=0.0, drift_sigma=0.1)
    first, second = (drifting.factor("cycle-0", key) for key in "ab")
    assert first == second != drifting.factor("cycle-1", "a")
