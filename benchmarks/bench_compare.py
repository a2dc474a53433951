"""Detection rate and false alarms of `dynamiccl-collect compare` on pairs of simulated sweeps.

    python benchmarks/bench_compare.py          # 20 pairs of each kind; FULL=1: 100

Sweeps with other seeds (2 % of noise, one launch in some hundred slow by a multiple, a drift that a
run shares), 336 cells each. *Scattered*: 3 or 6 % slower in one cell of twenty, drawn anywhere.
*Range*: the same share of cells, all of one config at neighbouring sizes. A pair is found when
`compare` would end with exit code 1; that of a pair without a change is a false alarm.

Writes out/bench/compare.json. Two minutes on one core.
"""

import os
import tempfile
from itertools import product
from pathlib import Path
from typing import Final

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
    for cycles in (3, 10):
        pairs = [(sweep(2 * i, cycles), sweep(2 * i + 1, cycles)) for i in range(count)]
        alarms = sum(compare(old, new)["is_changed"] for old, new in pairs)
        figures[f"compare_false_alarms_{cycles}_runs"] = alarms
        for kind, percent in product(("scattered", "range"), (3, 6)):
            found = 0
            for index, (old, new) in enumerate(pairs):
                bad = chosen(new, kind, np.random.default_rng(index))
                found += compare(old, slowed(new, bad, 1 + percent / 100))["is_slower"]
            name = f"compare_recall_{kind}_{percent}_percent_{cycles}_runs"
            figures[name] = found / count
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


if __name__ == "__main__":
    main()
