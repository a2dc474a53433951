"""Regret by message size: mean over a system's families in each octave."""

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.baselines.families import rows_by_family
from dynamiccl.evaluate.figures.drawing import line_style, svg_text
from dynamiccl.evaluate.policies import Actions
from dynamiccl.sizes import BINS_PER_OCTAVE, size_label


def regret_by_octave(
    grid: TaskGrid, rows: npt.NDArray[np.int64], choices: Mapping[str, Actions]
) -> dict[int, dict[str, float]]:
    """Octave of the size (its exponent) -> policy -> regret (a fraction) over the tasks `rows`.

    The mean over families of each family's mean: one that was swept finely weighs no more.
    """
    octaves = grid.tasks["bin"].to_numpy() // BINS_PER_OCTAVE
    families = [found[np.isin(found, rows)] for found in rows_by_family(grid.tasks).values()]
    regrets = {name: grid.regret(actions) for name, actions in choices.items()}
    by_octave = {}
    for octave in np.unique(octaves[rows]).tolist():
        parts = [part for f in families if len(part := f[octaves[f] == octave])]
        by_octave[octave] = {
            name: float(np.mean([regret[part].mean() for part in parts]))
            for name, regret in regrets.items()
        }
    return by_octave


def regret_by_size(
    by_octave: Mapping[int, Mapping[str, float]], band: float | None, tested: Collection[int]
) -> str:
    """One line a policy, the noise band as a hatched strip, an asterisk for `tested` octaves."""
    octaves = sorted(by_octave)
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    axes = figure.subplots()
    for index, name in enumerate(next(iter(by_octave.values()))):
        percent = [100 * by_octave[octave][name] for octave in octaves]
        axes.plot(range(len(octaves)), percent, label=name, **line_style(index))
    if band is not None:
        axes.axhspan(
            0.0,
            100 * band,
            facecolor="#88888833",
            edgecolor="#999999",
            hatch="///",
            linewidth=0,
            zorder=0,
            label=f"noise band ({band:.1%})",
        )
    labels = [size_label(1 << each) + (" *" if each in tested else "") for each in octaves]
    axes.set_xticks(range(len(octaves)), labels, rotation=90, fontsize=8)
    axes.set_xlabel("message size, by octave")
    axes.set_ylabel("mean regret (%)")
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    return svg_text(figure)
