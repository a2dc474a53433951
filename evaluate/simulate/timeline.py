"""Timeline of one job: call times, alarms and config changes."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from dynamiccl.evaluate.figures.drawing import svg_text
from dynamiccl.evaluate.simulate.rollout import Timeline

#: Maximum number of points; more calls are averaged over windows.
MAX_POINTS = 600


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
