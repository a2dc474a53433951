"""NCCL's own choice for each task, where the data tell."""

import polars as pl

from dynamiccl.datasets.cells import comparable, quiet, tuned
from dynamiccl.datasets.schema import TASK_COLUMNS


def default_names(frame: pl.DataFrame, tasks: pl.DataFrame) -> list[str | None]:
    """(T,) algorithm/protocol of NCCL's default on each task of a grid; None where unknown.

    Unknown is also what differed between runs, or was read back in some alone.
    """
    rows = comparable(quiet(tuned(frame))).filter("is_default")
    name = pl.concat_str("actual_algorithm", "actual_protocol", separator="/")
    chosen = rows.group_by(TASK_COLUMNS).agg(name=name.unique())
    one = pl.when(pl.col("name").list.len() == 1).then(pl.col("name").list.first())
    found = tasks.select(TASK_COLUMNS).join(
        chosen.with_columns(one.alias("name")),
        on=TASK_COLUMNS,
        how="left",
        nulls_equal=True,
        maintain_order="left",
    )
    return found["name"].to_list()
