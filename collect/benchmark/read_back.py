"""Reads from NCCL's log of a read-back launch which config really ran for each trial.

NCCL prints one line for each call of rank 0, in the order of the calls (NCCL 2.20 and later;
channels from 2.24 on). The order is known (warm-up, then block by block), so every line belongs to
one trial; a log in which the sizes do not fit that order tells nothing.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from dynamiccl.collect.benchmark.grid import Grid
from dynamiccl.collect.nccl_log import Choice, LoggedCall, logged_calls

#: As `command.Places` names them.
_LOGS = "nccl.*.log"
#: A choice as plain data: algorithm, protocol, channels (None before NCCL 2.24).
PlainChoice = list[str | int | None]


def comm_logs(folder: Path) -> list[list[str]]:
    """NCCL's log lines in a launch's folder, one list for each communicator.

    Each rank writes a file of its own. The first rank of a communicator logs its calls: where one
    file does, all of them are one log; where several do, there are several communicators.
    """
    files = [path.read_text(errors="replace").splitlines() for path in sorted(folder.glob(_LOGS))]
    told = [lines for lines in files if any(logged_calls(lines))]
    return told if len(told) > 1 else [[line for lines in files for line in lines]]


def agreed_choices(
    logs: Iterable[Iterable[str]],
    grid: Grid,
    *,
    num_ranks: int,
    warmup_calls: int,
    calls_per_block: int,
) -> list[PlainChoice | None]:
    """What ran in each block of `grid`, where all communicators' logs agree.

    None where they differ; as long as the shortest of them.
    """
    each = [
        choices_by_block(
            log,
            grid,
            num_ranks=num_ranks,
            warmup_calls=warmup_calls,
            calls_per_block=calls_per_block,
        )
        for log in logs
    ]
    blocks = zip(*each, strict=False)
    return [block[0] if all(one == block[0] for one in block) else None for block in blocks]


def choices_by_block(
    log: Iterable[str], grid: Grid, *, num_ranks: int, warmup_calls: int, calls_per_block: int
) -> list[PlainChoice | None]:
    """What ran in each block of `grid`; None where a block's calls differ or are unnamed.

    Shorter than the grid where the log ends early (a crash) or is not one of these calls.
    """
    calls = list(logged_calls(log))[warmup_calls:]
    blocks = grid.blocks
    found: list[PlainChoice | None] = []
    # With a single size nothing else reveals a miscount of calls.
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
