"""The sources of a report: data set and policies."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import polars as pl

from dynamiccl.datasets.cells import left_out_text, rows_left_out, run_names, usable
from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.store import content_hash, part_paths, provenance_of
from dynamiccl.evaluate.blocks import Section, TableBlock

_UNKNOWN: Final = "not known"
_HASH_DIGITS: Final = 12


def origin_section(
    data_dir: Path, frame: pl.DataFrame, manifests: Mapping[str, Manifest]
) -> Section:
    """Tables of the data's sources and writers, and of the policies."""
    text = (
        f"{data_dir}: {len(part_paths(data_dir))} files, {frame.height} rows, "
        f"hash {content_hash(data_dir)}; rows in no task: {left_out_text(rows_left_out(frame))}."
    )
    return Section(
        "Where the figures come from",
        [_sources(frame), _writers(provenance_of(data_dir)), _policies(manifests, frame, data_dir)],
        text=text,
        folded=True,
    )


def _sources(frame: pl.DataFrame) -> TableBlock:
    heads = [
        "system", "sweep", "source", "rows", "timed", "runs", "GPU", "NCCL",
        "collectives", "group shapes", "sizes", "measured",
    ]  # fmt: skip
    key = ["system", "sweep", "source"]
    groups = frame.sort(key).group_by(key, maintain_order=True)
    rows = [[*map(str, name), *_facts(part)] for name, part in groups]
    note = (
        "Rows of source 'simulator' were not measured. Timed rows are those of status ok on GPUs "
        "that neither heat nor power slowed, and without memory errors."
    )
    return TableBlock("Measurements", heads, rows, note)


def _facts(part: pl.DataFrame) -> Iterator[str]:
    yield str(part.height)
    yield str(usable(part).height)
    yield str(part["run"].n_unique())
    for name in ("gpu", "nccl_version", "collective"):
        yield _listed(part[name])
    shapes = part.select("num_nodes", "ranks_per_node").drop_nulls().unique().sort(pl.all())
    yield ", ".join(f"{nodes} x {ranks}" for nodes, ranks in shapes.iter_rows()) or _UNKNOWN
    yield str(part["size_bytes"].n_unique())
    days = part["timestamp"].dt.date().drop_nulls()
    if days.is_empty():
        yield _UNKNOWN
    else:
        first, last = str(days.min()), str(days.max())
        yield first if first == last else f"{first} to {last}"


def _writers(records: Sequence[Mapping[str, Any]]) -> TableBlock:
    """The programs and files behind the parts; equal ones once."""
    rows = []
    for record in records:
        files = record.get("files", {})
        read = ", ".join(f"{name} ({digest[:_HASH_DIGITS]})" for name, digest in files.items())
        keys = ("tool", "dynamiccl_version", "python", "host")
        row = [str(record.get(key, _UNKNOWN)) for key in keys]
        rows.append([*row, _short(record.get("git_commit")), read or "-"])
    unique = [row for index, row in enumerate(rows) if row not in rows[:index]]
    heads = ["written by", "release", "Python", "host", "commit", "files read (SHA-256)"]
    return TableBlock("What wrote the data", heads, unique)


def _policies(manifests: Mapping[str, Manifest], frame: pl.DataFrame, data_dir: Path) -> TableBlock:
    heads = [
        "policy", "recipe", "made", "release", "commit", "trained on data", "runs trained on",
        "runs of these data", "actions", "margin", "gate",
    ]  # fmt: skip
    here, digest = set(run_names(usable(frame))), content_hash(data_dir)
    rows = []
    for name, manifest in manifests.items():
        same = " (these)" if manifest.data_hash == digest else " (others)"
        shared = len(here & set(manifest.runs))
        gated = any(support.gated is not None for support in manifest.supports)
        rows.append(
            [
                name,
                manifest.recipe,
                manifest.created or _UNKNOWN,
                manifest.dynamiccl_version or _UNKNOWN,
                _short(manifest.git_commit),
                (manifest.data_hash[:_HASH_DIGITS] or _UNKNOWN) + same,
                str(len(manifest.runs)),
                f"{shared} of {len(here)}",
                str(len(manifest.catalogue)),
                f"{manifest.abstain_margin:.1%}",
                "passed" if gated else "none",
            ]
        )
    note = (
        "Of runs that a policy was trained on, its training saw other size bins than the test "
        "bins that are scored here."
    )
    return TableBlock("Policies", heads, rows, note)


def _short(commit: str | None) -> str:
    """Abbreviated commit, and whether the source was modified."""
    digest, plus, changed = (commit or _UNKNOWN).partition("+")
    return digest[:_HASH_DIGITS] + plus + changed


def _listed(values: pl.Series) -> str:
    return ", ".join(map(str, values.drop_nulls().unique().sort())) or _UNKNOWN
