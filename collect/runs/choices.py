"""The decision table of a sweep's own outcomes, as a CSV file: one config for each task.

    OUT/choices/system=NAME/sweep=NAME.csv

ABSTAIN stands where no config is surely better than NCCL's own choice. It is made of the sweep's
own outcomes, with the surrogate that the adaptive strategy believes in: sizes help each other.
"""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dynamiccl.collect.grid import Setting
from dynamiccl.collect.runs.journal import write_atomically
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.nccl import Config

COLUMNS: Final = (
    "collective",
    "num_nodes",
    "ranks_per_node",
    "comms",
    "datatype",
    "launch_profile",
    "interference_kind",
    "interference_level",
    "size_bytes",
    "config",
)


def _comms(setting: Setting) -> str:
    """The split into communicators as text; empty for a single one."""
    comms = setting.comms
    return "" if comms is None else f"{comms.count} by {setting.split}"


def choices_path(out: Path, file: SweepFile, suffix: str = "") -> Path:
    """Path of the table of a sweep."""
    return out / "choices" / f"system={file.system}" / f"sweep={file.name}{suffix}.csv"


def write_choices(path: Path, choices: Mapping[tuple[Setting, int], Config]) -> None:
    """Write the table, sorted by setting and size; an older one is replaced atomically."""
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for (setting, size_bytes), config in sorted(choices.items(), key=lambda item: item[0]):
        table.writerow(
            [
                setting.collective.wire,
                setting.num_nodes,
                setting.ranks_per_node,
                _comms(setting),
                setting.datatype,
                setting.profile.name,
                setting.interference.kind,
                f"{setting.interference.level:g}",
                size_bytes,
                config.key,
            ]
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue())
