"""The gradient hook against all-reduce, top-k and 16 bits, over links really slow.

    python benchmarks/bench_netsense.py [SCENARIO]...     all of them without a name: half an hour

Four workers in network namespaces of one machine, on a bridge, links shaped by tbf, train a model
with 46 MB of gradients (netsense_worker.py). Steps are kept in out/bench/netsense-steps.json,
scenario by scenario, and figures of all that were run go to out/bench/netsense.json. Needs root,
Linux and iproute2.

    stable       200, 500, 800 Mbit/s on two of four links, and no shaping: every method's step time
    accuracy     every method for 200 steps, to the end of a learning rate schedule
    long         all-reduce and NetSense at 200 Mbit/s for 600 steps
    degrading    2,000 to 200 Mbit/s on all links, by turns: how long NetSense takes to settle

A method's step time is the median of its last steps under one rate. A static method counts as best
only if it reaches the target accuracy: all-reduce's at the end of equal steps, less 0.5 points.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import IO, Any, Final, Self

from harness import OUT, write_result
from netsense_worker import BATCH, METHODS, OURS

RANKS: Final = 4
STEPS: Final = OUT / "netsense-steps.json"
RATES: Final = (200, 500, 800, None)
BOTTLENECKS: Final = (0, 1)
#: Steps of a method, and how many of the last are measured; an adaptive one has to find its ratio.
STATIC: Final = (8, 4)
ADAPTIVE: Final = (36, 16)
#: ... and in each level of a scenario that changes.
LEVEL_STEPS: Final = 40
ACCURACY_STEPS: Final = 200
LONG_STEPS: Final = 600
DEGRADING: Final = (2000, 1000, 500, 200)
TARGET_POINTS: Final = 0.5
_PORT: Final = 29_511
WORKER: Final = Path(__file__).with_name("netsense_worker.py")
TOOLS: Final = ("ip", "tc")
#: As the recipe in the paper's testbed has no numbers: a burst of 256 kB, 50 ms of queue.
_SHAPE: Final = ("burst", "256kb", "latency", "50ms")


def missing_tools() -> list[str]:
    """What a run needs and this machine lacks."""
    found = [tool for tool in TOOLS if shutil.which(tool) is None]
    return found if os.geteuid() == 0 else [*found, "root"]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Network:
    """`ranks` namespaces on a bridge; names hold this process's id, and all is taken away again."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._tag = f"ns{os.getpid()}"
        self._switch = f"{self._tag}sw"
        self._nodes = [self.node(rank) for rank in range(ranks)]

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
        for number, name in enumerate(self._nodes):
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

    def __exit__(self, *_: object) -> None:
        for name in (*self._nodes, self._switch):
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

    def __exit__(self, *_: object) -> None:
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


Steps = Sequence[Mapping[str, Any]]
Runs = list[tuple[str, int | None]]
Figures = dict[str, float | int | str | None]


# --- what is run ---


def stable(network: Network, job: Job) -> dict[str, Any]:
    """Throughput: rate -> method -> steps."""
    found: dict[str, Any] = {}
    for rate in RATES:
        network.shape(rate, BOTTLENECKS)
        found[str(rate)] = {
            method: job.run(method=method, steps=(ADAPTIVE if method == OURS else STATIC)[0])
            for method in METHODS
        }
    return found


