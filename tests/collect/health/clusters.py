"""Checks of simulated clusters, without a store."""

from typing import Any

import polars as pl

from dynamiccl.collect.health.findings import Report, examine
from dynamiccl.collect.health.short_run import Cluster, Repeated, short_sweep, usual_settings
from dynamiccl.collect.simulated import SimulatorRunner
from dynamiccl.datasets.rows import measurements_table
from dynamiccl.simulator.slow_parts import parse_slow


def rows(nodes: int, *slow: str, gpus: int = 8, seed: int = 0) -> pl.DataFrame:
    """The measurements of a short run."""
    base = usual_settings("mpirun")
    parts = tuple(map(parse_slow, slow))
    simulator = base.simulator.model_copy(update={"slow": parts, "seed": seed})
    base = base.model_copy(update={"simulator": simulator})
    made = short_sweep(Cluster(nodes, gpus, 64 << 20), base, "check")
    runner = SimulatorRunner(made.file)
    runner.check(made.trials)
    picks = Repeated(made.trials).next_picks(0, ())
    assert picks is not None
    found: list[dict[str, Any]] = []
    for launch in runner.launches(0, picks):
        done = runner.run(launch, lambda _: None)
        found += [dict(row) for _, rows in done.measured for row in rows]
    return pl.DataFrame(measurements_table(found))


def check(nodes: int, *slow: str, gpus: int = 8, seed: int = 0) -> Report:
    """The report of a check."""
    return examine(rows(nodes, *slow, gpus=gpus, seed=seed), least=0.05)


def named(report: Report) -> list[tuple[str, str]]:
    """Kind and place of each finding."""
    return [(finding.kind, finding.where) for finding in report.findings]
