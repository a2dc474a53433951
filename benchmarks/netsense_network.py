"""Slow links that are real: a network namespace for each rank, on a bridge, links shaped by tbf.

Needs root, iproute2, and iperf3 for cross traffic. The names hold this process's id, so that two
runs do not meet; what is made is taken away again, whatever happens in between.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

_PORT: Final = 29_511
_CROSS_PORT: Final = 5201
WORKER: Final = Path(__file__).with_name("netsense_worker.py")
TOOLS: Final = ("ip", "tc", "iperf3")
#: As the recipe in the paper's testbed has no numbers: a burst of 256 kB, 50 ms of queue.
_SHAPE: Final = ("burst", "256kb", "latency", "50ms")


def missing_tools() -> list[str]:
    """What a run needs and this machine lacks."""
    found = [tool for tool in TOOLS if shutil.which(tool) is None]
    return found if os.geteuid() == 0 else [*found, "root"]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Network:
    """`ranks` namespaces and one more for cross traffic, all on one bridge."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._tag = f"ns{os.getpid()}"
        self._switch = f"{self._tag}sw"
        self._nodes = [self.node(rank) for rank in range(ranks)]
        self._other = f"{self._tag}x"
        self._cross: list[subprocess.Popen[bytes]] = []

    def node(self, rank: int) -> str:
        """The namespace of a rank."""
        return f"{self._tag}n{rank}"

    def address(self, rank: int) -> str:
        """Its address."""
        return f"10.79.0.{rank + 1}"

    def __enter__(self) -> Self:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for number, name in enumerate([*self._nodes, self._other]):
            self._add(name, number)
        return self

    def _add(self, name: str, number: int) -> None:
        inside, outside = f"{name}i"[-15:], f"{name}o"[-15:]
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", inside, "type", "veth", "peer", "name", outside)
        _run("ip", "link", "set", inside, "netns", name)
        _run("ip", "link", "set", outside, "netns", self._switch)
        _run("ip", "-n", self._switch, "link", "set", outside, "master", "br0", "up")
        _run("ip", "-n", name, "link", "set", inside, "name", "eth0")
        _run("ip", "-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _run("ip", "-n", name, "link", "set", device, "up")

    def shape(self, mbit_per_s: float | None, links: Sequence[int]) -> None:
        """Give the links of these ranks a rate in both directions, and all others none."""
        for rank in range(self.ranks):
            name = self.node(rank)
            ends = ((name, "eth0"), (self._switch, f"{name}o"[-15:]))
            for namespace, device in ends:
                at = ("tc", "-n", namespace, "qdisc")
                if mbit_per_s is None or rank not in links:
                    # An error says that there was none.
                    subprocess.run(
                        [*at, "del", "dev", device, "root"], check=False, capture_output=True
                    )
                else:
                    rate = ("tbf", "rate", f"{mbit_per_s:g}mbit", *_SHAPE)
                    _run(*at, "replace", "dev", device, "root", *rate)

    def cross(self, mbit_per_s: float, rank: int) -> None:
        """From now on so much UDP traffic into a rank's link, by iperf3; 0 for none."""
        for process in reversed(self._cross):
            process.terminate()
            process.wait()
        self._cross = []
        if mbit_per_s:
            port = ("-p", str(_CROSS_PORT))
            server = ["ip", "netns", "exec", self.node(rank), "iperf3", "-s", *port]
            client = ["ip", "netns", "exec", self._other, "iperf3", "-c", self.address(rank)]
            client += [*port, "-u", "-b", f"{mbit_per_s:g}M", "-l", "1400", "-t", "100000"]
            for command in (server, client):
                self._cross.append(
                    subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                )
                time.sleep(1.0)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cross(0, 0)
        for name in (*self._nodes, self._other, self._switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


class Job:
    """The workers, one in each namespace; they do phase after phase."""

    def __init__(self, network: Network, log: Path) -> None:
        self._network = network
        self._log: IO[bytes] = log.open("wb")
        self._workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        master = f"tcp://{self._network.address(0)}:{_PORT}"
        for rank in range(self._network.ranks):
            command = ["ip", "netns", "exec", self._network.node(rank), sys.executable, "-P"]
            command += [str(WORKER), "--rank", str(rank), "--ranks", str(self._network.ranks)]
            path = f"{WORKER.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
            settings = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
            self._workers.append(
                subprocess.Popen(
                    [*command, "--master", master],
                    env=os.environ | settings,
                    stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if rank == 0 else self._log,
                    stderr=self._log,
                )
            )
        return self

    def run(self, **phase: Any) -> list[dict[str, Any]]:
        """What rank 0 said of each step of a phase."""
        first = self._workers[0]
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.write(json.dumps(phase).encode() + b"\n")
        first.stdin.flush()
        found: list[dict[str, Any]] = []
        for line in first.stdout:
            told = json.loads(line)
            if told.get("end"):
                return found
            found.append(told)
        raise RuntimeError(f"the workers ended in phase {phase}: see {self._log.name}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        first = self._workers[0]
        with suppress(OSError):
            if first.stdin is not None:
                first.stdin.write(b"null\n")
                first.stdin.close()
        for worker in self._workers:
            try:
                worker.wait(10.0)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self._log.close()
