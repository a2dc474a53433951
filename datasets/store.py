"""The data store: Parquet parts, hive-partitioned by system and sweep, written atomically.

    DIR/measurements/system=NAME/sweep=NAME/part-<id>.parquet
    DIR/calls/system=NAME/sweep=NAME/part-<id>.parquet
    DIR/steps/system=NAME/sweep=NAME/part-<id>.parquet
    DIR/costs/system=NAME/sweep=NAME/part-<id>.parquet

A part is written to a hidden name beside its place and renamed, so a reader never sees half a file
and a crash loses nothing that was finished. A part's id is a hash of its content: the same part
written twice is one file.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from dynamiccl.datasets.call_columns import CALLS_ADDED_IN_2, CALLS_ADDED_IN_3, CallSource
from dynamiccl.datasets.schema import (
    BESIDE_COLUMNS,
    CALLS,
    COSTS,
    MEASUREMENTS,
    META_PROVENANCE,
    META_SCHEMA,
    META_VERSION,
    PARTITION_COLUMNS,
    STEPS,
)
from dynamiccl.errors import CorruptFile, MissingPath, NotEnoughData, SchemaMismatch, UserError

SCHEMAS: Final[Mapping[str, pa.Schema]] = {
    "measurements": MEASUREMENTS,
    "calls": CALLS,
    "steps": STEPS,
    "costs": COSTS,
}
_SLUG: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,119}")


_ADDED_IN_6: Final = frozenset(column.name for column in BESIDE_COLUMNS)
_ADDED_IN_5: Final = frozenset(
    {"num_comms", "comm_split", "nic_retries", "nic_congestion", "nic_worst"}
)
_ADDED_IN_4: Final = frozenset({"partial_launch", "hosts", "job_id", "process_times_us"})
#: Columns that a file of an older version that is read need not have, by schema and version.
_ADDED_SINCE: Final = {
    (b"measurements", b"3"): _ADDED_IN_4 | _ADDED_IN_5 | _ADDED_IN_6,
    (b"measurements", b"4"): _ADDED_IN_5 | _ADDED_IN_6,
    (b"measurements", b"5"): _ADDED_IN_6,
    (b"calls", b"1"): CALLS_ADDED_IN_2 | CALLS_ADDED_IN_3,
    (b"calls", b"2"): CALLS_ADDED_IN_3,
}


def slug(text: str) -> str:
    """A valid directory name: lower case; all but letters and digits become dashes.

    >>> slug("One node, NVLink 5 (NV18)")
    'one-node-nvlink-5-nv18'
    """
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-._")[:120] or "unnamed"


def check_slug(name: str, what: str) -> str:
    """Return `name` when it can be a directory name; raise UserError when it cannot."""
    if not _SLUG.fullmatch(name):
        raise UserError(
            f"{what} name '{name}' cannot be a directory name; use lower-case letters, digits, "
            f"'.', '_' and '-', for example '{slug(name)}'"
        )
    return name


def write_part(
    directory: Path, table: pa.Table, *, kind: str = "measurements", provenance: Mapping[str, Any]
) -> list[Path]:
    """Write `table` (the full schema of `kind`) as one part per (system, sweep); return the paths.

    Raises SchemaMismatch when the columns are not the schema's.
    """
    schema = SCHEMAS[kind]
    check_schema(table.schema, schema, where=f"the {kind} table to be written")
    paths = []
    frame_keys = (
        table.select(list(PARTITION_COLUMNS)).group_by(list(PARTITION_COLUMNS)).aggregate([])
    )
    for key in frame_keys.to_pylist():
        system = check_slug(key["system"], "system")
        sweep = check_slug(key["sweep"], "sweep")
        part = table.filter(
            (pa.compute.field("system") == system) & (pa.compute.field("sweep") == sweep)
        ).drop_columns(list(PARTITION_COLUMNS))
        meta = dict(schema.metadata or {})
        meta[META_PROVENANCE] = json.dumps(dict(provenance), sort_keys=True).encode()
        folder = sweep_folder(directory, system, sweep, kind)
        paths.append(_write_atomically(part.replace_schema_metadata(meta), folder))
    return paths


def _write_atomically(part: pa.Table, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    hidden = folder / f".writing-{os.getpid()}.parquet"
    try:
        pq.write_table(part, hidden, compression="zstd")
        final = folder / _part_name(hidden.read_bytes())
        with hidden.open("rb") as file:
            os.fsync(file.fileno())
        hidden.replace(final)
    except BaseException:
        # On a full disk, remove the partial file to free the space.
        hidden.unlink(missing_ok=True)
        raise
    return final


def _part_name(content: bytes) -> str:
    return f"part-{hashlib.sha256(content).hexdigest()[:16]}.parquet"


def sweep_folder(directory: Path, system: str, sweep: str, kind: str = "measurements") -> Path:
    """The folder of the parts of one sweep on one system."""
    return directory / kind / f"system={system}" / f"sweep={sweep}"


def part_paths(directory: Path, kind: str = "measurements") -> list[Path]:
    """All parts of `kind` under `directory`, sorted; empty when there are none.

    Raises MissingPath when the directory itself is not there.
    """
    if not directory.is_dir():
        raise MissingPath(
            "data directory", directory, "make one with 'dynamiccl-collect import' or 'run'"
        )
    return sorted((directory / kind).glob("system=*/sweep=*/part-*.parquet"))


def sweep_parts(directory: Path, system: str, sweep: str) -> list[Path]:
    """The parts of one sweep on one system, sorted; raises as `part_paths`."""
    folder = sweep_folder(directory, system, sweep)
    return [path for path in part_paths(directory) if path.parent == folder]


def scan(directory: Path, kind: str = "measurements") -> pl.LazyFrame:
    """Read all parts of `kind` lazily, partition columns included.

    Raises MissingPath, NotEnoughData (no part), CorruptFile and SchemaMismatch, with the path.
    """
    paths = part_paths(directory, kind)
    if not paths:
        raise NotEnoughData(
            f"{directory} holds no {kind}; fill it with 'dynamiccl-collect import' or 'run'"
        )
    schema = SCHEMAS[kind]
    _check_parts(paths, schema)
    names = [field.name for field in schema]
    types = pl.Schema(schema)
    return pl.concat([_scan_part(path, types).select(names) for path in paths])


def _scan_part(path: Path, types: Mapping[str, pl.DataType]) -> pl.LazyFrame:
    """One part with its partition columns; columns newer than its version are null."""
    # Polars' own hive reading would also take a `name=value` folder above DIR for a partition, and
    # its globbing a bracket in a name for a pattern.
    partition = dict(folder.name.split("=", 1) for folder in list(path.parents)[:2])
    lazy = pl.scan_parquet(path, glob=False, hive_partitioning=False)
    absent = types.keys() - lazy.collect_schema().keys() - set(PARTITION_COLUMNS)
    values = dict.fromkeys(absent, None)
    if "source" in absent:
        values["source"] = _source_of_calls(path)
    return lazy.with_columns(
        *(pl.lit(partition[name]).alias(name) for name in PARTITION_COLUMNS),
        *(pl.lit(value, types[name]).alias(name) for name, value in values.items()),
    )


def _source_of_calls(path: Path) -> str:
    """The `source` of a part of `calls` of version 1, from its provenance."""
    is_simulated = part_provenance(path).get("tool") == CallSource.SIMULATOR.value
    return (CallSource.SIMULATOR if is_simulated else CallSource.PLUGIN).value


def _check_parts(paths: Iterable[Path], schema: pa.Schema) -> None:
    for path in paths:
        try:
            found = pq.read_schema(path)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise CorruptFile(
                f"{path} is not a Parquet file: {error}; remove it or restore it"
            ) from error
        check_schema(found, schema, where=str(path))
        # Damaged pages can make a Parquet reader abort the whole process, so none is decoded.
        if path.name != _part_name(path.read_bytes()):
            raise CorruptFile(
                f"{path} is damaged: its bytes do not give the hash in its name; remove it or "
                "restore it"
            )


def read(directory: Path, kind: str = "measurements") -> pl.DataFrame:
    """Read all parts of `kind` into memory; raises as `scan`, and CorruptFile."""
    lazy = scan(directory, kind)
    try:
        return lazy.collect()
    except (pl.exceptions.ComputeError, OSError) as error:
        raise CorruptFile(f"a Parquet part under {directory} does not decode: {error}") from error


def read_calls(data_dir: Path) -> pl.DataFrame:
    """The table `calls` of a data directory, as recorded.

    Raises UserError where it holds what the plugin wrote, and MissingPath where it holds no calls.
    """
    if any(data_dir.glob("**/*.dcc")):
        raise UserError(
            f"{data_dir} holds what the plugin wrote; read it in first: dynamiccl-collect import "
            f"{data_dir} --out DATA --system NAME, and give DATA"
        )
    if not part_paths(data_dir, "calls"):
        raise MissingPath(
            "recorded call",
            data_dir / "calls",
            "record a job in mode observe (dynamiccl-run --mode observe, DYNAMICCL_CALLS_DIR), and "
            "import what it wrote",
        )
    return read(data_dir, "calls")


def content_hash(directory: Path) -> str:
    """SHA-256 over the names and bytes of all parts: the identity of a data set."""
    digest = hashlib.sha256()
    for kind in SCHEMAS:
        for path in part_paths(directory, kind):
            digest.update(str(path.relative_to(directory)).encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def part_provenance(path: Path) -> dict[str, Any]:
    """The provenance record of one part; empty when it holds none."""
    raw = (pq.read_schema(path).metadata or {}).get(META_PROVENANCE, b"{}")
    record: dict[str, Any] = json.loads(raw)
    return record


def provenance_of(directory: Path) -> list[dict[str, Any]]:
    """The distinct provenance records of a data set's parts."""
    records = [part_provenance(path) for path in part_paths(directory)]
    return [record for i, record in enumerate(records) if record not in records[:i]]