def train(network: Network, job: Job, runs: Runs, steps: int) -> dict[str, Any]:
    """Whole trainings, by "method" or "method@rate"."""
    found: dict[str, Any] = {}
    for method, rate in runs:
        network.shape(rate, BOTTLENECKS)
        name = f"{method}@{rate}" if rate else method
        found[name] = job.run(method=method, steps=steps, schedule=steps, test_every=steps // 5)
        print(name, found[name][-1]["accuracy"], flush=True)
    return found


def accuracy(network: Network, job: Job) -> dict[str, Any]:
    """Every method for a short schedule.

    What a static method computes does not depend on the rate: it is trained once, without shaping.
    """
    runs: Runs = [(method, None) for method in METHODS if method != OURS]
    runs += [(OURS, rate) for rate in RATES if rate is not None]
    return train(network, job, runs, ACCURACY_STEPS)


def long(network: Network, job: Job) -> dict[str, Any]:
    """The same for a longer schedule, of fewer methods: error feedback takes 1/ratio steps."""
    return train(network, job, [("allreduce", None), (OURS, 200)], LONG_STEPS)


def degrading(network: Network, job: Job) -> Any:
    """NetSense alone: the steps of each level of one training that goes on."""
    found = []
    for level, rate in enumerate(DEGRADING):
        network.shape(rate, range(RANKS))
        found.append(job.run(method=OURS, steps=LEVEL_STEPS, keep=level > 0))
    network.shape(None, ())
    return found


SCENARIOS: Final = {"stable": stable, "degrading": degrading, "accuracy": accuracy, "long": long}


# --- figures: pure, so that they can be made again of kept steps ---


def late(method: str, steps: Steps) -> Steps:
    """The steps that are measured."""
    return steps[-(ADAPTIVE if method == OURS else STATIC)[1] :]


def figures_of(kept: Mapping[str, Any]) -> Figures:
    """All figures that the scenarios in `kept` allow."""
    found: Figures = {"workers": RANKS, "batch_per_worker": BATCH}
    found |= {f"minutes_{name}": round(each["minutes"], 1) for name, each in kept.items()}
    told = {name: each["steps"] for name, each in kept.items()}
    runs = told.get("accuracy", {})
    for suffix, trained in (("", runs), ("_long", told.get("long", {}))):
        for name, steps in trained.items():
            gap = 100.0 * (trained["allreduce"][-1]["accuracy"] - steps[-1]["accuracy"])
            found[f"accuracy_{name}{suffix}"] = steps[-1]["accuracy"]
            found[f"accuracy_gap_points_{name}{suffix}"] = gap
    reaching = {n for n in runs if float(found[f"accuracy_gap_points_{n}"] or 0.0) <= TARGET_POINTS}
    for rate, methods in told.get("stable", {}).items():
        name = rate if rate != "None" else "unshaped"
        found |= _stable(name, methods, reaching if runs else set(METHODS))
    for level, steps in enumerate(told.get("degrading", [])):
        ratios = [step["ratio"] for step in steps]
        found[f"ratio_degrading_{level}"] = median(ratios[-12:])
        found[f"settled_after_degrading_{level}"] = settled_after(ratios)
    return found


def _stable(rate: str, methods: Mapping[str, Steps], reaching: set[str]) -> Figures:
    times = {m: median(float(s["seconds"]) for s in late(m, each)) for m, each in methods.items()}
    static = {method: seconds for method, seconds in times.items() if method != OURS}
    best = min(reaching & set(static), key=lambda method: static[method])
    ours = late(OURS, methods[OURS])
    return {
        **{f"step_s_{method}_{rate}": seconds for method, seconds in times.items()},
        **{f"speedup_vs_{method}_{rate}": s / times[OURS] for method, s in static.items()},
        f"best_static_{rate}": best,
        f"vs_best_static_{rate}": static[best] / times[OURS],
        f"vs_any_static_{rate}": min(static.values()) / times[OURS],
        f"ratio_{rate}": median(step["ratio"] for step in ours),
        f"method_{rate}": next(n for n in ("dense", "fp16", "sparse") if ours[-1][n]),
    }


def settled_after(ratios: Sequence[float]) -> int | None:
    """Steps after which a ratio's median of five is within 10 % of its last eight's median."""
    last = median(ratios[-8:])
    inside = [abs(median(ratios[i : i + 5]) / last - 1.0) <= 0.1 for i in range(len(ratios) - 4)]
    return next((i for i in range(len(inside)) if all(inside[i:])), None)


def main(names: list[str]) -> None:
    """Run what was asked for, keep it, and write the figures of all that there is."""
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        sys.exit(f"unknown scenario {unknown[0]}: choose from {', '.join(SCENARIOS)}")
    missing = missing_tools()
    if missing:
        print(f"bench_netsense is skipped: it needs {', '.join(missing)}")
        return
    OUT.mkdir(parents=True, exist_ok=True)
    for name in names or list(SCENARIOS):
        start = time.monotonic()
        with Network(RANKS) as network, Job(network, OUT / "netsense.log") as job:
            steps = SCENARIOS[name](network, job)
        kept = json.loads(STEPS.read_text(encoding="utf-8")) if STEPS.exists() else {}
        kept[name] = {"steps": steps, "minutes": (time.monotonic() - start) / 60.0}
        STEPS.write_text(json.dumps(kept), encoding="utf-8")
        print(f"{name}: {kept[name]['minutes']:.1f} minutes", flush=True)
    write_result("netsense", figures_of(json.loads(STEPS.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main(sys.argv[1:])
