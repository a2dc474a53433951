"""The data store: rows to Parquet parts and back, each part with what wrote it.

    DIR/{measurements,calls,steps,costs}/system=NAME/sweep=NAME/part-<id>.parquet

Parts are written under a hidden name and renamed: no reader sees half a file, and a crash loses
nothing finished. The id is a hash of the content: a part written twice is one file.
"""

import hashlib
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

import dynamiccl
from dynamiccl.datasets.schema import (
    ADDED,
    DEFAULT_PROFILE,
    MEASUREMENTS,
    META_PROVENANCE,
    META_SCHEMA,
    META_VERSION,
    PARTITION_COLUMNS,
    QUIET,
    REQUESTED_COLUMNS,
    SCHEMAS,
    DefaultScope,
    Statistic,
    Status,
)
from dynamiccl.errors import CorruptFile, MissingPath, NotEnoughData, SchemaMismatch, UserError
from dynamiccl.files import replacing
from dynamiccl.nccl import Algorithm, Config, Protocol

_SLUG: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,119}")
TRIAL_COLUMNS: Final = (
    *("system", "gpu", "nccl_version", "collective", "size_bytes", "datatype"),
    *("num_nodes", "num_ranks", "in_place", "launch_profile"),
    *("interference_kind", "interference_level", "is_default", *REQUESTED_COLUMNS),
)
#: What a run measured, under whatever name; fewer rows may be equal by chance.
_CONTENT: Final = (
    *("collective", "num_nodes", "num_ranks", "size_bytes", "in_place", "time_us", "is_default"),
    *REQUESTED_COLUMNS,
)
_LEAST_CONTENT: Final = 8
_NEUTRAL: Final[Mapping[str, Any]] = {
    "run": "single",
    "repeat": 0,
    "launch_profile": DEFAULT_PROFILE,
    "interference_kind": QUIET,
    "is_default": False,
    "verified": False,
    "default_scope": DefaultScope.UNTOUCHED.value,
    "status": Status.OK.value,
    "statistic": Statistic.MEAN.value,
    "time_derived": False,
}


def trial_id(row: Mapping[str, Any]) -> str:
    """Hash of a row's cell: workload, conditions and requested config."""
    text = "|".join(str(row.get(name)) for name in TRIAL_COLUMNS)
    if row.get("num_comms") is not None:
        text += f"|{row['num_comms']}|{row.get('comm_split')}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def scope_of(launch_profile: str) -> str:
    """The default that rows of a launch profile are compared with."""
    is_untouched = launch_profile == DEFAULT_PROFILE
    return (DefaultScope.UNTOUCHED if is_untouched else DefaultScope.PROFILE).value


def measurements_table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """A missing column takes its neutral value or null; raises KeyError for an unknown one."""
    full = [{**_NEUTRAL, **row} for row in rows]
    for row in full:
        _check_names(row)
        row.setdefault("trial", trial_id(row))
    return pa.Table.from_pylist(full, schema=MEASUREMENTS)


def columns_table(columns: Mapping[str, pa.Array], num_rows: int) -> pa.Table:
    """As `measurements_table`, of whole columns; `trial` must be among them."""
    _check_names(columns)
    arrays = [
        columns[field.name].cast(field.type)
        if field.name in columns
        else pa.repeat(pa.scalar(_NEUTRAL.get(field.name), field.type), num_rows)
        for field in MEASUREMENTS
    ]
    return pa.Table.from_arrays(arrays, schema=MEASUREMENTS)


def _check_names(columns: Mapping[str, Any]) -> None:
    unknown = columns.keys() - set(MEASUREMENTS.names)
    if unknown:
        raise KeyError(f"no such measurement column: {sorted(unknown)}")


def config_of(row: Mapping[str, Any]) -> Config:
    """The requested config of a row."""
    algorithm, protocol, channels, chunk = (row[name] for name in REQUESTED_COLUMNS)
    return Config(
        Algorithm.parse(algorithm) if algorithm is not None else None,
        Protocol.parse(protocol) if protocol is not None else None,
        channels,
        chunk,
    )


def requested(config: Config) -> dict[str, Any]:
    """The columns of `config_of`."""
    algorithm, protocol = config.algorithm, config.protocol
    wires = [None if each is None else each.wire for each in (algorithm, protocol)]
    values = (*wires, config.num_channels, config.chunk_bytes)
    return dict(zip(REQUESTED_COLUMNS, values, strict=True))


def slug(text: str) -> str:
    """A valid directory name.

    >>> slug("One node, NVLink 5 (NV18)")
    'one-node-nvlink-5-nv18'
    """
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-._")[:120] or "unnamed"


def check_slug(name: str, what: str) -> str:
    """Raises UserError for what cannot be a directory name."""
    if not _SLUG.fullmatch(name):
        raise UserError(
            f"{what} name '{name}' cannot be a directory name; use lower-case letters, digits, "
            f"'.', '_' and '-', for example '{slug(name)}'"
        )
    return name


def write_part(
    directory: Path, table: pa.Table, *, kind: str = "measurements", provenance: Mapping[str, Any]
) -> list[Path]:
    """Write one part per (system, sweep); raises SchemaMismatch for other columns."""
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
    content = BytesIO()
    pq.write_table(part, content, compression="zstd")
    path = folder / _part_name(content.getvalue())
    with replacing(path, is_synced=True) as hidden:
        hidden.write_bytes(content.getbuffer())
    return path


