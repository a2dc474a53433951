"""Makes Parquet parts of journal segments, and adds the noise band."""

from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import pyarrow as pa

from dynamiccl.collect.runs.journal import Sealing
from dynamiccl.collect.sweep import Sweep
from dynamiccl.datasets.cells import usable
from dynamiccl.datasets.provenance import run_record
from dynamiccl.datasets.rows import measurements_table
from dynamiccl.datasets.store import part_provenance, sweep_parts, write_part
from dynamiccl.errors import MachineError

#: Rows with equal values here share a noise band: one setting in one round.
_BAND_KEY: Final = (
    "round",
    "collective",
    "num_nodes",
    "ranks_per_node",
    "num_comms",
    "comm_split",
    "datatype",
    "launch_profile",
    "interference_kind",
    "interference_level",
)
_QUANTILE: Final = 0.9


class PartWriter:
    """Writes the parts of one journal; a part's provenance names its segment."""

    def __init__(self, sweep: Sweep, out: Path, journal: str, runner: str) -> None:
        """Keep the sweep, the data directory, the journal's identity, and the runner's name."""
        self._sweep = sweep
        self._out = out
        self._journal = journal
        self._runner = runner

    def segments(self) -> set[int]:
        """Segments of the journal that are in a part already."""
        file = self._sweep.file
        paths = sweep_parts(self._out, file.system, file.name)
        records = [part_provenance(path) for path in paths]
        return {int(r["segment"]) for r in records if r.get("journal") == self._journal}

    def write(self, sealing: Sealing) -> None:
        """Write the rows of a segment as a part."""
        rows = [row | _timestamp(row) for commit in sealing.commits for row in commit["rows"]]
        if not rows:
            return
        provenance = run_record(
            "run",
            sweep_file=self._sweep.text,
            journal=self._journal,
            segment=sealing.segment,
            runner=self._runner,
        )
        try:
            write_part(self._out, with_noise_band(measurements_table(rows)), provenance=provenance)
        except OSError as error:
            raise MachineError(
                f"cannot write a part into {self._out}: {error}; everything measured is in the "
                "journal: make room and go on with --resume"
            ) from error


def with_noise_band(table: pa.Table) -> pa.Table:
    """Fill `aa_noise_band`: by how much nine in ten A/A pairs of NCCL's default differ.

    A pair is two measurements of the default at one size, in one setting and round: of one process,
    or of two where it is measured untouched and under our plugin, since another process has other
    queue pairs and another way through the network (ECMP). The band is the 90th percentile over
    sizes and pairs of slower / faster - 1. Null where no size has a pair.
    """
    frame = pl.DataFrame(table)
    defaults = usable(frame).filter(
        pl.col("is_default") & ~pl.col("in_place").fill_null(value=False)
    )
    per_size = (
        defaults.group_by([*_BAND_KEY, "size_bytes"])
        .agg(pl.col("time_us"))
        .filter(pl.col("time_us").list.len() >= 2)
    )
    bands = (
        per_size.with_columns(
            spread=pl.col("time_us").map_elements(_pairs, return_dtype=pl.List(pl.Float64))
        )
        .explode("spread")
        .group_by(_BAND_KEY)
        .agg(_band=pl.col("spread").quantile(_QUANTILE))
    )
    found = frame.select(_BAND_KEY).join(
        bands, on=_BAND_KEY, how="left", nulls_equal=True, maintain_order="left"
    )
    index = table.schema.get_field_index("aa_noise_band")
    return table.set_column(index, table.schema.field(index), found["_band"].to_arrow())


def _pairs(times_us: pl.Series) -> list[float]:
    times = np.sort(times_us.to_numpy())
    ratios = times[None, :] / times[:, None]
    spreads: list[float] = (ratios[np.triu_indices(len(times), k=1)] - 1.0).tolist()
    return spreads


def _timestamp(row: dict[str, Any]) -> dict[str, Any]:
    stamp = row.get("timestamp")
    return {} if stamp is None else {"timestamp": datetime.fromisoformat(stamp)}
