"""Output of a comparison: sentences, tables, a page, JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from dynamiccl.evaluate.blocks import Block, FigureBlock, Section, TableBlock
from dynamiccl.evaluate.compare.changes import Changes, find_changes
from dynamiccl.evaluate.compare.choices import Choice, config_name, find_choices, why
from dynamiccl.evaluate.compare.figure import changes_by_size
from dynamiccl.evaluate.compare.paired import Paired, pair
from dynamiccl.evaluate.figures.drawing import size_label
from dynamiccl.evaluate.page import write_page


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sweeps, and the changes between them."""

    names: tuple[str, str]
    versions: tuple[str, str]
    paired: Paired
    changes: Changes
    choices: list[Choice]

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data for `json.dumps`."""
        changes = self.changes
        return {
            "old": self.names[0],
            "new": self.names[1],
            "nccl_versions": list(self.versions),
            "is_slower": changes.is_slower,
            "is_changed": changes.is_changed,
            "cells_compared": self.paired.cells.height,
            "cells_of_old_alone": self.paired.only_old,
            "cells_of_new_alone": self.paired.only_new,
            "common": {**asdict(changes.common), "is_real": changes.common_is_real},
            "more_slower_than_chance": changes.more_slower,
            "more_faster_than_chance": changes.more_faster,
            "cells": [
                {**self.paired.cells.row(i, named=True), **asdict(changes.cells[i])}
                for i in changes.found
            ],
            "stretches": [
                {
                    **each.line,
                    "first_bytes": each.first_bytes,
                    "last_bytes": each.last_bytes,
                    **asdict(each.change),
                }
                for each in changes.stretches
            ],
            "choices": [{**asdict(each), "why": why(each, changes)} for each in self.choices],
        }

    @property
    def verdicts(self) -> list[str]:
        """The result, one sentence each."""
        changes, count = self.changes, self.paired.cells.height
        if not changes.is_changed:
            return [
                f"Nothing changed beyond chance: {count} cells, all together "
                f"{changes.common.text}. In like sweeps this is said 99 times in 100."
            ]
        said = []
        if changes.common_is_real:
            said.append(f"All {count} cells together: {changes.common.text}, beyond what runs do.")
        for more, word in ((changes.more_slower, "slower"), (changes.more_faster, "faster")):
            if more:
                said.append(f"About {more} more of {count} cells got {word} than chance gives.")
        slow = sum(1 for each in changes.stretches if each.change.mean > changes.common.mean)
        if changes.stretches:
            said.append(
                f"{slow} stretches of sizes got slower, {len(changes.stretches) - slow} faster."
            )
        other = sum(1 for each in self.choices if each.is_other)
        if other:
            said.append(f"NCCL's own choice is another for {other} sizes.")
        back = [each for each in self.choices if each.got_slower]
        if back:
            able = sum(1 for each in back if each.restored_by)
            said.append(
                f"NCCL's own choice got slower for {len(back)} sizes; for {able} of them a table "
                "would bring the old time back."
            )
        return said

    def tables(self, rows: int | None = None) -> Iterator[TableBlock]:
        """Tables of changes, the largest first; at most `rows` each."""
        common, cells = self.changes.common.mean, self.paired.cells
        stretches = sorted(self.changes.stretches, key=lambda s: -abs(s.change.mean - common))
        if stretches:
            yield TableBlock(
                "Stretches of sizes that changed",
                ["collective", "nodes x ranks", "config", "sizes", "change"],
                [
                    [
                        *_group(each.line),
                        config_name(each.line),
                        f"{size_label(each.first_bytes)} to {size_label(each.last_bytes)}",
                        each.change.text,
                    ]
                    for each in stretches[:rows]
                ],
            )
        found = sorted(self.changes.found, key=lambda i: -abs(self.changes.cells[i].mean - common))
        if found:
            named = [(cells.row(i, named=True), self.changes.cells[i]) for i in found[:rows]]
            yield TableBlock(
                "Cells that changed",
                ["collective", "nodes x ranks", "config", "size", "change"],
                [
                    [*_group(row), config_name(row), size_label(row["size_bytes"]), change.text]
                    for row, change in named
                ],
            )
        if self.choices:
            yield TableBlock(
                "NCCL's own choice",
                ["collective", "nodes x ranks", "size", "change", "brought back by", "why"],
                [
                    [
                        *_group(each.task),
                        size_label(int(str(each.task["size_bytes"]))),
                        self.changes.cells[each.cell].text,
                        each.restored_by or "-",
                        why(each, self.changes),
                    ]
                    for each in self.choices[:rows]
                ],
                layout="reasons",
            )


def compare(
    names: tuple[str, str], old: pl.DataFrame, new: pl.DataFrame, q: float, least: float
) -> Comparison:
    """Compare two measurement frames; raises what `pair` raises."""
    paired = pair(old, new)
    changes = find_changes(paired, q, least)
    choices = find_choices(paired, changes, old, new, least)
    return Comparison(names, (_versions(old), _versions(new)), paired, changes, choices)


def write(found: Comparison, out: Path) -> Path:
    """Write page and JSON into `out`; returns the page's path."""
    figure = FigureBlock(
        "Every cell by size",
        "changes",
        changes_by_size(found.paired, found.changes),
        "A mark each cell: above the line slower than before, below it faster; full marks changed "
        "by more than chance.",
    )
    blocks: Sequence[Block] = [figure, *found.tables()]
    section = Section("What changed", blocks, verdicts=found.verdicts)
    header = {
        "names": found.names,
        "versions": found.versions,
        "count": found.paired.cells.height,
        "alone": (found.paired.only_old, found.paired.only_new),
    }
    return write_page(out, "compare", found.to_json(), [section], header)


def _versions(frame: pl.DataFrame) -> str:
    found = frame["nccl_version"].drop_nulls().unique().sort().to_list()
    return ", ".join(map(str, found)) or "unknown"


def _group(row: dict[str, Any]) -> list[str]:
    return [str(row["collective"]), f"{row['num_nodes']} x {row['ranks_per_node']}"]