def _part_name(content: bytes) -> str:
    return f"part-{hashlib.sha256(content).hexdigest()[:16]}.parquet"


def sweep_folder(directory: Path, system: str, sweep: str, kind: str = "measurements") -> Path:
    """Where the parts of one sweep on one system lie."""
    return directory / kind / f"system={system}" / f"sweep={sweep}"


def part_paths(directory: Path, kind: str = "measurements") -> list[Path]:
    """Sorted, maybe empty; raises MissingPath without the directory."""
    if not directory.is_dir():
        raise MissingPath(
            "data directory", directory, "make one with 'dynamiccl-collect import' or 'run'"
        )
    return sorted((directory / kind).glob("system=*/sweep=*/part-*.parquet"))


def sweep_parts(directory: Path, system: str, sweep: str) -> list[Path]:
    """Sorted; raises as `part_paths`."""
    folder = sweep_folder(directory, system, sweep)
    return [path for path in part_paths(directory) if path.parent == folder]


def scan(directory: Path, kind: str = "measurements") -> pl.LazyFrame:
    """Raises MissingPath, NotEnoughData (no part), CorruptFile and SchemaMismatch."""
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
    # Polars' hive reading would take a `name=value` folder above DIR for a partition, and its
    # globbing a bracket in a name for a pattern.
    partition = dict(folder.name.split("=", 1) for folder in list(path.parents)[:2])
    lazy = pl.scan_parquet(path, glob=False, hive_partitioning=False)
    absent = types.keys() - lazy.collect_schema().keys() - set(PARTITION_COLUMNS)
    return lazy.with_columns(
        *(pl.lit(partition[name]).alias(name) for name in PARTITION_COLUMNS),
        *(pl.lit(None, types[name]).alias(name) for name in absent),
    )


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
    """All parts of `kind` in memory; raises as `scan`, which has looked at every byte."""
    return scan(directory, kind).collect()


def read_calls(data_dir: Path) -> pl.DataFrame:
    """Raises UserError for raw files of the plugin, MissingPath without calls."""
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
    """The identity of a data set: SHA-256 over names and bytes of all parts."""
    digest = hashlib.sha256()
    for kind in SCHEMAS:
        for path in part_paths(directory, kind):
            digest.update(str(path.relative_to(directory)).encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def run_digests(rows: pl.DataFrame) -> dict[str, str]:
    """`system/sweep/run` -> digest of what it measured; runs of few rows are left out."""
    found = {}
    for names, run in rows.group_by("system", "sweep", "run"):
        content = run.select(_CONTENT).unique().sort(_CONTENT).rows()
        if len(content) >= _LEAST_CONTENT:
            digest = hashlib.sha256(str(content).encode()).hexdigest()
            found["/".join(map(str, names))] = digest[:16]
    return dict(sorted(found.items()))


def part_provenance(path: Path) -> dict[str, Any]:
    """Empty when the part has none."""
    raw = (pq.read_schema(path).metadata or {}).get(META_PROVENANCE, b"{}")
    record: dict[str, Any] = json.loads(raw)
    return record


def provenance_of(directory: Path) -> list[dict[str, Any]]:
    """Distinct records of a data set's parts."""
    records = [part_provenance(path) for path in part_paths(directory)]
    return [record for i, record in enumerate(records) if record not in records[:i]]


def check_schema(found: pa.Schema, wanted: pa.Schema, *, where: str) -> None:
    """Raises SchemaMismatch for what this release cannot read: null must mean unmeasured."""
    told, want = (
        [(of.get(key) or b"none").decode(errors="replace") for key in (META_SCHEMA, META_VERSION)]
        for of in (found.metadata or {}, wanted.metadata or {})
    )
    version, since = int(told[1]) if told[1].isdecimal() else 0, ADDED.get(want[0], {})
    added = {name for name, first in since.items() if version < first}
    is_older = told[0] == want[0] and added and min(since.values()) - 1 <= version
    if told != want and not is_older:
        raise SchemaMismatch(
            f"{where} holds schema {' version '.join(told)}, this release reads "
            f"{' version '.join(want)}; convert it with the release that wrote it, or import the "
            "raw output again"
        )
    for field in wanted:
        index = found.get_field_index(field.name)
        if index >= 0 and found.field(index).type != field.type:
            raise SchemaMismatch(
                f"{where} has column '{field.name}' as {found.field(index).type}, not {field.type}"
            )
        if index < 0 and field.name not in {*added, *PARTITION_COLUMNS}:
            raise SchemaMismatch(f"{where} has no column '{field.name}' ({field.type})")


@cache
def git_commit() -> str:
    """Commit at the process's start; '+dirty' when changed, 'unknown' outside git."""
    root = Path(dynamiccl.__file__).resolve().parent
    # No tag in place of the commit.
    words = ("describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+dirty")
    try:
        done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def file_sha256(path: Path) -> str:
    """In hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def program_record(tool: str, **facts: Any) -> dict[str, Any]:
    """The program that wrote a part, equal for every run of it."""
    return {
        "tool": tool,
        "dynamiccl_version": dynamiccl.__version__,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **facts,
    }


def run_record(tool: str, **facts: Any) -> dict[str, Any]:
    """`program_record`, and where and how the run was started."""
    return program_record(tool, host=platform.node(), argv=sys.argv, **facts)
