"""Detection rate and false alarms of `dynamiccl-collect compare` on pairs of simulated sweeps.

    python benchmarks/bench_compare.py          # 20 pairs of each kind; FULL=1: 100

Sweeps with other seeds (2 % of noise, one launch in some hundred slow by a multiple, a drift that a
run shares), 336 cells each. *Scattered*: 3 or 6 % slower in one cell of twenty, drawn anywhere.
*Range*: the same share of cells, all of one config at neighbouring sizes. A pair is found when
`compare` would end with exit code 1. *False*: the share of the cells named that were not slowed.

Writes out/bench/compare.json. Three minutes on one core.
"""

import os
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
from harness import write_result

from dynamiccl.collect.compare import CELL, compare
from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.cells import CONFIG_COLUMNS, usable
from dynamiccl.datasets.store import read

SWEEP: Final = """
name = "s{seed}"
system = "h100-ib-simulated"
collectives = ["AllReduce", "AllGather", "ReduceScatter"]
algorithms = ["Ring", "Tree", "NVLSTree"]
groups = [{{ num_nodes = 4, ranks_per_node = 8 }}]
sizes = {{ min = "1K", max = "1G", factor = 2 }}
nccl_version = "2.27.5"
cycles = {cycles}
[simulator]
seed = {seed}
noise_sigma = 0.02
"""
SHARE: Final = 0.05
LINE: Final = ("collective", *CONFIG_COLUMNS)


def main() -> None:
    """Judge pairs of every kind."""
    count = 100 if os.environ.get("FULL") else 20
    figures: dict[str, float | int | str | None] = {"compare_pairs": count}
    for cycles in (3, 5, 10):
        pairs = [(sweep(2 * i, cycles), sweep(2 * i + 1, cycles)) for i in range(count)]
        alarms = sum(compare(old, new)["is_changed"] for old, new in pairs)
        figures[f"compare_false_alarms_{cycles}_runs"] = alarms
        for kind in ("scattered", "range"):
            for percent in (3, 6):
                found, wrong = 0, []
                for index, (old, new) in enumerate(pairs):
                    bad = chosen(new, kind, np.random.default_rng(index))
                    told = compare(old, slowed(new, bad, 1 + percent / 100))
                    found += told["is_slower"]
                    wrong += [share_wrong(told, bad)] if told["changes"] else []
                name = f"{kind}_{percent}_percent_{cycles}_runs"
                figures[f"compare_recall_{name}"] = found / count
                figures[f"compare_false_{name}"] = float(np.mean(wrong)) if wrong else None
    write_result("compare", figures)


def sweep(seed: int, cycles: int) -> pl.DataFrame:
    """A simulated sweep."""
    with tempfile.TemporaryDirectory() as folder:
        simulate(SWEEP.format(seed=seed, cycles=cycles), Path(folder))
        return read(Path(folder))


def chosen(frame: pl.DataFrame, kind: str, random: np.random.Generator) -> pl.DataFrame:
    """The cells to slow down: scattered, or neighbouring sizes of one config."""
    cells = usable(frame).select(CELL).unique().sort(CELL, nulls_last=True)
    wanted = max(1, int(SHARE * cells.height))
    if kind == "scattered":
        return cells[np.sort(random.choice(cells.height, wanted, replace=False))]
    lines = cells.select(LINE).unique(maintain_order=True)
    line = lines[int(random.integers(lines.height))]
    sizes = cells.join(line, on=list(LINE), how="semi", nulls_equal=True).sort("size_bytes")
    first = int(random.integers(max(1, sizes.height - wanted + 1)))
    return sizes[first : first + wanted]


def slowed(frame: pl.DataFrame, bad: pl.DataFrame, factor: float) -> pl.DataFrame:
    """The sweep with these cells slowed down."""
    marked = bad.with_columns(factor=pl.lit(factor))
    joined = frame.join(marked, on=list(CELL), how="left", nulls_equal=True)
    time = pl.col("time_us") * pl.col("factor").fill_null(1.0)
    return joined.with_columns(time_us=time).drop("factor")


def share_wrong(told: dict[str, Any], bad: pl.DataFrame) -> float:
    """Share of the changes named that hold no size of a config that was slowed."""
    names = ("collective", "size_bytes", "requested_algorithm", "requested_protocol")
    wrong = 0
    for change in told["changes"]:
        wrong += not any(
            collective == change["collective"]
            and change["first_bytes"] <= size <= change["last_bytes"]
            and (algorithm is None or change["config"] == f"{algorithm}/{protocol}")
            for collective, size, algorithm, protocol in bad.select(names).rows()
        )
    return wrong / len(told["changes"])


if __name__ == "__main__":
    main()
