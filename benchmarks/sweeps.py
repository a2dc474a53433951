"""The measured sweeps as a data set, and data sets with systems left out."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.errors import OutputError

ROOT: Final = Path(__file__).resolve().parents[1]
SAMPLE: Final = ROOT / "datasets" / "sample"
#: A larger collection beside the project, where there is one; else the sample.
SWEEPS: Final = ROOT.parent / "shared" / "data" / "sweeps"


def import_sweeps(data: Path) -> dict[str, str]:
    """Import the measured sweeps; of a file whose rows were not all taken, why."""
    left_out: dict[str, str] = {}
    options = ImportOptions(systems_file=SAMPLE / "systems.toml")
    for path in sorted((SWEEPS if SWEEPS.is_dir() else SAMPLE).glob("*.csv")):
        try:
            dropped = import_files([path], data, options=options).files[0].dropped
        except OutputError as error:  # one file holds targets, not measurements
            left_out[path.name] = str(error).removeprefix(f"{path} ")
        else:
            if dropped:
                left_out[path.name] = "; ".join(f"{n} rows: {why}" for why, n in dropped.items())
    return left_out


def without(data: Path, out: Path, systems: Iterable[str]) -> Path:
    """A copy of a data set with all files of some systems left out."""
    ignored = shutil.ignore_patterns(*(f"system={system}" for system in systems))
    shutil.copytree(data, out, ignore=ignored)
    return out
