"""From policies and a setting to a page: rows, what they say in words, and a job's course."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from dynamiccl.errors import UserError
from dynamiccl.evaluate.blocks import FigureBlock, Section, TableBlock
from dynamiccl.evaluate.figures.drawing import svg_text
from dynamiccl.evaluate.page import write_page
from dynamiccl.evaluate.simulate.compare import Comparison, Row, conclude, play
from dynamiccl.evaluate.simulate.lineup import (
    MakeWatch,
    Setting,
    policy_contenders,
    simple_contenders,
)
from dynamiccl.evaluate.simulate.rollout import Timeline
from dynamiccl.simulator.record_jobs import check_workload
from dynamiccl.train.commands.options import open_bar
from dynamiccl.train.environment import delay_calls
from dynamiccl.train.policy import TorchPolicy

HEADS: Final = (
    "who decides",
    "communication, s a job",
    "over NCCL's choice",
    "whole job over NCCL's",
    "over the fastest of each call",
    "changes per 1,000 calls",
    "slower than NCCL",
    "alarms per 100,000 calls",
)


#: Maximum number of points; more calls are averaged over windows.
MAX_POINTS = 600


def cells(row: Row) -> list[str]:
    """A row as texts, in the order of HEADS."""
    return [
        row.name,
        row.seconds.text(".1f"),
        row.over_default.text("+.1%"),
        row.job_over_default.text("+.1%"),
        row.regret.text(".1%"),
        f"{row.changes_per_1000_calls:.1f}",
        f"{row.share_slower_than_default:.1%}",
        f"{row.alarms_per_1e5_calls:.0f}",
    ]


def simulate(
    setting: Setting,
    policies: Mapping[str, Path],
    trigger: Path | None,
    seeds: Sequence[int],
    out: Path,
) -> Comparison:
    """Simulate all rows and write the page; `policies` are directories by name.

    Raises UserError for a system that cannot run the workload, and as `TorchPolicy.load`.
    """
    check_workload(setting.system, setting.workload)
    contenders = simple_contenders(setting)
    make_watch = None if trigger is None else _watch(trigger)
    for name, folder in policies.items():
        policy = TorchPolicy.load(folder)
        if policy.manifest.slack is not None:
            raise UserError(
                f"{name} has {policy.manifest.slack.terms}, which simulated jobs do not keep to: "
                "give the run that it was made from"
            )
        contenders += policy_contenders(setting, name, policy, None)
        if make_watch is not None:
            contenders += policy_contenders(setting, name, policy, make_watch)
    ours = frozenset(each.name for each in contenders if any(n in each.name for n in policies))
    with open_bar() as progress:
        total = len(contenders) * len(seeds) * setting.calls
        bar = progress.add_task("calls", total=total)
        played = play(setting, contenders, seeds, lambda count: progress.advance(bar, count))
    found = conclude(setting, played)
    write_simulation(found, ours, delay_calls(contenders[0].world), out)
    return found


def _watch(trigger: Path) -> MakeWatch:
    from dynamiccl.train.trigger.detector import Detector

    return lambda: Detector.load(trigger)


def write_simulation(found: Comparison, ours: frozenset[str], delay: int, out: Path) -> Path:
    """Write page, results and figures into `out`; the page's path."""
    svg = timeline_figure(found.timelines)
    table = TableBlock(
        "Who spends least time",
        HEADS,
        [cells(row) for row in found.rows],
        ours=ours,
        layout="numbers",
        note="Intervals of 95 % over seeds. The fastest of each call: the config that is fastest "
        "at that call, as if changes cost nothing; the oracle's row pays for its changes.",
    )
    course = FigureBlock(
        "A job's course",
        "timeline",
        svg,
        "The first job of the first seed: measured time of its calls over NCCL's true time at the "
        "same calls (geometric means over some calls in a row); below 1 is faster. Grey: the "
        "slowdown of the worst link or host, on a scale of its own, 1 to 16. Red bars: alarms "
        "begin; crosses: the config changes.",
    )
    section = Section("All rows", [table, course], simulated=True)
    plain = found.to_json()
    path = write_page(out, "simulate", plain, [section], {**plain, "delay": delay})
    (out / f"{course.name}.svg").write_text(svg, encoding="utf-8")
    return path


def timeline_figure(timelines: Mapping[str, Timeline]) -> str:
    """One strip a row: measured time over NCCL's true time at the same calls, smoothed.

    Grey is the slowdown by links and host; below each strip are alarms (|) and changes (+).
    """
    figure = Figure(figsize=(9.6, 0.9 + 1.25 * len(timelines)), layout="constrained")
    strips = figure.subplots(len(timelines), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, line) in zip(strips, timelines.items(), strict=True):
        at = np.arange(len(line.key))
        ratio = line.measured_us / line.default_us
        width = max(len(at) // MAX_POINTS, 1)
        ends = len(at) // width * width
        middle = at[:ends].reshape(-1, width)[:, width // 2]
        mean = np.exp(np.log(ratio[:ends]).reshape(-1, width).mean(axis=1))
        slow = line.slowdown[:ends].reshape(-1, width).max(axis=1)
        shade = axes.twinx()
        shade.fill_between(middle, 1.0, slow, color="#8a94a3", alpha=0.35, step="mid", linewidth=0)
        shade.set(yscale="log", ylim=(1.0, 16.0))
        shade.set_yticks([])
        shade.minorticks_off()
        axes.set_zorder(shade.get_zorder() + 1)
        axes.patch.set_visible(False)
        axes.plot(middle, mean, color="#3b78d8", linewidth=0.9)
        axes.axhline(1.0, color="black", linewidth=0.6, linestyle=":")
        began = np.flatnonzero(line.alarm_began)
        axes.plot(began, np.full(len(began), 0.42), "|", color="#d9473c", markersize=7)
        changed = np.flatnonzero(line.changed)[:: max(int(line.changed.sum()) // MAX_POINTS, 1)]
        axes.plot(changed, np.full(len(changed), 0.34), "+", color="#7a7a7a", markersize=3)
        axes.set(yscale="log", ylim=(0.3, 4.0))
        axes.set_yticks([0.5, 1.0, 2.0], ["0.5", "1", "2"])
        axes.minorticks_off()
        axes.set_title(name, fontsize=9, loc="left", pad=2)
    strips[-1].set_xlabel("call of the job")
    figure.supylabel("time over NCCL's own choice", fontsize=9)
    return svg_text(figure)
