"""Recall and false alarms of `dynamiccl-collect health` on simulated clusters.

    python benchmarks/bench_health.py

Simulated clusters of 2 to 512 nodes of 8 GPUs (H100, the simulator's noise with its heavy tails), a
check of each as the command does it: a short run, and a second one where the first finds something.
*Recall*: clusters with one slow GPU, NIC, node or link, of which the check names that part and no
other. A node with one partner (of two nodes, and two of three) has NICs that cannot be told from
the partner's: there it is to name the pair. *False alarms*: findings in healthy clusters, for each
cluster.

Writes out/bench/health.json.
"""

import random
import sys
from collections.abc import Mapping
from typing import Any, Final

import polars as pl
from harness import write_result

from dynamiccl.collect.health.findings import Report, examine
from dynamiccl.collect.health.short_run import Cluster, Repeated, short_sweep, usual_settings
from dynamiccl.collect.simulated import SimulatorRunner
from dynamiccl.datasets.rows import measurements_table
from dynamiccl.simulator.slow_parts import SlowPart

GPUS: Final = 8
SIZE_BYTES: Final = 64 << 20
LEAST: Final = 0.05
FACTORS: Final = (1.1, 1.3, 2.0)
KINDS: Final = ("gpu", "nic", "node", "link")
#: Nodes -> clusters of each kind and factor, and healthy ones.
CLUSTERS: Final = {2: (8, 100), 3: (8, 50), 4: (8, 100), 5: (8, 50), 16: (8, 50), 64: (3, 10)}
#: The same, of one that takes a minute each.
LARGE: Final = {512: (1, 2)}
#: The simulator's own noise (1.5 %, one call in fifty slow by a multiple), and a loud one.
QUIET: Final[Mapping[str, float]] = {}
LOUD: Final[Mapping[str, float]] = {"noise_sigma": 0.06, "tail_probability": 0.15}
LOUD_NODES: Final = 8
#: The command's default.
LAUNCHES: Final = 2


def check(
    nodes: int, slow: tuple[SlowPart, ...], seed: int, noise: Mapping[str, float] = QUIET
) -> Report:
    """The report of a check of a cluster."""
    base = usual_settings("mpirun")
    settings = base.simulator.model_copy(update={"slow": slow, "seed": seed, **noise})
    base = base.model_copy(update={"simulator": settings})
    frames = []
    for number in range(LAUNCHES):
        cluster = Cluster(nodes, GPUS, SIZE_BYTES)
        made = short_sweep(cluster, base, f"check-{number}", again=number)
        runner = SimulatorRunner(made.file)
        picks = Repeated(made.trials).next_picks(0, ())
        assert picks is not None
        rows: list[dict[str, Any]] = []
        for launch in runner.launches(0, picks):
            done = runner.run(launch, lambda _: None)
            rows += [dict(row) for _, measured in done.measured for row in measured]
        frames.append(pl.DataFrame(measurements_table(rows)))
        report = examine(pl.concat(frames), least=LEAST)
        if report.is_well:
            break
    return report


def drawn(kind: str, nodes: int, factor: float, draw: random.Random) -> SlowPart:
    """A random slow part of a cluster."""
    node = draw.randrange(nodes)
    if kind in {"gpu", "nic"}:
        return SlowPart(kind=kind, node=node, gpu=draw.randrange(GPUS), factor=factor)
    if kind == "node":
        return SlowPart(kind="node", node=node, factor=factor)
    # One that is measured: nodes whose numbers differ in one bit.
    others = [node ^ (1 << bit) for bit in range(nodes.bit_length())]
    to_node = draw.choice([other for other in others if other < nodes])
    return SlowPart(kind="link", node=node, to_node=to_node, factor=factor)


def is_named(report: Report, part: SlowPart, nodes: int) -> bool:
    """Whether the check reports the slow part, and nothing else."""
    if len(report.findings) != 1:
        return False
    (finding,) = report.findings
    ends = sorted((part.node, part.to_node or 0))
    wanted = {
        "gpu": ("gpu", f"node{part.node} GPU {part.gpu}"),
        "nic": ("nic", f"node{part.node} GPU {part.gpu}"),
        "node": ("node", f"node{part.node}"),
        "link": ("link", f"node{ends[0]} - node{ends[1]}"),
    }[part.kind]
    if part.kind == "nic" and has_one_partner(part.node, nodes):
        wanted = ("link", f"node0 - node{max(part.node, 1)} GPU {part.gpu}")
    return (finding.kind, finding.where) == wanted


def has_one_partner(node: int, nodes: int) -> bool:
    """Whether a node is paired with one other only, so that neither can be told from the other."""
    return nodes == 2 or (nodes == 3 and node > 0)


def in_loud_noise(draw: random.Random) -> tuple[list[bool], list[int]]:
    """Whether 1.1x is named, and findings in healthy clusters, where rows differ by 6 %."""
    named, alarms = [], []
    for seed in range(24):
        alarms.append(len(check(LOUD_NODES, (), seed, LOUD).findings))
        part = drawn(KINDS[seed % len(KINDS)], LOUD_NODES, min(FACTORS), draw)
        named.append(is_named(check(LOUD_NODES, (part,), 100 + seed, LOUD), part, LOUD_NODES))
    return named, alarms


def main() -> None:
    """Check clusters, and write the figures."""
    draw = random.Random(0)
    named: dict[str, list[bool]] = {}
    alarms: list[int] = []
    for nodes, (sick, healthy) in {**CLUSTERS, **LARGE}.items():
        for seed in range(healthy):
            alarms.append(len(check(nodes, (), 1000 * nodes + seed).findings))
        # Of two nodes a slow link slows all that is measured between them: nothing to compare with.
        for kind in KINDS if nodes > 2 else KINDS[:3]:
            for factor in FACTORS:
                for seed in range(sick):
                    part = drawn(kind, nodes, factor, draw)
                    found = is_named(check(nodes, (part,), 7000 * nodes + seed), part, nodes)
                    for name in (f"{factor:g}x", kind, f"{nodes}_nodes"):
                        named.setdefault(name, []).append(found)
        print(f"{nodes} nodes done", file=sys.stderr)
    loud, loud_alarms = in_loud_noise(draw)
    every = [found for factor in FACTORS for found in named[f"{factor:g}x"]]
    figures = {f"health_recall_{name}": sum(found) / len(found) for name, found in named.items()}
    write_result(
        "health",
        {
            "health_recall": sum(every) / len(every),
            **figures,
            "health_clusters": len(every),
            "health_false_alarms": sum(alarms) / len(alarms),
            "health_healthy_clusters": len(alarms),
            "health_recall_1.1x_loud": sum(loud) / len(loud),
            "health_false_alarms_loud": sum(loud_alarms) / len(loud_alarms),
        },
    )


if __name__ == "__main__":
    main()
