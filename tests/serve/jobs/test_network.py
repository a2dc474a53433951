"""A job on made-up nodes whose network is cut for a while, or whose name server never answers.

The nodes are network namespaces, two of them joined by one cable; needs root.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from dynamiccl.libraries import ADAPTIVE_NAME
from tests.serve.jobs.conftest import Player
from tests.serve.jobs.play import assert_never_split, at, play
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


@pytest.mark.parametrize(
    "call", [0, 60, 600, *(pytest.param(call, marks=pytest.mark.soak) for call in (20, 200))]
)
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
    assert_never_split(played)


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
    assert_never_split(played)


#: Hears of names, tells so in a file, and never answers.
SILENT: Final = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
print("listens", flush=True)
while True:
    server.recvfrom(512)
    open(sys.argv[1], "w").write("asked")
"""


@pytest.fixture
def silent_names(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A node whose name server is silent, for longer than a job may take, and what it heard."""
    node, asked = f"job-silent-{os.getpid()}", tmp_path / "asked"
    if shutil.which("ip") is None or os.geteuid() != 0 or not ip("netns", "add", node):
        pytest.skip("needs root, ip and network namespaces")
    settings = Path("/etc/netns") / node  # `ip netns exec` lays it over /etc
    try:
        settings.mkdir(parents=True)
        (settings / "resolv.conf").write_text(
            "nameserver 127.0.0.1\noptions timeout:30 attempts:2\n"
        )
        assert ip("-n", node, "link", "set", "lo", "up")
        command = ["ip", "netns", "exec", node, sys.executable, "-c", SILENT, str(asked)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "listens\n"
            yield node, asked
            server.kill()
    finally:
        shutil.rmtree(settings, ignore_errors=True)
        ip("netns", "delete", node)


def test_a_silent_name_server_delays_no_job_for_long(
    silent_names: tuple[str, Path],
    job_build_dir: Path,
    four_ranks: Setting,
    tmp_path: Path,
) -> None:
    node, asked = silent_names
    inside = tmp_path / "inside"
    inside.write_text(f'#!/bin/sh\nexec ip netns exec {node} {job_build_dir / "play_job"} "$@"\n')
    inside.chmod(0o755)
    played = play(
        inside,
        job_build_dir / ADAPTIVE_NAME,
        environment=four_ranks.environment() | {"DYNAMICCL_COORDINATOR": "nowhere.example:29999"},
        ranks=4,
        comms=3,
        rate=4000,
        calls=800,
        deadline=25,
    )
    assert played.is_sound, played
    assert played.acted == 0
    assert asked.read_text()
