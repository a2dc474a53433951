"""From NCCL's log of a read-back launch to what really runs for each trial.

NCCL prints one line for each call of rank 0, in the order of the calls (NCCL 2.20 and later;
channels from 2.24 on). The order is known (warm-up, then block by block), so every line belongs to
one trial; a log in which the sizes do not fit that order tells nothing.
"""

from collections.abc import Iterable, Sequence

from dynamiccl.collect.benchmark.grid import Grid
from dynamiccl.collect.nccl_tests.tuning import Choice, LoggedCall, logged_calls

#: A choice as plain data: algorithm, protocol, channels (None before NCCL 2.24).
PlainChoice = list[str | int | None]


def choices_by_block(
    log: Iterable[str], grid: Grid, *, num_ranks: int, warmup_calls: int, calls_per_block: int
) -> list[PlainChoice | None]:
    """What ran in each block of `grid`; None where the calls of a block differ or are not named.

    Shorter than the grid where the log ends early (a crash) or is not one of these calls.
    """
    calls = list(logged_calls(log))[warmup_calls:]
    blocks = grid.blocks
    found: list[PlainChoice | None] = []
    # With one size nothing else shows that the calls were counted wrong.
    if len(calls) > len(blocks) * calls_per_block:
        return found
    for number in range(len(blocks)):
        wanted = grid.benchmark_bytes[number % len(grid.benchmark_bytes)]
        part = calls[number * calls_per_block : (number + 1) * calls_per_block]
        if len(part) < calls_per_block:
            break
        if any(call.whole_bytes(num_ranks) != wanted for call in part):
            break
        found.append(_agreed(part))
    return found


def _agreed(calls: Sequence[LoggedCall]) -> PlainChoice | None:
    choices = {call.choice for call in calls}
    only = next(iter(choices)) if len(choices) == 1 else None
    return None if only is None else _plain(only)


def _plain(choice: Choice) -> PlainChoice:
    return [choice.algorithm.wire, choice.protocol.wire, choice.num_channels]
