"""A Ray cluster on this machine: real nodes in network namespaces.

Two namespaces, joined by a cable and without a route to anywhere else, hold a node of one processor
each. What runs there is a child of the test and dies with it (PR_SET_PDEATHSIG).
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.cluster.slurm import processes_with, spawn_mortal, wait_until

PROGRAMS = ("ip", "nsenter", "setpriv", "unshare")
PORT = 6379
#: In the environment of all that belongs to a cluster, with the node behind it.
_MARK = "DYNAMICCL_TEST_RAY"
#: Bytes of shared memory of a node; the least that Ray takes is about this.
_STORE_BYTES = 80 << 20


def missing() -> str | None:
    """Why no cluster can be started here, or None."""
    if find_spec("ray") is None:
        return "Ray is not installed (extra 'ray')"
    if os.geteuid() != 0:
        return "network namespaces need root here"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "network namespaces are not allowed here"


class RayNodes:
    """The cluster. `start` before use, `stop` after it."""

    def __init__(self) -> None:
        # Short, since the path of a socket has at most 107 characters.
        self.root = Path(tempfile.mkdtemp(prefix="dcr-", dir="/tmp"))
        self.nodes = ["r1", "r2"]
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        """The head's; it is `r1`."""
        return f"10.79.0.1:{PORT}"

    def environ(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = {name: v for name, v in os.environ.items() if not name.startswith("RAY_")}
        ours = {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "HOME": str(self.root),
            _MARK: str(self.root),
            # A node that falls silent is given up after some seconds, not after half a minute.
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "3000",
        }
        return {**kept, **ours, **(env or {})}

    def wrap(self, argv: Sequence[str], node: str = "r1") -> list[str]:
        """The command as it is run on a node."""
        holder = self._children[f"holder-{node}"].pid
        return ["nsenter", f"--target={holder}", "--net", "--uts", "--", *argv]

    def start(self) -> None:
        for node in self.nodes:
            script = f"hostname {node}; echo > {self.root}/{node}.up; exec sleep infinity"
            self._spawn(f"holder-{node}", ["unshare", "--net", "--uts", "sh", "-c", script])
        for node in self.nodes:
            wait_until((self.root / f"{node}.up").exists, f"namespace of {node}")
        peer = self._children["holder-r2"].pid
        self._ip("r1", f"link add eth0 type veth peer name eth0 netns {peer}")
        for number, node in enumerate(self.nodes, 1):
            self._ip(node, f"addr add 10.79.0.{number}/24 dev eth0")
            self._ip(node, "link set eth0 up")
            self._ip(node, "link set lo up")
        (self.root / "tmp").mkdir()
        self.start_node("r1")
        wait_until(lambda: self._alive() == 1, "the head is up", 60)
        self.start_node("r2")
        wait_until(lambda: self._alive() == 2, "both nodes are up", 60)

    def start_node(self, node: str) -> None:
        role = ["--address", self.address]
        if node == "r1":
            role = ["--head", f"--port={PORT}", "--include-dashboard=false"]
            role += [f"--temp-dir={self.root}/tmp"]
        ray = ["-P", "-m", "ray.scripts.scripts", "start", "--block", *role]
        facts = [f"--node-ip-address=10.79.0.{node[1]}", "--num-cpus=1", "--num-gpus=0"]
        size = f"--object-store-memory={_STORE_BYTES}"
        argv = self.wrap([sys.executable, *ray, *facts, size], node)
        self._spawn(f"ray-{node}", argv, {_MARK: f"{self.root}/{node}"})

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node at once, as a power failure would."""
        for pid in self._processes(f"{_MARK}={self.root}/{node}"):
            os.kill(pid, signal.SIGKILL)
        self._children.pop(f"ray-{node}").wait(10)

    def stop(self) -> None:
        for pid in self._processes(f"{_MARK}={self.root}"):
            os.kill(pid, signal.SIGKILL)
        for child in self._children.values():
            child.wait(10)
        shutil.rmtree(self.root)

    def _alive(self) -> int:
        """Nodes that the head knows of; none before it answers."""
        code = (
            "import sys; from ray._raylet import GcsClient; "
            "nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5).values(); "
            "print(sum(node.state == 0 for node in nodes))"
        )
        argv = self.wrap([sys.executable, "-P", "-c", code, self.address])
        done = subprocess.run(argv, env=self.environ(), capture_output=True, text=True, check=False)
        return int(done.stdout) if done.returncode == 0 else 0

    def _processes(self, mark: str) -> list[int]:
        """Those with a variable that begins with `mark`: a node's, or all of the cluster's."""
        return processes_with(lambda variable: variable.startswith(mark.encode()))

    def _spawn(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._children[name] = spawn_mortal(argv, self.environ(env), self.root / "nodes.log")

    def _ip(self, node: str, words: str) -> None:
        subprocess.run(self.wrap(["ip", *words.split()], node), check=True, capture_output=True)
