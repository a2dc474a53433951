"""One node, Broadcast and Reduce: figures computed here by hand."""

import subprocess
import sys

import pytest

from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from dynamiccl.simulator import h100

MIB = 1 << 20
AR, AG, RS = Collective.AllReduce, Collective.AllGather, Collective.ReduceScatter
RING, TREE, NVLS = Algorithm.Ring, Algorithm.Tree, Algorithm.NVLS
LL, LL128, SIMPLE = Protocol.LL, Protocol.LL128, Protocol.Simple


@pytest.mark.parametrize(
    ("ranks", "collective", "cell", "latency", "algbw"),
    [
        # 12 ring channels of 30 GB/s; an AllReduce of 8 moves 14/8 of the data over each link.
        (8, AR, (RING, SIMPLE), 8.4 + 14 * 3.4, 360 * 8 / 14),
        (8, AR, (RING, LL), 6.6 + 14 * 0.6, 141 * 8 / 14),
        (8, AR, (RING, LL128), 14 + 14 * 1.9, 0.92 * 360 * 8 / 14),
        (8, AR, (TREE, LL128), 14 + 14 * 1.25, 0.92 * 360 * 7 / 9 / 2),
        (8, AR, (NVLS, SIMPLE), 25.0, 320 * 5 / 6),
        (8, AG, (NVLS, SIMPLE), 25.0, 320 * 7 / 8),
        (2, AG, (RING, SIMPLE), 8.4 + 3.4, 720.0),
        (4, RS, (RING, LL), 6.6 + 3 * 0.6, 141 * 4 / 3),
    ],
)
def test_one_node_is_nccl_s_cost_model(
    ranks: int,
    collective: Collective,
    cell: tuple[Algorithm, Protocol],
    latency: float,
    algbw: float,
) -> None:
    # 48 bytes are below the first entry of the tree correction.
    size = 48
    expected = latency + size / (1000 * algbw)
    found = h100.predicted_us(h100.Group(1, ranks), collective, *cell, size)
    assert found == pytest.approx(expected, rel=1e-12)


def test_one_node_has_ring_tree_and_nvls_and_no_plateau() -> None:
    group = h100.Group(1, 8)
    assert h100.cells(group, AR) == [
        *((a, p) for a in (TREE, RING) for p in Protocol),
        (NVLS, SIMPLE),
    ]
    assert h100.cells(group, AG) == [*((RING, p) for p in Protocol), (NVLS, SIMPLE)]
    size = 1 << 30
    expected = 56.0 + size / (1000 * 360 * 8 / 14)
    assert h100.predicted_us(group, AR, RING, SIMPLE, size) == pytest.approx(expected)


# h100_corrections.csv, one_node_algbw and one_node_latency; 3 lies half-way between 2 and 4.
@pytest.mark.parametrize(
    ("collective", "ranks", "algbw", "latency"),
    [
        (AG, 2, 537.0, 8.0),
        (AG, 3, 485.5, 12.5),
        (RS, 8, 394.0, 30.0),
        (AR, 2, 324.0, 10.0),
        (AR, 4, 236.0, 15.0),
        (AR, 8, 267.0, 31.0),
    ],
)
def test_one_node_truth_goes_through_what_was_measured(
    collective: Collective, ranks: int, algbw: float, latency: float
) -> None:
    group = h100.Group(1, ranks)
    small, large = (
        h100.true_us(
            group, collective, *cell_of(h100.default_config(group, collective, size)), size
        )
        for size in (64, 10**12)
    )
    assert small == pytest.approx(latency, abs=0.01)
    assert 10**12 / large / 1000 == pytest.approx(algbw, rel=1e-3)


def cell_of(config: Config) -> tuple[Algorithm, Protocol]:
    assert config.algorithm is not None
    assert config.protocol is not None
    return config.algorithm, config.protocol


@pytest.mark.parametrize("collective", [Collective.Broadcast, Collective.Reduce])
def test_root_s_data_passes_each_link_once(collective: Collective) -> None:
    # 4 x 8: eight channels of 36.7 GB/s in LL128.
    assert h100.cells(h100.Group(4, 8), collective) == [(RING, p) for p in Protocol]
    size = 8 * MIB
    expected = 14 + 32 * 4.0 + size / (1000 * 8 * 36.7)
    found = h100.predicted_us(h100.Group(4, 8), collective, RING, LL128, size)
    assert found == pytest.approx(expected, rel=1e-12)
    # Ring over all GPUs of a node: 0.36 at 256 KiB per GPU lies in the fitted 0.68.
    slower = 14 + 32 * 4.0 + size / (1000 * 8 * 36.7 * 0.68)
    assert h100.true_us(h100.Group(4, 8), collective, RING, LL128, size) == pytest.approx(slower)
    # One hop where every node has one rank, and inside one node.
    assert h100.predicted_us(h100.Group(2, 1), collective, RING, LL, 0) == pytest.approx(9.3)
    assert h100.true_us(h100.Group(1, 8), collective, RING, SIMPLE, 0) == pytest.approx(11.8)


def test_import_is_light() -> None:
    code = (
        "import sys; import dynamiccl.simulator.h100; "
        "print(*({'numpy', 'polars', 'pyarrow', 'pydantic', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""
