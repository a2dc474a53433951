"""The published sweeps, as a data set and as tables."""

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
from harness import ROOT

from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.datasets.cells import REPEAT_COLUMNS, usable
from dynamiccl.datasets.schema import DEFAULT_PROFILE, QUIET, REQUESTED_COLUMNS
from dynamiccl.datasets.store import config_of, read
from dynamiccl.errors import OutputError
from dynamiccl.nccl import ABSTAIN, Collective, Config

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

SAMPLE: Final = ROOT / "datasets" / "sample"
#: A larger collection beside the project, where there is one; else the sample.
SWEEPS: Final = ROOT.parent / "shared" / "data" / "sweeps"
#: What makes two rows of a file be of one table: all but size, config, repeat and half. In place
#: and out of place are two measurements of one task.
_CIRCUMSTANCES: Final = (
    *("file", "system", "gpu", "nccl_version", "collective", "num_nodes", "ranks_per_node"),
    *("datatype", "launch_profile", "interference_kind", "interference_level"),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """A published sweep of one collective and group in one set of circumstances."""

    #: The file, and what tells the table from others of it.
    name: str
    collective: Collective
    shape: tuple[int, int]
    #: (S,), ascending.
    sizes_bytes: tuple[int, ...]
    #: (A,), ABSTAIN first, measured or not.
    configs: tuple[Config, ...]
    #: (S, A, R) ln us of independent repeats; nan where there is none.
    log_times_us: Floats

    def is_measured(self) -> Bools:
        """(S, A)."""
        return np.asarray(~np.isnan(self.log_times_us).all(axis=2))

    def is_full(self) -> Bools:
        """(S,) sizes that have NCCL's own choice and two other configs."""
        has = self.is_measured()
        return np.asarray(has[:, 0] & (has[:, 1:].sum(axis=1) >= 2))

    @property
    def has_octaves(self) -> bool:
        """Whether three octaves have sizes that are full: one can be left out."""
        return len(np.unique(np.floor(np.log2(self.sizes_bytes))[self.is_full()])) >= 3

    def log_median_us(self) -> Floats:
        """(S, A) ln us, medians of repeats; nan where nothing was measured."""
        told = self.is_measured()
        found = np.full(told.shape, np.nan)
        found[told] = np.nanmedian(self.log_times_us[told], axis=1)
        return found


def public_tables() -> list[Measured]:
    """Every table of the published sweeps."""
    options = ImportOptions(systems_file=SAMPLE / "systems.toml")
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted((SWEEPS if SWEEPS.is_dir() else SAMPLE).glob("*.csv")):
            with suppress(OutputError):  # one file holds targets, not measurements
                import_files([path], Path(folder), options=options)
        frame = usable(read(Path(folder)))
    frame = frame.with_columns(
        file=pl.col("source_file").str.split("/").list.last().str.strip_suffix(".csv")
    )
    groups = frame.group_by(_CIRCUMSTANCES, maintain_order=True)
    found = [_measured(dict(zip(_CIRCUMSTANCES, key, strict=True)), rows) for key, rows in groups]
    return sorted(found, key=lambda table: table.name)


def _measured(key: Mapping[str, Any], frame: pl.DataFrame) -> Measured:
    # One launch measures both halves: their mean is one repeat.
    repeats = ("size_bytes", "is_default", *REQUESTED_COLUMNS, *REPEAT_COLUMNS)
    frame = frame.group_by(repeats).agg(pl.col("time_us").log().mean())
    places: dict[tuple[int, Config], list[float]] = {}
    for row in frame.sort("size_bytes", *REPEAT_COLUMNS, "time_us").iter_rows(named=True):
        config = ABSTAIN if row["is_default"] else config_of(row)
        places.setdefault((row["size_bytes"], config), []).append(row["time_us"])
    sizes = sorted({size for size, _ in places})
    others = sorted({config for _, config in places} - {ABSTAIN}, key=lambda config: config.key)
    configs = (ABSTAIN, *others)
    log_times = np.full((len(sizes), len(configs), max(map(len, places.values()))), np.nan)
    for (size, config), told in places.items():
        log_times[sizes.index(size), configs.index(config), : len(told)] = told
    what = (key["nccl_version"], key["launch_profile"], key["interference_kind"])
    beside = [told for told in what if told not in {None, DEFAULT_PROFILE, QUIET}]
    collective = Collective.parse(key["collective"])
    shape = key["num_nodes"], key["ranks_per_node"]
    name = f"{key['file']}: {key['system']} {collective.wire} {shape[0]}x{shape[1]}"
    name = " ".join([name, *beside])
    return Measured(name, collective, shape, tuple(sizes), configs, log_times)
