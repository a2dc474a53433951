"""Jobs on two made-up nodes whose network is cut for a while.

The nodes are network namespaces, joined by one cable; needs root.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

import pytest

from dynamiccl.libraries import ADAPTIVE_NAME, TUNER_NAME
from tests.serve.jobs.arbiter import OFTEN, arbiter_of
from tests.serve.jobs.conftest import player_of
from tests.serve.jobs.play import at
from tests.serve.jobs.setting import Setting

DEVICE: Final = "cable"
ADDRESSES: Final = ("10.77.13.1", "10.77.13.2")


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], check=False, capture_output=True).returncode == 0


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Names of two namespaces, in which the other one is at the end of a cable."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and ip")
    both = (f"job-a-{os.getpid()}", f"job-b-{os.getpid()}")
    if not all(ip("netns", "add", node) for node in both):
        pytest.skip("no network namespaces here")
    try:
        cable = ("link", "add", DEVICE, "netns", both[0], "type", "veth", "peer", "name", DEVICE)
        assert ip(*cable, "netns", both[1])
        for node, address in zip(both, ADDRESSES, strict=True):
            assert ip("-n", node, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                assert ip("-n", node, "link", "set", device, "up")
        yield both
    finally:
        for node in both:
            ip("netns", "delete", node)


@pytest.mark.parametrize(
    ("library", "call"),
    [(TUNER_NAME, 0), (TUNER_NAME, 1000), (ADAPTIVE_NAME, 60), (ADAPTIVE_NAME, 600)],
)
def test_a_cut_that_heals_splits_and_fails_nobody(
    call: int, library: str, nodes: tuple[str, str], job_build_dir: Path, two_nodes: Setting
) -> None:
    """The arbiter is on the first node; communicators are made anew while the cable is down."""
    cable = f"ip netns exec {nodes[1]} ip link set {DEVICE}"
    cut = f"sh={cable} down; (sleep 1.5; {cable} up) &"
    places = [("--netns", f"{rank}:{nodes[rank // 4]}") for rank in range(8)]
    with arbiter_of(job_build_dir, two_nodes, within=("ip", "netns", "exec", nodes[0])) as arbiter:
        played = player_of(job_build_dir, library)(
            *chain.from_iterable(places),
            *at(call, cut),
            environment=two_nodes.by_arbiter(f"{ADDRESSES[0]}:{arbiter.port}") | OFTEN,
            release="2.30",
            ranks=8,
            nodes=2,
            comms=2,
            lifetime=1000,
            rate=1000,
            calls=4000,
            deadline=60,
        )
    assert all(comm.generations_acted > 0 for comm in played.communicators), played.log
    assert any(comm.switches for comm in played.communicators) == (library == ADAPTIVE_NAME)
