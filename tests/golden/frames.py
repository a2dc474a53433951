"""Keeps tables small: what is the same in all rows once, large ones as figures of each column."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Final

import polars as pl

from dynamiccl.datasets import store
from tests.golden.golden import equal_values

#: Identities: equal ones stay equal, what they are called may change.
_NAMES: Final = ("trial", "run", "launch")
#: Tables with more rows are kept as figures and their first rows.
_MANY: Final = 250
_SHOWN: Final = 5


def tables(data: Path, *, order: Sequence[str], without: Iterable[str] = ()) -> dict[str, Any]:
    """What a data directory holds, table by table, sorted by `order` and packed."""
    kinds = [kind for kind in store.SCHEMAS if (data / kind).is_dir()]
    return {kind: packed(read(data, kind, order=order), without=without) for kind in kinds}


def read(data: Path, kind: str, *, order: Sequence[str] = ()) -> pl.DataFrame:
    """A table with file names in place of paths, sorted by those of `order` that it has."""
    frame = store.read(data, kind)
    if "source_file" in frame.columns:
        frame = frame.with_columns(
            pl.col("source_file").map_elements(lambda p: PurePath(p).name, pl.String)
        )
    keys = [name for name in order if name in frame.columns]
    return frame.sort(keys, nulls_last=True, maintain_order=True) if keys else frame


def packed(frame: pl.DataFrame, *, without: Iterable[str] = ()) -> dict[str, Any]:
    """{"rows", "same", "columns", "values"}: columns of one value are in "same".

    In place of "columns" and "values" a table of many rows has "figures" for each column and the
    "first" rows.
    """
    frame = frame.drop(*without, strict=False)
    columns = {name: _values(name, frame[name]) for name in frame.columns}
    varying = {n: values for n, values in columns.items() if len({_key(v) for v in values}) > 1}
    found: dict[str, Any] = {
        "rows": frame.height,
        "same": {n: v[0] for n, v in columns.items() if n not in varying and v},
    }
    rows = [list(row) for row in zip(*varying.values(), strict=True)]
    if frame.height <= _MANY:
        return {**found, "columns": list(varying), "values": rows}
    figures = {name: _figures(values) for name, values in varying.items()}
    return {**found, "figures": figures, "first": _records(list(varying), rows[:_SHOWN])}


def gathered(packs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Packed tables by name; what is "same" in all of them stands once, in "common"."""
    first, *others = [pack["same"] for pack in packs.values()]
    common = {
        name: value
        for name, value in first.items()
        if all(name in other and _key(other[name]) == _key(value) for other in others)
    }
    each = {
        name: {**pack, "same": {k: v for k, v in pack["same"].items() if k not in common}}
        for name, pack in packs.items()
    }
    return {"common": common, "each": each}


def equal_frames(kept: Any, made: Any) -> list[str]:
    """Differences, column by column, of packed tables wherever they are in a JSON value."""
    return equal_values(_unpacked(kept), _unpacked(made))


def _values(name: str, column: pl.Series) -> list[Any]:
    if column.dtype.is_temporal():
        column = column.dt.epoch("us")
    values = column.to_list()
    if name not in _NAMES:
        return values
    order = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return [None if value is None else order[value] for value in values]


def _key(value: Any) -> str:
    return json.dumps(value)


def _figures(values: list[Any]) -> dict[str, Any]:
    """Enough of a column to tell that it is another one."""
    known = [value for value in values if value is not None]
    found = {
        "nulls": len(values) - len(known),
        "distinct": len({_key(value) for value in known}),
        "last": values[-1],
        "digest": hashlib.sha256("\n".join(map(_digits, values)).encode()).hexdigest()[:16],
    }
    if known and all(type(value) in {int, float} for value in known):
        found |= {"least": min(known), "most": max(known), "sum": sum(known)}
    return found


def _digits(value: Any) -> str:
    """Seven digits of a figure: the last bits differ between machines."""
    return f"{value:.7g}" if type(value) is float else _key(value)


def _records(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"common", "each"}:
        return {
            name: _unpacked({**pack, "same": {**pack["same"], **value["common"]}})
            for name, pack in value["each"].items()
        }
    if not {"rows", "same", "columns", "values"} <= value.keys():
        return {key: _unpacked(item) for key, item in value.items()}
    columns = {
        name: [row[number] for row in value["values"]]
        for number, name in enumerate(value["columns"])
    }
    same = {name: [item] * value["rows"] for name, item in value["same"].items()}
    return {"rows": value["rows"], **same, **columns}
