"""The gradient hook against all-reduce, top-k, 16 bits and PowerSGD, over links really slow.

    python benchmarks/bench_netsense.py [SCENARIO]...     all of them without a name: 40 minutes

Four workers in network namespaces of one machine (netsense_network.py) train a model with 46 MB of
gradients (netsense_training.py). Steps are kept in out/bench/netsense-steps.json, scenario by
scenario, and figures of all that were run go to out/bench/netsense.json. Needs root and Linux.

    stable       200, 500, 800 Mbit/s on two of four links, and no shaping: every method's step time
    accuracy     every method for 200 steps, to the end of a learning rate schedule
    long         all-reduce and NetSense at 200 Mbit/s for 600 steps
    degrading    2,000 to 200 Mbit/s on all links, by turns
    fluctuating  500 Mbit/s on two links, one of which iperf3 fills with other traffic by turns
    vgg16        528 MB of gradients, once: all-reduce and NetSense
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from harness import OUT, write_result
from netsense_figures import figures_of
from netsense_network import Job, Network, missing_tools
from netsense_training import METHODS, RESNET18, TIGHT, VGG16

RANKS: Final = 4
STEPS: Final = OUT / "netsense-steps.json"
RATES: Final = (200, 500, 800, None)
BOTTLENECKS: Final = (0, 1)
#: Steps of a method; an adaptive one has to find its ratio first.
STATIC_STEPS: Final = 8
ADAPTIVE_STEPS: Final = 36
#: ... and in each level of a scenario that changes.
LEVEL_STEPS: Final = 40
ACCURACY_STEPS: Final = 200
LONG_STEPS: Final = 600
DEGRADING: Final = (2000, 1000, 500, 200)
#: Mbit/s of other traffic into the first worker's link of 500.
CROSS: Final = (0, 200, 350, 100, 300, 0)
DYNAMIC: Final = tuple(each for each in METHODS if each != "netsense-paper")

Steps = list[dict[str, Any]]
Runs = list[tuple[str, int | None]]


def adaptive(method: str) -> bool:
    """Whether a method changes with the network."""
    return method.startswith("netsense")


def stable(network: Network, job: Job) -> dict[str, Any]:
    """Scenario 1, throughput: rate -> method -> steps."""
    found: dict[str, Any] = {}
    for rate in RATES:
        network.shape(rate, BOTTLENECKS)
        found[str(rate)] = {}
        for method in (*METHODS, *((TIGHT,) if rate == 200 else ())):
            steps = ADAPTIVE_STEPS if adaptive(method) else STATIC_STEPS
            found[str(rate)][method] = job.run(method=method, size=RESNET18, steps=steps)
    return found


def train(network: Network, job: Job, runs: Runs, steps: int) -> dict[str, Any]:
    """Whole trainings, by "method" or "method@rate"."""
    found: dict[str, Any] = {}
    for method, rate in runs:
        network.shape(rate, BOTTLENECKS)
        phase = {"method": method, "size": RESNET18, "steps": steps, "schedule": steps}
        name = f"{method}@{rate}" if rate else method
        found[name] = job.run(**phase, test_every=steps // 5)
        print(name, found[name][-1]["accuracy"], flush=True)
    return found


def accuracy(network: Network, job: Job) -> dict[str, Any]:
    """Scenario 1, accuracy: every method for a short schedule.

    What a static method computes does not depend on the rate: it is trained once, without shaping.
    """
    runs: Runs = [(m, None) for m in METHODS if not adaptive(m)]
    runs += [("netsense", 200), ("netsense", 500), ("netsense", 800), ("netsense-paper", 200)]
    return train(network, job, runs, ACCURACY_STEPS)


def long(network: Network, job: Job) -> dict[str, Any]:
    """The same for a longer schedule, of fewer methods: error feedback takes 1/ratio steps."""
    runs: Runs = [("allreduce", None), ("netsense", 200)]
    return train(network, job, runs, LONG_STEPS)


def dynamic(network: Network, job: Job, change: Callable[[int], None], levels: int) -> Any:
    """Scenarios 2 and 3: method -> level -> steps of one training that goes on."""
    found: dict[str, list[Steps]] = {}
    for method in DYNAMIC:
        steps = LEVEL_STEPS if adaptive(method) else 6
        found[method] = []
        for level in range(levels):
            change(level)
            keep = level > 0
            if not keep:
                job.run(method=method, size=RESNET18, steps=4)
            found[method].append(job.run(method=method, size=RESNET18, steps=steps, keep=True))
    network.shape(None, ())
    return found


def degrading(network: Network, job: Job) -> Any:
    """Scenario 2."""
    links = range(RANKS)
    return dynamic(network, job, lambda i: network.shape(DEGRADING[i], links), len(DEGRADING))


def fluctuating(network: Network, job: Job) -> Any:
    """Scenario 3."""
    network.shape(500, BOTTLENECKS)
    try:
        return dynamic(network, job, lambda i: network.cross(CROSS[i], 0), len(CROSS))
    finally:
        network.cross(0, 0)


def vgg16(network: Network, job: Job) -> Any:
    """528 MB once: method -> steps."""
    network.shape(500, BOTTLENECKS)
    plan = {"allreduce": 2, "netsense": 14}
    # A width of 5,750 in four blocks diverges at the rate that seven of 1,280 learn with.
    return {m: job.run(method=m, size=VGG16, steps=n, rate_factor=0.02) for m, n in plan.items()}


SCENARIOS: Final = {
    "stable": stable,
    "degrading": degrading,
    "fluctuating": fluctuating,
    "vgg16": vgg16,
    "accuracy": accuracy,
    "long": long,
}


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
