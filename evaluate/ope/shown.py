"""Off-policy estimates on the page of a report."""

from collections.abc import Iterator, Sequence

from dynamiccl.datasets.store import slug
from dynamiccl.evaluate.blocks import Block, FigureBlock, TableBlock
from dynamiccl.evaluate.ope.calibration import (
    CALLS_PER_TASK,
    CONFIDENCE,
    EPSILON,
    ESTIMATORS,
    LOGS,
    Calibration,
)
from dynamiccl.evaluate.ope.figure import calibration_figure


def calibration_blocks(system: str, found: Sequence[Calibration]) -> Iterator[Block]:
    """The estimates beside the truth, as a figure and as a table; nothing without any."""
    if not found:
        return
    yield FigureBlock(
        "How far off-policy estimates can be trusted here",
        f"{slug(system)}-estimates",
        calibration_figure(found),
        f"Calls were drawn from the measured runs by a known policy (NCCL's default; with "
        f"probability {EPSILON:g} any measured config), {CALLS_PER_TASK} a task, and each policy's "
        f"time was estimated from that log alone, with {CONFIDENCE:.0%} intervals. The black line "
        "is the truth: the mean over the same runs. It tests the estimators, not the policies.",
    )
    heads = ["policy", "truth"]
    for name in ESTIMATORS:
        heads += [name, f"{name}, bias", f"{name}, truth held"]
    note = (
        f"Mean time over NCCL's default. The first of {LOGS} logs, the mean error over all of "
        f"them, and in how many of those that have an interval it held the truth: nine in ten are "
        "promised. DM has no interval."
    )
    rows = [_row(each) for each in found]
    yield TableBlock("Off-policy estimates and the truth", heads, rows, note, layout="numbers")


def _row(found: Calibration) -> list[str]:
    row = [found.policy, f"{-found.truth:.4f}"]
    for name in ESTIMATORS:
        first, bias = found.estimates[name][0], found.bias(name)
        held, intervals = found.held(name)
        value = first.note if first.value is None else f"{-first.value:.4f}"
        if first.low is not None and first.high is not None:
            value += f" ({-first.high:.4f} to {-first.low:.4f})"
        row += [
            value,
            "-" if bias is None else f"{-bias:+.4f}",
            f"{held} of {intervals}" if intervals else "-",
        ]
    return row
