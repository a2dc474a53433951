"""Detection rate and false alarms of `dynamiccl-collect compare` on pairs of simulated sweeps.

    python benchmarks/bench_compare.py          # 20 pairs of each kind; FULL=1: 100

Sweeps of other seeds, 336 cells each. *Scattered*: 3 or 6 % slower in one cell of twenty, drawn
anywhere. *Range*: as many cells of one config, at neighbouring sizes. A pair is found when
`compare` would end with exit code 1, of a pair without a change a false alarm. Two minutes.
"""

import tempfile
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl
from harness import COLLECTIVES, FULL, simulated, write_result

from dynamiccl.collect.compare import CELL, compare
from dynamiccl.datasets.cells import CONFIG_COLUMNS, usable
from dynamiccl.datasets.store import read

PAIRS: Final = 100 if FULL else 20
#: Of the cells, those that are slowed down.
SHARE: Final = 0.05
LINE: Final = ("collective", *CONFIG_COLUMNS)


def main() -> None:
    """Judge pairs of every kind."""
    figures: dict[str, float] = {"compare_pairs": PAIRS}
    for cycles in (3, 10):
        pairs = [(sweep(2 * i, cycles), sweep(2 * i + 1, cycles)) for i in range(PAIRS)]
        alarms = sum(compare(old, new)["is_changed"] for old, new in pairs)
        figures[f"compare_false_alarms_{cycles}_runs"] = alarms
        for kind, percent in product(("scattered", "range"), (3, 6)):
            found = 0
            for index, (old, new) in enumerate(pairs):
                bad = chosen(new, kind, np.random.default_rng(index))
                found += compare(old, slowed(new, bad, 1 + percent / 100))["is_slower"]
            name = f"compare_recall_{kind}_{percent}_percent_{cycles}_runs"
            figures[name] = found / PAIRS
    write_result("compare", figures)


def sweep(seed: int, cycles: int) -> pl.DataFrame:
    """A simulated sweep."""
    with tempfile.TemporaryDirectory() as folder:
        lines = {"collectives": COLLECTIVES, "sizes": '{ min = "1K", max = "1G", factor = 2 }'}
        return read(simulated(Path(folder), seed, cycles, lines))


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
