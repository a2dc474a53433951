"""Off-policy estimates beside the truth, of each policy by each estimator."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from dynamiccl.evaluate.figures.drawing import svg_text
from dynamiccl.evaluate.ope.calibration import ESTIMATORS, Calibration

_MARKERS: Final = ("o", "s", "^", "D")


def calibration_figure(found: Sequence[Calibration]) -> str:
    """Estimates of the first log, with intervals, and the truth as a line; time over default."""
    figure = Figure(figsize=(8.6, 1.2 + 0.5 * len(found)), layout="constrained")
    axes = figure.subplots()
    for level, each in enumerate(found):
        label = "truth" if level == 0 else None
        axes.plot([-each.truth] * 2, [level - 0.4, level + 0.4], "k-", linewidth=2.0, label=label)
    for number, (estimator, marker) in enumerate(zip(ESTIMATORS, _MARKERS, strict=True)):
        shift = 0.18 * (number - (len(ESTIMATORS) - 1) / 2)
        firsts = [(level + shift, each.estimates[estimator][0]) for level, each in enumerate(found)]
        drawn = [(at, e.value, e.low, e.high) for at, e in firsts if e.value is not None]
        if not drawn:
            continue
        values = np.array([-value for _, value, _, _ in drawn])
        ends = [
            (value - low if low is not None else 0.0, high - value if high is not None else 0.0)
            for _, value, low, high in drawn
        ]
        axes.errorbar(
            values,
            [at for at, *_ in drawn],
            # Turned round with the values: time is minus reward.
            xerr=np.array(ends)[:, ::-1].T,
            fmt=marker,
            markersize=4.5,
            linewidth=1.0,
            capsize=2.5,
            label=estimator,
        )
    axes.set_yticks(range(len(found)), [each.policy for each in found], fontsize=8)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlabel("mean time over NCCL's default")
    axes.grid(visible=True, axis="x", alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    return svg_text(figure)
