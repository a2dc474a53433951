"""Detection rate and false alarms of `dynamiccl-evaluate compare` on pairs of sweeps.

    python benchmarks/bench_compare.py          # 20 pairs of each kind; FULL=1: 100

Pairs of simulated sweeps with other seeds (2 % of noise, one launch in some hundred slow by a
multiple, a drift that a run shares), 336 cells each. *Scattered*: 3 % slower in one cell of twenty,
drawn anywhere. *Stretch*: 3 % slower in the same share of cells, all of one config at neighbouring
sizes. A pair is found when `compare` would end with exit code 1. `compare_recall` is the smaller of
the two shares with RUNS runs. *Bound*: what the best test of the scattered cells would find if it
knew how many are slower, by how much, the noise, and that no launch is slow: the likelihood ratio's
power at the same level (Neyman and Pearson). *False discoveries*: the share of the cells named that
were not slowed, 0 where none is named, the mean over pairs. *Real*: pairs drawn from published
repeats (datasets/sample), each cell's time times one of its own deviations: nothing differs between
the two but chance.

Writes out/bench/compare.json. Five minutes on one core.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl
from harness import write_result

from dynamiccl.collect.importing.importer import ImportOptions, import_files
from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.cells import independent
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.compare.changes import Changes, find_changes
from dynamiccl.evaluate.compare.paired import CELL, LINE, Paired, pair

ROOT: Final = Path(__file__).resolve().parents[1]
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
NOISE: Final = 0.02
CELLS: Final = 336
KINDS: Final = ("scattered", "stretch")
#: At which `compare` asks whether cells got slower, and how often the bound is drawn.
LEVEL: Final = 0.004
DRAWS: Final = 10_000
SLOWER: Final = 1.03
SHARE: Final = 0.05
RUNS: Final = 5


def main() -> None:
    """Judge pairs of every kind."""
    count = 100 if os.environ.get("FULL") else 20
    figures: dict[str, float | int | str | None] = {"compare_pairs": count}
    for cycles in (RUNS, 2 * RUNS):
        pairs = [(sweep(2 * i, cycles), sweep(2 * i + 1, cycles)) for i in range(count)]
        suffix = "" if cycles == RUNS else f"_{cycles}_runs"
        alarms = sum(judged(old, new)[1].is_changed for old, new in pairs)
        figures[f"compare_false_alarms{suffix}"] = alarms
        for kind in KINDS:
            found, wrong = 0, []
            for index, (old, new) in enumerate(pairs):
                bad = chosen(new, kind, np.random.default_rng(index))
                paired, changes = judged(old, slowed(new, bad))
                found += changes.is_slower
                wrong.append(1.0 - share_in(paired, changes, bad) if changes.found else 0.0)
            figures[f"compare_recall_{kind}{suffix}"] = found / count
            figures[f"compare_false_discoveries_{kind}{suffix}"] = float(np.mean(wrong))
        shares = [figures[f"compare_recall_{kind}{suffix}"] for kind in KINDS]
        figures[f"compare_recall{suffix}"] = min(float(str(share)) for share in shares)
        figures[f"compare_recall_scattered_bound{suffix}"] = bound(cycles)
    real = [judged(old, new)[1].is_changed for old, new in real_pairs(count)]
    figures |= {"compare_pairs_real": len(real), "compare_false_alarms_real": sum(real)}
    write_result("compare", figures)


def sweep(seed: int, cycles: int) -> pl.DataFrame:
    """A simulated sweep."""
    with tempfile.TemporaryDirectory() as folder:
        simulate(SWEEP.format(seed=seed, cycles=cycles), Path(folder))
        return read(Path(folder))


def judged(old: pl.DataFrame, new: pl.DataFrame) -> tuple[Paired, Changes]:
    """The result of the command."""
    paired = pair(old, new)
    return paired, find_changes(paired)


def chosen(frame: pl.DataFrame, kind: str, random: np.random.Generator) -> pl.DataFrame:
    """The cells to slow down: scattered, or neighbouring sizes of one config."""
    cells = independent(frame).select(CELL).unique().sort(CELL, nulls_last=True)
    wanted = max(1, int(SHARE * cells.height))
    if kind == "scattered":
        return cells[np.sort(random.choice(cells.height, wanted, replace=False))]
    lines = cells.select(LINE).unique(maintain_order=True)
    line = lines[int(random.integers(lines.height))]
    sizes = cells.join(line, on=list(LINE), how="semi", nulls_equal=True).sort("size_bytes")
    first = int(random.integers(max(1, sizes.height - wanted + 1)))
    return sizes[first : first + wanted]


def slowed(frame: pl.DataFrame, bad: pl.DataFrame) -> pl.DataFrame:
    """The sweep with these cells slowed down."""
    marked = bad.with_columns(factor=pl.lit(SLOWER))
    joined = frame.join(marked, on=list(CELL), how="left", nulls_equal=True)
    time = pl.col("time_us") * pl.col("factor").fill_null(1.0)
    return joined.with_columns(time_us=time).drop("factor")


def bound(runs: int) -> float:
    """Share of pairs in which the likelihood ratio test finds the scattered cells."""
    shift = np.log(SLOWER) / (NOISE * np.sqrt(2.0 / runs))
    share = int(SHARE * CELLS) / CELLS
    random = np.random.default_rng(0)
    quiet, slower = random.standard_normal((2, DRAWS, CELLS))
    slower[:, : int(SHARE * CELLS)] += shift
    quiet, slower = (
        np.log1p(share * np.expm1(shift * z - 0.5 * shift**2)).sum(axis=1) for z in (quiet, slower)
    )
    return float(np.mean(slower > np.quantile(quiet, 1.0 - LEVEL)))


def share_in(paired: Paired, changes: Changes, bad: pl.DataFrame) -> float:
    """Share of the reported cells that were slowed."""
    named = paired.cells[changes.found]
    right = named.join(bad, on=list(CELL), how="semi", nulls_equal=True)
    return right.height / named.height


def real_pairs(count: int) -> Iterator[tuple[pl.DataFrame, pl.DataFrame]]:
    """Two sweeps of RUNS runs each, from cells with three published repeats or more."""
    sample = ROOT / "datasets" / "sample"
    with tempfile.TemporaryDirectory() as folder:
        options = ImportOptions(systems_file=sample / "systems.toml")
        import_files(sorted(sample.glob("*.csv")), Path(folder), options=options)
        rows = independent(read(Path(folder)))
    key = [*CELL, "in_place"]
    log = pl.col("time_us").log()
    kept = rows.filter(pl.len().over(key) >= 3)
    kept = kept.with_columns(centre=log.median().over(key), rest=log - log.median().over(key))
    for system in kept["system"].unique().sort():
        cells = kept.filter(pl.col("system") == system).group_by(key, maintain_order=True)
        groups = [group for _, group in cells]
        for seed in range(count):
            random = np.random.default_rng(seed)
            yield drawn(groups, random, "old"), drawn(groups, random, "new")


def drawn(groups: list[pl.DataFrame], random: np.random.Generator, name: str) -> pl.DataFrame:
    """A sweep resampled from the cells' own deviations."""
    parts = []
    for group in groups:
        rests = random.choice(group["rest"].to_numpy(), RUNS)
        row = group[0].drop("rest", "centre", "sweep", "run", "repeat", "time_us")
        more = pl.DataFrame(
            {
                "sweep": [name] * RUNS,
                "run": [str(i) for i in range(RUNS)],
                "repeat": [0] * RUNS,
                "time_us": np.exp(float(group["centre"][0]) + rests),
            }
        )
        parts.append(more.join(row, how="cross"))
    return pl.concat(parts, how="vertical_relaxed")


if __name__ == "__main__":
    main()
