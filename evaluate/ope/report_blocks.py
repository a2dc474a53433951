"""Off-policy estimates as a block of a report page."""

from collections.abc import Iterator, Sequence

from dynamiccl.evaluate.blocks import TableBlock
from dynamiccl.evaluate.ope.estimators import Estimate
from dynamiccl.evaluate.ope.logged import CONFIDENCE, ESTIMATORS, LoggedValue, time_over_default


def logged_blocks(found: Sequence[LoggedValue]) -> Iterator[TableBlock]:
    """A table of the estimates; nothing where the data have no draws."""
    if not found:
        return
    heads = ["policy", "tasks where it acts", "draws there", *ESTIMATORS]
    note = (
        "Mean time over NCCL's default, on the tasks where a policy acts, free to take any config "
        "that this sweep may draw: estimated from the configs that it drew and from their "
        f"probabilities, with {CONFIDENCE:.0%} intervals (DM has none, and a sweep that follows "
        "what it sees gives none). The tables above let it choose among what was drawn for a task."
    )
    yield TableBlock(
        "Estimated from what the sweep drew",
        heads,
        [_row(each) for each in found],
        note,
        layout="numbers",
    )


def _row(found: LoggedValue) -> list[str]:
    estimates = [_text(found.estimates.get(name)) for name in ESTIMATORS]
    return [found.policy, f"{found.acts} of {found.tasks}", str(found.draws), *estimates]


def _text(found: Estimate | None) -> str:
    if found is None:
        return "-"
    mean, low, high = time_over_default(found)
    if mean is None:
        return found.note
    return f"{mean:.4f}" if low is None else f"{mean:.4f} ({low:.4f} to {high:.4f})"
