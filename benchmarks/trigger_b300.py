"""The Trigger on measured interference (docs/trigger-b300.png).

    python benchmarks/trigger_b300.py

Calls are drawn around the mean times of Ring AllReduce on a B300 node, quiet and while stress-ng
keeps its 240 cores busy (datasets/sample, runs interference-a3), with t3 noise of the coefficient
of variation that 20 repeats of one AllGather have there, and of 5 %, since single calls vary more
than averages. The thresholds are those of a Trigger calibrated for 0.5 false alarms in 100,000
calls.
"""

from pathlib import Path
from typing import Final

import matplotlib as mpl
import numpy as np
import polars as pl
from bench_trigger import our_maker, site, t3_noise
from matplotlib.figure import Figure

from dynamiccl.train.trigger.detector import Detector

ROOT: Final = Path(__file__).resolve().parents[1]
MEASURED: Final = ROOT / "datasets" / "sample" / "b300_nvlink_allreduce.csv"
SIZES: Final = (1 << 22, 1 << 24, 1 << 27)
NOISES: Final = (0.0015, 0.05)
CALLS: Final = 400

mpl.use("Agg")


def ring_times_us(size_bytes: int) -> tuple[float, float]:
    """Mean time, quiet and stressed."""
    rows = pl.read_csv(MEASURED, infer_schema_length=None).filter(
        pl.col("run").is_in(["interference-a3-baseline", "interference-a3"]),
        algorithm="RING",
        size_bytes=size_bytes,
    )
    factor = 2.0 * (1.0 - 1.0 / rows["ranks_per_node"][0])
    by_mode = dict(rows.select("mode", "busbw_gbytes_per_s").iter_rows())
    quiet, stressed = (
        size_bytes * factor / (1000.0 * by_mode[mode]) for mode in ("isolated", "cpu_stress")
    )
    return quiet, stressed


def main() -> None:
    """Draw the figure."""
    random = np.random.default_rng(0)
    _, module, _ = our_maker(site(t3_noise, random))
    figure = Figure(figsize=(10, 5), layout="constrained")
    grid = figure.subplots(len(NOISES), len(SIZES), sharex=True)
    slow = np.arange(CALLS) // 100 % 2 == 1
    for row, noise in zip(grid, NOISES, strict=True):
        for axes, size in zip(row, SIZES, strict=True):
            quiet, stressed = ring_times_us(size)
            times = np.where(slow, stressed, quiet) * np.exp(
                noise * t3_noise(random, CALLS, 1)[:, 0]
            )
            detector = Detector(module)
            found = [detector.observe([0], [np.log(time)]) for time in times]
            alarms = np.array([alarm[0] == 1 for alarm, _ in found])
            levels = np.array([level[0] for _, level in found])
            axes.plot(times / 1000.0, ".", markersize=2, color="tab:blue")
            axes.fill_between(
                np.arange(CALLS),
                0,
                1,
                where=alarms,
                transform=axes.get_xaxis_transform(),
                color="tab:red",
                alpha=0.15,
            )
            axes.set(title=f"{size >> 20} MiB, noise {noise:.2%}", ylabel="time (ms)")
            right = axes.twinx()
            right.plot(np.maximum(levels, 0.0), color="tab:red", linewidth=1)
            right.set_ylabel("interference level", color="tab:red")
    for axes in grid[-1]:
        axes.set_xlabel("call (stressed: 100-199, 300-399)")
    figure.savefig(ROOT / "docs" / "trigger-b300.png", dpi=80)


if __name__ == "__main__":
    main()
