"""Measurements of a system as cells: one call, one config, the median time and its repeats."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl

from dynamiccl.datasets import store
from dynamiccl.datasets.cells import pair_spread, quiet, tuned, usable
from dynamiccl.errors import NotEnoughData, UnknownName, UserError
from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.parameters import FitParameters, SystemFile
from dynamiccl.simulator.system import Call

_CELL: Final = (
    "collective",
    "num_nodes",
    "ranks_per_node",
    "size_bytes",
    "launch_profile",
    "requested_algorithm",
    "requested_protocol",
    "requested_num_channels",
    "requested_chunk_bytes",
)
#: Both halves of one launch (in place and not) are one measurement.
_REPEAT: Final = ("sweep", "run", "repeat")


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """One config of one call: the median over its independent repeats."""

    call: Call
    #: What was requested; ABSTAIN is NCCL's own choice.
    config: Config
    #: Most channels that the communicator was allowed to open; None = NCCL's own number.
    opened: int | None
    time_us: float
    repeats: int
    #: By how much two repeats differ; None for a single one.
    spread: float | None

    @property
    def label(self) -> str:
        """The config as shown in tables."""
        limit = "" if self.opened is None else f" (at most {self.opened}ch)"
        return f"{self.call.collective.wire} {self.config.key}{limit}"


def measured_cells(
    directory: Path, file: SystemFile, systems: Sequence[str] = ()
) -> list[MeasuredCell]:
    """The cells that the fit of `file` looks at; `systems` names others than the file does.

    Raises UserError where the data has several systems and nobody says which, UnknownName for one
    that it lacks, and NotEnoughData where nothing is left.
    """
    frame = store.read(directory)
    names = _chosen(frame, file.fit, systems)
    rules = file.fit
    part = tuned(quiet(usable(frame))).filter(
        pl.col("system").is_in(names)
        & pl.col("launch_profile").is_in(list(rules.profiles))
        & ~pl.col("run").is_in(list(rules.exclude_runs))
        & (pl.col("is_default") | ~pl.col("run").is_in(list(rules.exclude_forced_of)))
    )
    part = _in_bytes(part, rules)
    cells = [cell for cell in _cells(part, rules) if _wanted(cell, file)]
    if not cells:
        raise NotEnoughData(
            f"nothing of {', '.join(names)} is left to fit '{file.name}' to: of its groups, "
            f"collectives and launch profiles ({', '.join(rules.profiles)}) the data has no time"
        )
    return cells


def _chosen(frame: pl.DataFrame, rules: FitParameters, systems: Sequence[str]) -> list[str]:
    there = sorted(frame["system"].unique().to_list())
    for name in systems:
        if name not in there:
            raise UnknownName("system of the data", name, there)
    known = list(systems) or [name for name in rules.systems if name in there]
    if known:
        return known
    if len(there) > 1:
        raise UserError(
            f"the data has {len(there)} systems; say which with --system: {', '.join(there)}"
        )
    return there


def _in_bytes(frame: pl.DataFrame, rules: FitParameters) -> pl.DataFrame:
    """Sizes in bytes, of runs whose sizes are written in another unit."""
    for rule in rules.rescale:
        size = pl.when(pl.col("run").is_in(list(rule.runs))).then(
            pl.col("size_bytes") * rule.factor
        )
        frame = frame.with_columns(size.otherwise(pl.col("size_bytes")).alias("size_bytes"))
    return frame


def _cells(frame: pl.DataFrame, rules: FitParameters) -> Iterator[MeasuredCell]:
    once = frame.group_by([*_CELL, *_REPEAT], maintain_order=True).agg(pl.col("time_us").median())
    grouped = once.group_by(list(_CELL), maintain_order=True).agg(pl.col("time_us"))
    # By name, so that the order of rows in the data changes no figure.
    for row in grouped.sort(list(_CELL), nulls_last=True).iter_rows(named=True):
        yield _cell(row, rules.profiles)


def _cell(row: Mapping[str, Any], profiles: Mapping[str, Any]) -> MeasuredCell:
    profile = profiles[row["launch_profile"]]
    algorithm, protocol = row["requested_algorithm"], row["requested_protocol"]
    config = Config(
        None if algorithm is None else Algorithm.parse(algorithm),
        None if protocol is None else Protocol.parse(protocol),
        # What a profile limits is not asked for call by call.
        None if profile.max_channels is not None else row["requested_num_channels"],
        row["requested_chunk_bytes"],
    )
    call = Call(
        Group(row["num_nodes"] or 0, row["ranks_per_node"] or 0),
        Collective.parse(row["collective"]),
        row["size_bytes"],
    )
    times_us: list[float] = row["time_us"]
    return MeasuredCell(
        call=call,
        config=config,
        opened=profile.max_channels,
        time_us=float(np.median(times_us)),
        repeats=len(times_us),
        spread=pair_spread(times_us),
    )


def _wanted(cell: MeasuredCell, file: SystemFile) -> bool:
    least = file.fit.min_bytes_of.get(cell.call.collective.wire, file.fit.min_bytes)
    shapes = {(shape.num_nodes, shape.ranks_per_node) for shape in file.groups}
    shape = (cell.call.group.num_nodes, cell.call.group.ranks_per_node)
    return (
        shape in shapes
        and cell.call.collective in file.collectives
        and cell.call.size_bytes >= max(least, 1)
    )
