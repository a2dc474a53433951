"""Recall and false alarms of `dynamiccl-collect health` on simulated clusters.

    python benchmarks/bench_health.py

Clusters of 2 to 64 nodes of 8 GPUs (H100, noise with heavy tails), all of whose GPUs are paired up
as by examples/health.toml, once or twice. What is slow slows every communicator that it is in by
its factor, and no other. *Recall*: clusters with one slow GPU, NIC, node or link, of which that
part is named and no other. A node with one partner (of two nodes, and two of three) has NICs that
cannot be told from the partner's: there it is to name the pair. *False alarms*: findings in healthy
clusters, for each cluster.
"""

import random
from itertools import product
from typing import Any, Final

import polars as pl
from harness import ROOT, write_result

from dynamiccl.collect.grid import communicators
from dynamiccl.collect.health import Report, examine
from dynamiccl.collect.simulated import SimulatorRunner
from dynamiccl.collect.sweep import GroupShape, load_sweep, parse_sweep, sweep_text
from dynamiccl.datasets.store import measurements_table

EXAMPLE: Final = ROOT / "examples" / "health.toml"
GPUS: Final = 8
LEAST: Final = 0.05
FACTORS: Final = (1.1, 1.3, 2.0)
KINDS: Final = ("gpu", "nic", "node", "link")
#: Nodes -> clusters of each kind and factor, and healthy ones.
CLUSTERS: Final = {n: (8, 100 if n in {2, 4} else 50) for n in (2, 3, 4, 5, 16)} | {64: (3, 10)}


def rows(nodes: int, *slow: str, gpus: int = GPUS, seed: int = 0) -> pl.DataFrame:
    """Measurements of a cluster with slow parts: gpu:3:1:1.3, nic:3:1:2, node:3:2, link:0:3:2.

    By the example's sweep, each launch once; `gpus` is a power of two.
    """
    ranks = nodes * gpus
    bits = (ranks - 1).bit_length()
    splits = [f"AND {(1 << bits) - 1 - (1 << bit):#x}" for bit in range(bits)]
    if nodes & (nodes - 1):
        splits += [f"MOD {apart * gpus}" for apart in range((nodes + 1) // 2, nodes)]
    groups = []
    for split in splits:
        spare = 2 * len(communicators(split, nodes, gpus, spare=True)) < ranks
        group = GroupShape(num_nodes=nodes, ranks_per_node=gpus, split=split, spare=spare)
        groups.append(group)
    file = load_sweep(EXAMPLE).file
    simulator = file.simulator.model_copy(update={"seed": seed})
    # Nine rows a launch, as many as its five sizes have out of place and in place.
    sizes = file.sizes.model_copy(update={"min": 1 << 20})
    update = {"groups": tuple(groups), "sizes": sizes, "cycles": 1, "simulator": simulator}
    made = parse_sweep(sweep_text(file.model_copy(update=update)), where="the cluster's sweep")
    runner = SimulatorRunner(made.file)
    found: list[dict[str, Any]] = []
    for launch in runner.launches(0, made.trials):
        measured = runner.run(launch, lambda _: None).measured
        found += [dict(row) for _, of_trial in measured for row in of_trial]
    for row in found:
        row["process_times_us"] = [*row["process_times_us"]]
        for members in communicators(row["comm_split"], row["num_hosts"], gpus, spare=True):
            factor = max((slowdown(part, members, gpus) for part in slow), default=1.0)
            for process in members:
                row["process_times_us"][process] *= factor
    return pl.DataFrame(measurements_table(found))


def slowdown(part: str, members: tuple[int, ...], gpus: int) -> float:
    """How many times as long the communicator of these processes takes for a slow part."""
    kind, *rest, factor = part.split(":")
    node, other = int(rest[0]), int(rest[-1])
    places = [divmod(process, gpus) for process in members]
    nodes = {place[0] for place in places}
    uses = {
        "gpu": (node, other) in places and len(nodes) == 1,
        "nic": (node, other) in places and len(nodes) > 1,
        "node": node in nodes,
        "link": nodes == {node, other},
    }
    return float(factor) if uses[kind] else 1.0


def is_named(report: Report, part: str, nodes: int) -> bool:
    """Whether the report has the slow part, and nothing else."""
    kind, node, *rest = part.split(":")
    if kind == "link":
        first, last = sorted((int(node), int(rest[0])))
        where = f"node{first} - node{last}"
    else:
        where = f"node{node}" + (f" GPU {rest[0]}" if kind != "node" else "")
    if kind == "nic" and (nodes == 2 or (nodes == 3 and int(node) > 0)):
        kind, where = "link", f"node0 - node{max(int(node), 1)} GPU {rest[0]}"
    return [(one["kind"], one["where"]) for one in report["findings"]] == [(kind, where)]


def check(nodes: int, *slow: str, seed: int = 0) -> Report:
    """The report on a cluster: measured once, and again where something looks slow."""
    one = rows(nodes, *slow, seed=seed)
    report = examine(one, least=LEAST)
    if report["is_well"]:
        return report
    other = rows(nodes, *slow, seed=seed + 1).with_columns(sweep=pl.lit("again"))
    return examine(pl.concat([one, other]), least=LEAST)


def main() -> None:
    """Check clusters, and write the figures."""
    draw, alarms, named = random.Random(0), list[int](), list[bool]()
    for nodes, (sick, healthy) in CLUSTERS.items():
        for seed in range(healthy):
            alarms.append(len(check(nodes, seed=1000 * nodes + 2 * seed)["findings"]))
        # Of two nodes a slow link slows all that is measured between them: nothing to compare with.
        kinds = KINDS if nodes > 2 else KINDS[:3]
        for kind, factor, seed in product(kinds, FACTORS, range(sick)):
            node, place = draw.randrange(nodes), ""
            if kind != "node":
                # A link that is measured is between nodes whose numbers differ in one bit.
                others = [node ^ (1 << bit) for bit in range(nodes.bit_length())]
                other = draw.choice([each for each in others if each < nodes])
                place = f"{other if kind == 'link' else draw.randrange(GPUS)}:"
            part = f"{kind}:{node}:{place}{factor}"
            named.append(is_named(check(nodes, part, seed=7000 * nodes + 2 * seed), part, nodes))
    figures = {
        "health_recall": sum(named) / len(named),
        "health_clusters": len(named),
        "health_false_alarms": sum(alarms) / len(alarms),
        "health_healthy_clusters": len(alarms),
    }
    write_result("health", figures)


if __name__ == "__main__":
    main()
