"""Few channels use few NICs: no call sends more out of a node than they can."""

import pytest

from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.simulator import h100
from dynamiccl.simulator.channels import actual_channels
from dynamiccl.simulator.nics import NIC_GBYTES_PER_S, least_transfer_us

TWO = h100.Group(2, 8)
GIB = 1 << 30
AR = Collective.AllReduce
RING, TREE, NVLS_TREE = Algorithm.Ring, Algorithm.Tree, Algorithm.NVLSTree
SIMPLE = Protocol.Simple


def busbw(algorithm: Algorithm, channels: int | None, group: h100.Group = TWO) -> float:
    time_us = h100.true_us(group, AR, algorithm, SIMPLE, 4 * GIB, num_channels=channels)
    return 4 * GIB / (1000 * time_us) * AR.bus_factor(group.num_ranks)


@pytest.mark.parametrize("channels", [1, 2, 4, 8])
def test_a_ring_of_few_channels_has_the_rate_of_as_many_nics(channels: int) -> None:
    """It had 115 GB/s with one channel, through one NIC of 50."""
    most = channels * NIC_GBYTES_PER_S
    assert busbw(RING, channels) <= most
    # The latency takes nearly nothing of 4 GiB.
    assert busbw(RING, channels) > 0.75 * most


def test_one_channel_of_nvls_tree_has_what_nccl_gives_a_channel() -> None:
    """It had 199 GB/s. All heads send, so NCCL's bound is the lower one: 57.7 x 5/6 x 15/8."""
    assert busbw(NVLS_TREE, 1) == pytest.approx(90.2, rel=0.01)
    assert busbw(NVLS_TREE, 1, h100.Group(4, 8)) == pytest.approx(45.5 * 5 / 6 * 31 / 16, rel=0.01)


def test_line_rate_by_hand() -> None:
    # 1 GiB, 2 x 15/16 of it through one NIC; LL sends as many flags as data.
    ring = GIB * 15 / 8 / 50_000
    assert least_transfer_us(TWO, AR, RING, SIMPLE, GIB, 1) == pytest.approx(ring)
    assert least_transfer_us(TWO, AR, RING, Protocol.LL, GIB, 1) == pytest.approx(2 * ring)
    assert least_transfer_us(TWO, AR, RING, SIMPLE, GIB, 8) == pytest.approx(ring / 8)
    # One rank a node has one NIC, whatever the channels.
    alone = h100.Group(2, 1)
    assert least_transfer_us(alone, AR, RING, SIMPLE, GIB, 8) == pytest.approx(GIB / 50_000)
    # Two nodes: half of the bytes up one tree, half down the other. More: twice as many.
    assert least_transfer_us(TWO, AR, TREE, SIMPLE, GIB, 1) == pytest.approx(GIB / 50_000)
    four = h100.Group(4, 8)
    assert least_transfer_us(four, AR, TREE, SIMPLE, GIB, 1) == pytest.approx(2 * GIB / 50_000)
    assert least_transfer_us(h100.Group(1, 8), AR, RING, SIMPLE, GIB, 1) == 0.0


def test_what_was_measured_with_nccls_own_channels_is_within_the_line_rate() -> None:
    """So the published figures stay as they are: the bound is for fewer channels alone."""
    over = [
        (group, collective, cell, size)
        for group in h100.groups()
        for collective in h100.collectives()
        for cell in h100.cells(group, collective)
        for size in (1 << 24, 1 << 28, 1 << 32)
        for call in [(group, collective, *cell, size)]
        if h100.true_us(*call) < least_transfer_us(*call, actual_channels(*call))
    ]
    assert over == []


@pytest.mark.parametrize("algorithm", [RING, TREE, NVLS_TREE])
@pytest.mark.parametrize("size", [1 << 20, 1 << 26, 1 << 32])
def test_more_channels_up_to_the_best_never_take_longer(algorithm: Algorithm, size: int) -> None:
    times = [
        h100.true_us(TWO, AR, algorithm, SIMPLE, size, num_channels=count) for count in (1, 2, 4)
    ]
    if size >= 1 << 26:
        assert times == sorted(times, reverse=True)
    assert all(time > 0 for time in times)
