"""A job on two made-up nodes whose network is cut: before and after the vote, or for a while.

The nodes are network namespaces joined by one cable; needs root.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pytest

from tests.serve.jobs.conftest import Player
from tests.serve.jobs.play import at
from tests.serve.jobs.setting import JOB, Setting, free_port

DEVICE: Final = "cable"


@dataclass(frozen=True, slots=True)
class Network:
    """Names of two namespaces, in which the other one is at the end of a cable."""

    nodes: tuple[str, str]
    first_address: str = "10.77.13.1"
    second_address: str = "10.77.13.2"

    def ranks(self, num_ranks: int) -> list[str]:
        """Put the first half of the ranks on the first node."""
        half = num_ranks // 2
        return [
            word
            for rank in range(num_ranks)
            for word in ("--netns", f"{rank}:/run/netns/{self.nodes[rank // half]}")
        ]

    def set_cable(self, state: str) -> str:
        """A shell command that takes the cable `down` or `up`."""
        return f"ip netns exec {self.nodes[1]} ip link set {DEVICE} {state}"


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], check=False, capture_output=True).returncode == 0


@pytest.fixture
def network() -> Iterator[Network]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and ip")
    nodes = (f"job-a-{os.getpid()}", f"job-b-{os.getpid()}")
    if not all(ip("netns", "add", node) for node in nodes):
        pytest.skip("no network namespaces here")
    made = Network(nodes)
    try:
        cable = ("link", "add", DEVICE, "netns", nodes[0], "type", "veth", "peer", "name", DEVICE)
        assert ip(*cable, "netns", nodes[1])
        for node, address in zip(nodes, (made.first_address, made.second_address), strict=True):
            assert ip("-n", node, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                assert ip("-n", node, "link", "set", device, "up")
        yield made
    finally:
        for node in nodes:
            ip("netns", "delete", node)


def environment(setting: Setting, network: Network) -> dict[str, str]:
    return setting.environment() | {
        "DYNAMICCL_COORDINATOR": f"{network.first_address}:{free_port()}",
        "DYNAMICCL_SOCKET_IFNAME": f"={DEVICE}",
    }


def test_ranks_agree_over_the_cable(network: Network, play_job: Player, two_nodes: Setting) -> None:
    played = play_job(
        *network.ranks(8),
        environment=environment(two_nodes, network),
        ranks=8,
        nodes=2,
        comms=3,
        **JOB,
    )
    assert played.is_sound, played
    assert all(comm.acted for comm in played.communicators)
    assert all(comm.first_acted for comm in played.communicators)


@pytest.mark.parametrize("call", [0, 20, 60, 200, 600])
def test_a_cut_leaves_no_two_answers(
    call: int, network: Network, play_job: Player, two_nodes: Setting
) -> None:
    played = play_job(
        *network.ranks(8),
        *at(call, f"sh={network.set_cable('down')}"),
        environment=environment(two_nodes, network),
        ranks=8,
        nodes=2,
        comms=2,
        **JOB,
    )
    assert (played.disagreements, played.acted_unevenly, played.violations) == (0, 0, 0), played
    assert (played.abnormal_exits, played.hit_deadline) == (0, False), played


@pytest.mark.parametrize("call", [20, 200])
def test_a_cut_that_heals_leaves_no_two_answers(
    call: int, network: Network, play_job: Player, two_nodes: Setting
) -> None:
    heal = f"(sleep 1; {network.set_cable('up')}) &"
    played = play_job(
        *network.ranks(8),
        *at(call, f"sh={network.set_cable('down')}; {heal}"),
        environment=environment(two_nodes, network),
        ranks=8,
        nodes=2,
        rate=1000,
        calls=4000,
    )
    assert (played.disagreements, played.acted_unevenly, played.violations) == (0, 0, 0), played
    assert (played.abnormal_exits, played.hit_deadline) == (0, False), played
