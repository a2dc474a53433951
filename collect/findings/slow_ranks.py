"""The rank that the others wait for, by the times of single processes (`runner.per_iteration`)."""

from typing import Final

import polars as pl

#: By how much the other processes take longer before one counts as late.
_LATE: Final = 1.05


def waited_for(frame: pl.DataFrame) -> str | None:
    """A line of text on the process that others wait for in most rows; None if there is none.

    The kernel of a rank that comes late finds all others there and is short, theirs last as long as
    they wait: the late one is the process with the least time.
    """
    times = pl.col("process_times_us")
    known = frame.filter(times.list.len() >= 2)
    late = (
        known.filter(times.list.median() >= _LATE * times.list.min())
        .group_by("hosts", process=times.list.arg_min())
        .len()
        .sort("len", "process", descending=[True, False])
    )
    if not late.height or late["len"][0] <= known.height / 2:
        return None
    hosts, process, count = late.row(0)
    return f"process {process} of {hosts or 'its hosts'} in {count} of {known.height} rows"
