"""The best config of each task, its gain over NCCL's default, and where the best one changes.

A gain counts only above the noise band: by how much two measurements of NCCL's own default differ
in the same sweep (the column `aa_noise_band`), or else by how much repeats of a config do.
"""

from typing import Final

import polars as pl

from dynamiccl.datasets.cells import (
    CONFIG_COLUMNS,
    NOISE_KEY,
    cell_times,
    comparable,
    noise_bands,
    quiet,
    tuned,
    usable,
)
from dynamiccl.datasets.rows import config_of
from dynamiccl.datasets.schema import REQUESTED_COLUMNS, TASK_COLUMNS

#: Tasks that differ in their size only: one line of a plot.
FAMILY_COLUMNS: Final = tuple(name for name in TASK_COLUMNS if name != "size_bytes")


def crossovers(frame: pl.DataFrame) -> pl.DataFrame:
    """The best measured config of each quiet task, sorted by family and size.

    Columns: TASK_COLUMNS, `best` (config key; 'ABSTAIN' when the default is as good), `best_us`,
    `default_us` (null when not measured), `gain` (default / best - 1), `noise_band` (null when
    unknown), `beyond_noise`.
    """
    rows = comparable(usable(quiet(tuned(frame))))
    cells = cell_times(rows)
    default = cells.filter("is_default").select(*TASK_COLUMNS, default_us="time_us")
    best = (
        # Of equal times the default's comes first, then the one that is first by name.
        cells.sort("time_us", ~pl.col("is_default"), *REQUESTED_COLUMNS)
        .group_by(TASK_COLUMNS, maintain_order=True)
        .agg(pl.col("time_us").first().alias("best_us"), pl.col(list(CONFIG_COLUMNS)).first())
    )
    # The default of a task's profile is what the job would get otherwise.
    joined = best.join(default, on=TASK_COLUMNS, how="left", nulls_equal=True)
    joined = joined.join(_bands(rows), on=NOISE_KEY, how="left", nulls_equal=True)
    gain = pl.col("default_us") / pl.col("best_us") - 1.0
    return (
        joined.with_columns(
            best=pl.struct(list(CONFIG_COLUMNS)).map_elements(
                lambda row: config_of(row).key, return_dtype=pl.String
            ),
            gain=gain,
        )
        .with_columns(beyond_noise=pl.col("gain") > pl.col("noise_band").fill_null(0.0))
        .drop(list(CONFIG_COLUMNS))
        .sort(*FAMILY_COLUMNS, "size_bytes")
    )


def _bands(rows: pl.DataFrame) -> pl.DataFrame:
    """One noise band for each NOISE_KEY: from A/A pairs where there are any, else from repeats."""
    measured = (
        rows.drop_nulls("aa_noise_band")
        .group_by(NOISE_KEY)
        .agg(_aa=pl.col("aa_noise_band").median())
    )
    repeats = noise_bands(rows, NOISE_KEY).select(*NOISE_KEY, _repeats="noise_band")
    keys = rows.select(NOISE_KEY).unique()
    joined = keys.join(measured, on=NOISE_KEY, how="left", nulls_equal=True)
    joined = joined.join(repeats, on=NOISE_KEY, how="left", nulls_equal=True)
    return joined.select(*NOISE_KEY, noise_band=pl.coalesce("_aa", "_repeats"))
