"""Which launches pair up a cluster: few, whole, and with partners enough."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.collect.health.pairings import pairings
from dynamiccl.errors import UserError


def partners(nodes: int, gpus: int) -> dict[int, set[int]]:
    found: dict[int, set[int]] = defaultdict(set)
    for pairing in pairings(nodes, gpus):
        members = pairing.split.comms(nodes, gpus, spare=pairing.spare).members
        for one, other in members:
            same_node = one // gpus == other // gpus
            assert same_node is not pairing.between_nodes
            assert same_node or one % gpus == other % gpus  # each NIC with its own like
            found[one].add(other)
            found[other].add(one)
    return found


@given(nodes=st.integers(3, 70), gpus=st.sampled_from([1, 2, 4, 8]))
@settings(deadline=None, max_examples=40)
def test_every_gpu_has_partners_inside_and_between(nodes: int, gpus: int) -> None:
    found = partners(nodes, gpus)
    assert len(found) == nodes * gpus
    inside = gpus.bit_length() - 1
    for rank, others in found.items():
        here = [other for other in others if other // gpus == rank // gpus]
        assert len(here) == inside
        # Three nodes: two have one partner, since no split pairs 1 and 2.
        assert len(others) - len(here) >= (1 if nodes < 4 else 2)


@pytest.mark.parametrize(("nodes", "launches"), [(2, 4), (16, 7), (64, 9), (512, 12)])
def test_launches_grow_as_the_logarithm_of_ranks(nodes: int, launches: int) -> None:
    assert len(pairings(nodes, 8)) == launches


def test_nothing_is_left_over_of_a_power_of_two() -> None:
    assert not any(pairing.spare for pairing in pairings(64, 8))
    assert any(pairing.spare for pairing in pairings(5, 8))


def test_what_cannot_be_paired_is_refused() -> None:
    with pytest.raises(UserError, match="6 is no power of two; take 4"):
        pairings(4, 6)
    for nodes, gpus in ((1, 1), (2, 1), (1, 2)):
        with pytest.raises(UserError, match="one pair at most"):
            pairings(nodes, gpus)
