"""From the steps of bench_netsense to its figures: pure, so that it can be run again on kept steps.

A method's step time is the median of its last steps under one rate. A static method counts as best
only if it reaches the target accuracy: all-reduce's at the end of equal steps, less 0.5 points.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from netsense_training import BATCH

RANKS: Final = 4
TARGET_POINTS: Final = 0.5
OURS: Final = "netsense"
#: What an adaptive method's last steps are, and a static one's.
_LATE: Final = {True: 16, False: 4}
Steps = Sequence[Mapping[str, Any]]
Figures = dict[str, float | int | str | None]


def late(method: str, steps: Steps) -> Steps:
    """The steps that are measured."""
    return steps[-_LATE[method.startswith("netsense")] :]


def step_s(method: str, steps: Steps) -> float:
    """Median over them."""
    return median(float(step["seconds"]) for step in late(method, steps))


def figures_of(kept: Mapping[str, Any]) -> Figures:
    """All figures that the scenarios in `kept` allow."""
    found: Figures = {"workers": RANKS, "batch_per_worker": BATCH}
    for name, scenario in kept.items():
        found[f"minutes_{name}"] = round(scenario["minutes"], 1)
    runs = kept["accuracy"]["steps"] if "accuracy" in kept else {}
    reaching = _accuracy(runs, found) if runs else None
    if "stable" in kept:
        for rate, methods in kept["stable"]["steps"].items():
            _stable(rate if rate != "None" else "unshaped", methods, runs, reaching, found)
    for name in ("degrading", "fluctuating"):
        if name in kept:
            _dynamic(name, kept[name]["steps"], reaching, found)
    if "long" in kept:
        _long(kept["long"]["steps"], found)
    if "vgg16" in kept:
        steps = kept["vgg16"]["steps"]
        ours = step_s(OURS, steps[OURS][-4:])
        plain = float(steps["allreduce"][-1]["seconds"])
        found |= {"vgg16_step_s_allreduce": plain, f"vgg16_step_s_{OURS}": ours}
        found |= {"vgg16_speedup_vs_allreduce": plain / ours}
        found |= {"vgg16_ratio": median(s["ratio"] for s in steps[OURS][-4:])}
    return found


def _long(runs: Mapping[str, Steps], found: Figures) -> None:
    found["steps_long"] = len(runs["allreduce"])
    for name, run in runs.items():
        found[f"accuracy_{name}_long"] = final_accuracy(run)
        method, _, rate = name.partition("@")
        if method == OURS:
            gap = final_accuracy(runs["allreduce"]) - final_accuracy(run)
            found[f"accuracy_gap_points_{rate}_long"] = 100.0 * gap


def final_accuracy(steps: Steps) -> float:
    """At the end of a run."""
    return float(steps[-1]["accuracy"])


def _accuracy(runs: Mapping[str, Steps], found: Figures) -> set[str]:
    """Final accuracies; the static methods that reach the target."""
    plain = final_accuracy(runs["allreduce"])
    found["target_accuracy"] = plain - TARGET_POINTS / 100.0
    for name, steps in runs.items():
        method, _, rate = name.partition("@")
        gap = 100.0 * (plain - final_accuracy(steps))
        found[f"accuracy_{name}"] = final_accuracy(steps)
        if method == OURS:
            found[f"accuracy_gap_points_{rate}"] = gap
            found[f"ratio_of_training_{rate}"] = median(step["ratio"] for step in steps)
    static = {name for name in runs if "@" not in name}
    return {n for n in static if 100.0 * (plain - final_accuracy(runs[n])) <= TARGET_POINTS}


def steps_to(target: float, steps: Steps) -> int | None:
    """How many steps it took to reach an accuracy, as finely as it was looked at."""
    reached = (s["step"] for s in steps if s.get("accuracy", 0.0) >= target)
    return next(reached, None)


def _stable(
    rate: str,
    methods: Mapping[str, Steps],
    runs: Mapping[str, Steps],
    reaching: set[str] | None,
    found: Figures,
) -> None:
    times = {method: step_s(method, steps) for method, steps in methods.items()}
    for method, seconds in times.items():
        found[f"step_s_{method}_{rate}"] = seconds
        found[f"samples_per_s_{method}_{rate}"] = RANKS * BATCH / seconds
        wire = median(step["wire_bytes"] for step in late(method, methods[method]))
        found[f"wire_mb_{method}_{rate}"] = wire / 1e6
        training = runs.get(method) or runs.get(f"{method}@{rate}")
        if training:
            steps = steps_to(float(found["target_accuracy"] or 0.0), training)
            found[f"s_to_target_{method}_{rate}"] = None if steps is None else steps * seconds
    ours = late(OURS, methods[OURS])
    found[f"speedup_vs_allreduce_{rate}"] = times["allreduce"] / times[OURS]
    found[f"speedup_vs_topk_{rate}"] = times["topk-0.1"] / times[OURS]
    found[f"ratio_{rate}"] = median(step["ratio"] for step in ours)
    found[f"method_{rate}"] = method_of(ours[-1])
    for method in (m for m in methods if m.startswith(f"{OURS}-")):
        ratios = [step["ratio"] for step in late(method, methods[method])]
        found[f"ratio_{method}_{rate}"] = median(ratios)
    _best_static(f"stable_{rate}" if rate == "unshaped" else rate, times, reaching, found)


def _best_static(
    name: str, times: Mapping[str, float], reaching: set[str] | None, found: Figures
) -> None:
    """Speed against the fastest static method that reaches the target, and against any."""
    static = {m: seconds for m, seconds in times.items() if not m.startswith("netsense")}
    able = {m: seconds for m, seconds in static.items() if reaching is None or m in reaching}
    best = min(able, key=lambda m: able[m])
    found[f"best_static_{name}"] = best
    found[f"vs_best_static_{name}"] = able[best] / times[OURS]
    found[f"vs_any_static_{name}"] = min(static.values()) / times[OURS]


def method_of(step: Mapping[str, Any]) -> str:
    """What NetSense did in a step."""
    return next(name for name in ("dense", "fp16", "sparse") if step[name])


def settled_after(ratios: Sequence[float]) -> int | None:
    """Steps after which a ratio's median of five is within 10 % of its last eight's median."""
    last = median(ratios[-8:])
    inside = [abs(median(ratios[i : i + 5]) / last - 1.0) <= 0.1 for i in range(len(ratios) - 4)]
    return next((i for i in range(len(inside)) if all(inside[i:])), None)


def _dynamic(
    name: str, steps: Mapping[str, Sequence[Steps]], reaching: set[str] | None, found: Figures
) -> None:
    levels = len(steps[OURS])
    for level in range(levels):
        times = {method: step_s(method, runs[level][-12:]) for method, runs in steps.items()}
        for method, seconds in times.items():
            found[f"samples_per_s_{method}_{name}_{level}"] = RANKS * BATCH / seconds
        ratios = [step["ratio"] for step in steps[OURS][level]]
        found[f"ratio_{name}_{level}"] = median(ratios[-12:])
        found[f"settled_after_{name}_{level}"] = settled_after(ratios)
        _best_static(f"{name}_{level}", times, reaching, found)
    vs = [float(found[f"vs_best_static_{name}_{level}"] or 0.0) for level in range(levels)]
    found[f"least_vs_best_static_{name}"] = min(vs)