def check_schema(found: pa.Schema, wanted: pa.Schema, *, where: str) -> None:
    """Refuse a file whose schema name, version or columns are not readable by this release.

    Partition columns may be missing, and columns newer than the file's version. Raises
    SchemaMismatch.
    """
    meta = found.metadata or {}
    wanted_meta = wanted.metadata or {}
    name, version = meta.get(META_SCHEMA), meta.get(META_VERSION)
    added = _ADDED_SINCE.get((name or b"", version or b""), frozenset())
    optional = {*PARTITION_COLUMNS, *added}
    if name != wanted_meta[META_SCHEMA] or (version != wanted_meta[META_VERSION] and not added):
        told = [(raw or b"none").decode(errors="replace") for raw in (name, version)]
        got = f"{told[0]} version {told[1]}"
        want = f"{wanted_meta[META_SCHEMA].decode()} version {wanted_meta[META_VERSION].decode()}"
        raise SchemaMismatch(
            f"{where} holds schema {got}, this release reads {want}; "
            "convert it with the release that wrote it, or import the raw output again"
        )
    for field in wanted:
        if field.name in optional:
            continue
        index = found.get_field_index(field.name)
        if index < 0:
            raise SchemaMismatch(f"{where} has no column '{field.name}' ({field.type})")
        if found.field(index).type != field.type:
            raise SchemaMismatch(
                f"{where} has column '{field.name}' as {found.field(index).type}, not {field.type}"
            )
