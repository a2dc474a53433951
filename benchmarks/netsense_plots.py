"""The plots of docs/ddp-hook.md, from out/bench/netsense-steps.json.

Run: python benchmarks/netsense_plots.py
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from bench_netsense import CROSS, DEGRADING, RATES, STEPS
from netsense_figures import RANKS, step_s
from netsense_training import BATCH

mpl.use("Agg")
from matplotlib import pyplot as plt

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
COLOURS: Final = {
    "allreduce": "#555555",
    "topk-0.1": "#e69f00",
    "topk-0.01": "#f0c96a",
    "topk-0.005": "#c8b400",
    "fp16": "#56b4e9",
    "powersgd": "#cc79a7",
    "netsense-paper": "#009e73",
    "netsense": "#d55e00",
}


def stable(steps: Mapping[str, Any], runs: Mapping[str, Any]) -> Any:
    """Samples per second at each rate, and accuracy over time at 200 Mbit/s."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    width = 0.1
    for place, method in enumerate(COLOURS):
        speeds = [RANKS * BATCH / step_s(method, steps[str(rate)][method]) for rate in RATES]
        at = [number + (place - 3.5) * width for number in range(len(RATES))]
        left.bar(at, speeds, width, color=COLOURS[method], label=method)
    labels = [f"{rate} Mbit/s" if rate else "unshaped" for rate in RATES]
    left.set_xticks(range(len(RATES)), labels)
    left.set_ylabel("samples per second, 4 workers")
    slow = steps["200"]
    for method, colour in COLOURS.items():
        run = runs.get(method) or runs.get(f"{method}@200")
        if run:
            seconds = step_s(method, slow[method])
            points = [(s["step"] * seconds, 100.0 * s["accuracy"]) for s in run if "accuracy" in s]
            right.plot(*zip(*points, strict=True), color=colour, marker=".", label=method)
    right.set_xscale("log")
    right.set_xlabel("seconds of training at 200 Mbit/s (steps x median step)")
    right.set_ylabel("test accuracy, %")
    _legend_below(figure, left)
    figure.suptitle("Scenario 1: stable links, 46 MB of gradients a step")
    return figure


def _legend_below(figure: Any, axes: Any) -> None:
    """One legend for the figure, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)


def dynamic(steps: Mapping[str, Any], levels: list[str], title: str) -> Any:
    """Samples per second of all methods by level, and NetSense's ratio step by step."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for method, runs in steps.items():
        speeds = [RANKS * BATCH / step_s(method, run[-12:]) for run in runs]
        wide = 2.5 if method == "netsense" else 1.2
        left.plot(levels, speeds, color=COLOURS[method], marker="o", label=method, linewidth=wide)
    left.set_ylabel("samples per second, 4 workers")
    left.set_yscale("log")
    _legend_below(figure, left)
    ours, start = steps["netsense"], 0
    shares = []
    for level, run in zip(levels, ours, strict=True):
        right.axvline(start, color="#cccccc")
        right.text(start + 0.5, 1.01, level, fontsize=8, transform=right.get_xaxis_transform())
        shares += [step["wire_ratio"] for step in run]
        start += len(run)
    ratios = [step["ratio"] for run in ours for step in run]
    right.plot(ratios, color=COLOURS["netsense"], drawstyle="steps-post", label="values")
    right.plot(shares, color="#555555", drawstyle="steps-post", label="bytes", linewidth=0.8)
    right.set_yscale("log")
    right.set_ylabel("share of a plain all-reduce that NetSense sends")
    right.set_xlabel("step")
    right.legend(fontsize=8)
    figure.suptitle(title)
    return figure


def main() -> None:
    """Write a PNG for each scenario that was run."""
    kept = json.loads(STEPS.read_text(encoding="utf-8"))
    figures = {}
    if "stable" in kept:
        runs = kept.get("accuracy", {"steps": {}})["steps"]
        figures["stable"] = stable(kept["stable"]["steps"], runs)
    if "degrading" in kept:
        levels = [f"{rate} Mbit/s" for rate in DEGRADING]
        title = "Scenario 2: degrading links"
        figures["degrading"] = dynamic(kept["degrading"]["steps"], levels, title)
    if "fluctuating" in kept:
        levels = [f"{number}: {rate}" for number, rate in enumerate(CROSS)]
        title = "Scenario 3: 500 Mbit/s, with so many Mbit/s of other traffic on one link"
        figures["fluctuating"] = dynamic(kept["fluctuating"]["steps"], levels, title)
    for name, figure in figures.items():
        path = DOCS / f"ddp-hook-{name}.png"
        figure.savefig(path, dpi=90)
        print(path)


if __name__ == "__main__":
    main()
