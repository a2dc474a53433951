"""A job's calls and their counts, from the plugin's recordings or from a CSV file."""

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import polars as pl

from dynamiccl.datasets.cells import asking
from dynamiccl.datasets.store import read_calls
from dynamiccl.errors import DataError, MissingPath, NotEnoughData, UnknownName, UserError
from dynamiccl.nccl import Collective
from dynamiccl.sizes import size_bin

#: Columns of a list of calls; the last three may be missing.
TRACE_COLUMNS: Final = ("collective", "size_bytes", "count", "num_ranks", "num_nodes")
_NEEDED: Final = TRACE_COLUMNS[:2]


@dataclass(frozen=True, slots=True)
class Called:
    """Calls of one collective and size bin on communicators of one shape."""

    collective: Collective
    bin: int
    num_nodes: int
    num_ranks: int
    calls: int
    #: Of those with a time, its median; None: no time was recorded.
    median_us: float | None = None
    #: The algorithm and protocol that ran most; None: not recorded.
    ran: str | None = None

    @property
    def time_us(self) -> float | None:
        """Total time in us, at the median; None where unknown."""
        return None if self.median_us is None else self.calls * self.median_us


def calls_of(
    data_dir: Path, num_nodes: int | None, num_ranks: int | None
) -> tuple[list[Called], int]:
    """The calls of a data directory's table `calls`, and how many are left out.

    What NCCL asks no tuner about is, and what does not tell size, ranks or nodes; the last two may
    be given for calls that do not tell. Raises MissingPath and NotEnoughData where none is left.
    """
    recorded = read_calls(data_dir).with_columns(
        pl.col("num_nodes").fill_null(pl.lit(num_nodes, pl.Int64)),
        pl.col("num_ranks").fill_null(pl.lit(num_ranks, pl.Int64)),
    )
    frame = asking(recorded).drop_nulls(["num_nodes", "num_ranks"])
    if frame.is_empty():
        raise NotEnoughData(
            f"none of the {recorded.height} calls in {data_dir} is one that a table could decide, "
            "with size, ranks and nodes; give --nodes (and --ranks) for traces that do not tell"
        )
    keys = ("collective", "bin", "num_nodes", "num_ranks")
    ran = pl.concat_str("actual_algorithm", "actual_protocol", separator="/")
    groups = frame.group_by(keys).agg(
        calls=pl.len(),
        median_us=pl.col("time_us").median(),
        ran=ran.drop_nulls().mode().sort().first(),
    )
    found = [
        Called(Collective.parse(collective), *others)
        for collective, *others in groups.sort(keys).iter_rows()
    ]
    return found, recorded.height - frame.height


def calls_in_trace(path: Path, num_nodes: int | None, num_ranks: int | None) -> list[Called]:
    """The calls of a CSV file with TRACE_COLUMNS; the shape may be given for all rows.

    Raises MissingPath, DataError with the line, and UserError where the shape is not known.
    """
    if not path.is_file():
        raise MissingPath("list of calls", path, f"a CSV file with {', '.join(TRACE_COLUMNS)}")
    found: Counter[tuple[Collective, int, int, int]] = Counter()
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        missing = [name for name in _NEEDED if name not in (rows.fieldnames or [])]
        if missing:
            raise DataError(
                f"{path}:1: no column {', '.join(missing)}; a list of calls has "
                f"{', '.join(TRACE_COLUMNS)}"
            )
        for line, row in enumerate(rows, 2):
            try:
                nodes = int(row.get("num_nodes") or num_nodes or 0)
                ranks = int(row.get("num_ranks") or num_ranks or 0)
                collective = Collective.parse(row["collective"], where=f"{path}:{line}")
                size, count = int(row["size_bytes"]), int(row.get("count") or 1)
            except ValueError as error:
                raise DataError(f"{path}:{line}: {error}; write whole numbers") from error
            except UnknownName as error:
                raise DataError(str(error)) from error
            if nodes < 1 or ranks < 1:
                raise UserError(f"{path}:{line} names no ranks or nodes; add --ranks and --nodes")
            found[collective, size_bin(size), nodes, ranks] += count
    return [Called(*key, count) for key, count in sorted(found.items())]
