"""Python rows to the measurements table and back: defaults, trial ids, Arrow columns.

Collecting code fills a `dict` with the columns it knows; everything else is null or the column's
neutral value. This is the one place where a row gets its trial id.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import pyarrow as pa

from dynamiccl.datasets.schema import (
    DEFAULT_PROFILE,
    MEASUREMENTS,
    QUIET,
    REQUESTED_COLUMNS,
    DefaultScope,
    Statistic,
    Status,
)
from dynamiccl.nccl import Algorithm, Config, Protocol

TRIAL_COLUMNS: Final = (
    *("system", "gpu", "nccl_version", "collective", "size_bytes", "datatype"),
    *("num_nodes", "num_ranks", "in_place", "launch_profile"),
    *("interference_kind", "interference_level", "is_default", *REQUESTED_COLUMNS),
)
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
    """Stable id of a row's cell: hash of workload, conditions and requested config."""
    text = "|".join(str(row.get(name)) for name in TRIAL_COLUMNS)
    if row.get("num_comms") is not None:
        text += f"|{row['num_comms']}|{row.get('comm_split')}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def scope_of(launch_profile: str) -> str:
    """The default that rows of a launch profile are compared with, where it is the user's own."""
    is_untouched = launch_profile == DEFAULT_PROFILE
    return (DefaultScope.UNTOUCHED if is_untouched else DefaultScope.PROFILE).value


def measurements_table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Build a measurements table; a missing column takes its neutral value or null.

    Raises KeyError for a column that is not in the schema (a bug).
    """
    names = {field.name for field in MEASUREMENTS}
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for row in rows:
        unknown = row.keys() - names
        if unknown:
            raise KeyError(f"no such measurement column: {sorted(unknown)}")
        full = {**_NEUTRAL, **row}
        full.setdefault("trial", trial_id(full))
        for name, values in columns.items():
            values.append(full.get(name))
    arrays = [pa.array(columns[field.name], type=field.type) for field in MEASUREMENTS]
    return pa.Table.from_arrays(arrays, schema=MEASUREMENTS)


def columns_table(columns: Mapping[str, pa.Array], num_rows: int) -> pa.Table:
    """Build a measurements table from whole columns; a missing one takes its neutral value or null.

    `trial_id` must be among them. Raises KeyError for a column that is not in the schema (a bug).
    """
    unknown = columns.keys() - {field.name for field in MEASUREMENTS}
    if unknown:
        raise KeyError(f"no such measurement column: {sorted(unknown)}")
    arrays = []
    for field in MEASUREMENTS:
        array = columns.get(field.name)
        if array is not None:
            arrays.append(array.cast(field.type))
        elif field.name in _NEUTRAL:
            arrays.append(pa.repeat(pa.scalar(_NEUTRAL[field.name], field.type), num_rows))
        else:
            arrays.append(pa.nulls(num_rows, field.type))
    return pa.Table.from_arrays(arrays, schema=MEASUREMENTS)


def config_of(row: Mapping[str, Any]) -> Config:
    """The requested config of a row."""
    algorithm, protocol, channels, chunk = (row[name] for name in REQUESTED_COLUMNS)
    return Config(
        Algorithm.parse(algorithm) if algorithm is not None else None,
        Protocol.parse(protocol) if protocol is not None else None,
        channels,
        chunk,
    )
