"""Policies as a command line names them, and the MLflow runs that they are of."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.splits import Splits
from dynamiccl.train import tracking


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy's name in a report, its folder, and the run that it is of where that is known."""

    name: str
    folder: Path
    run_id: str | None


def named_policies(given: Sequence[str], tracking_uri: str) -> list[NamedPolicy]:
    """Resolve `[NAME=]RUN_OR_ARTIFACT`; the name is that of the run, or of the recipe, by default.

    Names that occur twice get a number. Raises as `policy_directory` and `Manifest.read`.
    """
    found = [_resolve(text, tracking_uri) for text in given]
    counts = Counter(each.name for each in found)
    seen: Counter[str] = Counter()
    unique = []
    for each in found:
        seen[each.name] += 1
        number = f"-{seen[each.name]}" if counts[each.name] > 1 else ""
        unique.append(replace(each, name=each.name + number))
    return unique


def _resolve(text: str, tracking_uri: str) -> NamedPolicy:
    name, equals, named = text.partition("=")
    if not equals or Path(text).exists():
        name, named = "", text
    folder = tracking.policy_directory(named, tracking_uri)
    run_id = tracking.find_run(named, tracking_uri)
    if not name and run_id is not None:
        name = tracking.reopen_run(tracking_uri, run_id).tag("mlflow.runName")
    return NamedPolicy(name or Manifest.read(folder).recipe, folder, run_id)


def by_turn(policies: Sequence[NamedPolicy]) -> list[list[NamedPolicy]]:
    """Policies that held out other shapes, systems or runs apart; all as one if of other kinds."""
    turns: dict[Splits, list[NamedPolicy]] = {}
    for each in policies:
        turns.setdefault(Manifest.read(each.folder).parts, []).append(each)
    return [*turns.values()] if len({parts.by for parts in turns}) == 1 else [[*policies]]


def log_report(files: Iterable[Path], run_id: str, tracking_uri: str, data_hash: str) -> None:
    """Copy a report's files to `report/HASH` in a run's artifacts.

    One report a data set: a later one of the same data replaces it. Raises UserError for a run that
    the store does not hold.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for path in files:
            if path.is_dir():
                shutil.copytree(path, Path(scratch) / path.name)
            else:
                shutil.copy(path, scratch)
        place = f"report/{data_hash[:12]}"
        tracking.reopen_run(tracking_uri, run_id).log_folder(Path(scratch), place)
