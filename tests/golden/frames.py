"""Keeps tables small: figures of each column, and the first rows."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any, Final

import polars as pl

from dynamiccl.datasets import store
from dynamiccl.datasets.schema import SCHEMAS

#: Identities: equal ones stay equal, what they are called may change.
_NAMES: Final = ("trial", "run", "launch")
_SHOWN: Final = 3


def tables(data: Path, order: Sequence[str], without: Iterable[str] = ()) -> dict[str, Any]:
    """What is kept of a data directory, table by table, sorted by the columns `order`."""
    kinds = [kind for kind in SCHEMAS if (data / kind).is_dir()]
    return {kind: packed(store.read(data, kind), order, without) for kind in kinds}


def packed(frame: pl.DataFrame, order: Sequence[str], without: Iterable[str] = ()) -> Any:
    """How many rows, what is the same in all, figures of every other column, and some rows."""
    if "source_file" in frame.columns:
        name = pl.col("source_file").map_elements(lambda p: PurePath(p).name, pl.String)
        frame = frame.with_columns(name)
    keys = [name for name in order if name in frame.columns]
    frame = frame.sort(keys, nulls_last=True, maintain_order=True)
    frame = frame.drop(*without, strict=False)
    columns = {name: _values(name, frame[name]) for name in frame.columns}
    varying = {n: values for n, values in columns.items() if len({*map(_digits, values)}) > 1}
    same = {n: values[0] for n, values in columns.items() if n not in varying and values}
    rows = list(zip(*varying.values(), strict=True))[:_SHOWN]
    return {
        "rows": frame.height,
        "same": same,
        "figures": {name: _figures(values) for name, values in varying.items()},
        "first": [dict(zip(varying, row, strict=True)) for row in rows],
    }


def _values(name: str, column: pl.Series) -> list[Any]:
    if column.dtype.is_temporal():
        column = column.dt.epoch("us")
    values = column.to_list()
    if name not in _NAMES:
        return values
    order = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return [None if value is None else order[value] for value in values]


def _figures(values: list[Any]) -> dict[str, Any]:
    """Enough of a column to tell that it is another one."""
    known = [value for value in values if value is not None]
    found = {
        "nulls": len(values) - len(known),
        "distinct": len({*map(_digits, known)}),
        "last": values[-1],
        "digest": hashlib.sha256("\n".join(map(_digits, values)).encode()).hexdigest()[:16],
    }
    if known and all(type(value) in {int, float} for value in known):
        found |= {"least": min(known), "most": max(known), "sum": sum(known)}
    return found


def _digits(value: Any) -> str:
    """Seven digits of a figure: the last bits differ between machines."""
    return f"{value:.7g}" if type(value) is float else json.dumps(value)
