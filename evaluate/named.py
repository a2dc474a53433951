"""Policies as a command line names them: by NAME=, by the name of their run, or by their recipe."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamiccl.datasets.manifest import Manifest
from dynamiccl.train.tracking import find_run, policy_directory, reopen_run


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy's name in a report, its folder, and the run that it is of where that is known."""

    name: str
    folder: Path
    run_id: str | None


def named_policies(given: Sequence[str], tracking_uri: str) -> list[NamedPolicy]:
    """Resolve `[NAME=]RUN_OR_ARTIFACT`; names that occur twice get a number.

    Raises as `policy_directory` and `Manifest.read`.
    """
    found = [_resolve(text, tracking_uri) for text in given]
    counts = Counter(each.name for each in found)
    seen: Counter[str] = Counter()
    unique = []
    for each in found:
        seen[each.name] += 1
        number = f"-{seen[each.name]}" if counts[each.name] > 1 else ""
        unique.append(NamedPolicy(each.name + number, each.folder, each.run_id))
    return unique


def _resolve(text: str, tracking_uri: str) -> NamedPolicy:
    name, equals, named = text.partition("=")
    if not equals or Path(text).exists():
        name, named = "", text
    folder = policy_directory(named, tracking_uri)
    run_id = find_run(named, tracking_uri)
    if not name and run_id is not None:
        name = reopen_run(tracking_uri, run_id).tag("mlflow.runName")
    return NamedPolicy(name or Manifest.read(folder).recipe, folder, run_id)
