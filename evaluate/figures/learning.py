"""Learning curves of a training run."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from dynamiccl.evaluate.figures.drawing import line_style, svg_text


def learning_curves(
    losses: Mapping[int, float],
    regrets: Mapping[int, float],
    *,
    best_step: int | None,
    default_regret: float | None,
) -> str:
    """Loss and validation regret (fractions) by gradient step, the exported step marked."""
    figure = Figure(figsize=(8.6, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(list(losses), list(losses.values()), **line_style(0))
    left.set(xlabel="gradient step", ylabel="training loss", yscale="log")
    percent = [100 * value for value in regrets.values()]
    right.plot(list(regrets), percent, label="policy", **line_style(0))
    if default_regret is not None:
        right.axhline(100 * default_regret, color="black", linestyle="--", label="NCCL's default")
    if best_step is not None:
        right.axvline(best_step, color="black", linestyle=":", label=f"exported ({best_step})")
    right.set(xlabel="gradient step", ylabel="validation regret (%)")
    right.set_ylim(bottom=0)
    right.legend(loc="upper right", fontsize=8)
    for axes in (left, right):
        axes.grid(visible=True, alpha=0.3)
    return svg_text(figure)
