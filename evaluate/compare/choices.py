"""Whether NCCL chooses differently or a config got slower, and which config restores the time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl

from dynamiccl.datasets.cells import comparable, quiet, usable
from dynamiccl.evaluate.compare.changes import Changes
from dynamiccl.evaluate.compare.paired import GROUP_COLUMNS, Paired

_TASK: Final = (*GROUP_COLUMNS, "size_bytes")


@dataclass(frozen=True, slots=True)
class Choice:
    """NCCL's own choice for one task, before and after."""

    #: The columns GROUP_COLUMNS, and size_bytes.
    task: dict[str, object]
    #: Algorithm/protocol/channels that ran; None: it was not read back, or differed between runs.
    old: str | None
    new: str | None
    #: Row of Paired.cells of NCCL's own choice.
    cell: int
    got_slower: bool
    #: Row of Paired.cells of the old choice, asked for by name; None: it was not measured so.
    forced: int | None
    #: What takes no longer now than NCCL's own choice did before; None: nothing that was measured.
    restored_by: str | None

    @property
    def is_other(self) -> bool:
        """Whether NCCL chose another config than before."""
        return self.old is not None and self.new is not None and self.old != self.new


def find_choices(
    paired: Paired, changes: Changes, old: pl.DataFrame, new: pl.DataFrame, least: float
) -> list[Choice]:
    """Tasks whose choice changed or whose time got longer by more than chance, by size."""
    slower = _slower(changes)
    chosen = [_chosen(frame) for frame in (old, new)]
    means = [np.nanmean(side.winsorised, axis=1) for side in (paired.old, paired.new)]
    found = []
    for key, cells in paired.cells.group_by(_TASK, maintain_order=True):
        own = cells.filter("is_default")
        if own.is_empty():
            continue
        cell = int(own["cell"][0])
        names = [each.get(key) for each in chosen]
        forced = cells.filter(~pl.col("is_default")).to_dicts()
        choice = Choice(
            task=dict(zip(_TASK, key, strict=True)),
            old=names[0],
            new=names[1],
            cell=cell,
            got_slower=cell in slower,
            forced=_row_of(names[0], forced),
            restored_by=_restoring(forced, means[1], means[0][cell] + np.log1p(least)),
        )
        if choice.is_other or choice.got_slower:
            found.append(choice)
    return found


def why(choice: Choice, changes: Changes) -> str:
    """A sentence on what changed the time of NCCL's own choice."""
    configs = (
        f"{choice.old} before, {choice.new} now" if choice.is_other else f"{choice.new or '?'}"
    )
    if not choice.got_slower:
        return f"NCCL chooses otherwise: {configs}"
    slow_too = choice.forced is not None and choice.forced in _slower(changes)
    if choice.is_other and choice.forced is not None and not slow_too:
        return f"NCCL chooses otherwise: {configs}; the old choice takes what it took"
    if choice.is_other:
        return f"NCCL chooses otherwise: {configs}" + ("; the old choice is slower, too" * slow_too)
    return f"the same choice takes longer: {configs}"


def _slower(changes: Changes) -> set[int]:
    common = max(changes.common.mean, 0.0)
    cells = {i for i in changes.found if changes.cells[i].mean > common}
    for stretch in changes.stretches:
        if stretch.change.mean > common:
            cells |= {i for i in stretch.cells if changes.cells[i].mean > common}
    return cells


def _chosen(frame: pl.DataFrame) -> dict[tuple[object, ...], str]:
    """Task -> the config that NCCL chose, where all runs that tell agree."""
    rows = usable(comparable(quiet(frame))).filter("is_default").drop_nulls("actual_algorithm")
    channels = pl.col("actual_num_channels").cast(pl.Utf8).fill_null("?")
    name = pl.format("{}/{}/{}ch", "actual_algorithm", "actual_protocol", channels)
    agreed = rows.group_by(_TASK).agg(name=name.unique()).filter(pl.col("name").list.len() == 1)
    return {row[:-1]: row[-1][0] for row in agreed.select(*_TASK, "name").iter_rows()}


def _row_of(name: str | None, forced: Sequence[Mapping[str, Any]]) -> int | None:
    """Index of the cell that requests an algorithm and protocol, preferably with AUTO channels."""
    if name is None:
        return None
    algorithm, protocol, channels = name.split("/")
    like = [
        row
        for row in forced
        if (row["requested_algorithm"], row["requested_protocol"]) == (algorithm, protocol)
        and row["requested_num_channels"]
        in {None, int(channels[:-2]) if "?" not in channels else 0}
    ]
    like.sort(key=lambda row: row["requested_num_channels"] is not None)
    return int(like[0]["cell"]) if like else None


def _restoring(forced: Sequence[Mapping[str, Any]], logs: Any, most: float) -> str | None:
    """The fastest config now that takes at most `most` (ln us), or None."""
    if not forced:
        return None
    best = min(forced, key=lambda row: float(logs[row["cell"]]))
    return config_name(best) if logs[best["cell"]] <= most else None


def config_name(row: Mapping[str, Any]) -> str:
    """The requested config as text, or the name of NCCL's own choice.

    >>> config_name({"is_default": False, "requested_algorithm": "Ring",
    ...     "requested_protocol": "LL", "requested_num_channels": 8, "requested_chunk_bytes": None})
    'Ring/LL/8ch'
    """
    if row["is_default"]:
        return "NCCL's own choice"
    words = [row["requested_algorithm"] or "auto", row["requested_protocol"] or "auto"]
    if row["requested_num_channels"] is not None:
        words.append(f"{row['requested_num_channels']}ch")
    if row["requested_chunk_bytes"] is not None:
        words.append(f"{row['requested_chunk_bytes']} B chunks")
    return "/".join(words)
