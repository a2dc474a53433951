"""One golden, how two values are compared, and how a value is kept: tables are kept small."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final

import polars as pl

from dynamiccl.datasets import store
from dynamiccl.datasets.schema import SCHEMAS

DATA: Final = Path(__file__).with_name("data")
#: What fits is kept on one line.
_WIDTH: Final = 200
#: So many differences say enough.
_SHOWN: Final = 20


@dataclass(frozen=True)
class Golden:
    """A value that a command makes, and how it is compared with what was kept.

    `make` gets an empty directory and returns a JSON value; where something is absent that it
    needs, it calls `pytest.skip` with the reason. Figures are equal within the share `relative`:
    machines differ in the last bits. Lists of `decisions` are equal in 99 of 100 places: what
    networks learn differs with these bits.
    """

    name: str
    make: Callable[[Path], Any]
    relative: float = 1e-9
    decisions: bool = False

    @property
    def path(self) -> Path:
        """Where it is kept."""
        return DATA / f"{self.name}.json"

    def differences(self, directory: Path) -> list[str]:
        """Make it in an empty directory and compare; at most 20.

        Of an object only the keys that the kept one has count, so what is added later is free.
        """
        kept, made = json.loads(self.path.read_bytes()), _as_json(self.make(directory))
        found = list(_differences(kept, made, "value", self.relative))
        if self.decisions and len(kept) == len(made) and len(found) <= 0.01 * len(kept):
            return []
        rest = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        return found[:_SHOWN] + rest

    def write(self, directory: Path) -> None:
        """Make it in an empty directory and keep it."""
        self.path.write_text(_text(_as_json(self.make(directory)), "") + "\n", encoding="utf-8")


def _differences(kept: Any, made: Any, place: str, relative: float) -> Iterator[str]:
    if isinstance(kept, dict) and isinstance(made, dict):
        for key, value in kept.items():
            if key in made:
                yield from _differences(value, made[key], f"{place}.{key}", relative)
            else:
                yield f"{place}.{key}: {_short(value)} was kept, and now there is none"
    elif isinstance(kept, list) and isinstance(made, list):
        if len(kept) != len(made):
            yield f"{place}: {len(kept)} items were kept, now there are {len(made)}"
        for number, (one, other) in enumerate(zip(kept, made, strict=False)):
            yield from _differences(one, other, f"{place}[{number}]", relative)
    elif not _same(kept, made, relative):
        yield f"{place}: {_short(kept)} was kept, now it is {_short(made)}"


def _same(kept: Any, made: Any, relative: float) -> bool:
    if {type(kept), type(made)} <= {int, float}:
        return math.isclose(kept, made, rel_tol=relative, abs_tol=1e-12)
    return type(kept) is type(made) and bool(kept == made)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."


def _as_json(value: Any) -> Any:
    """The value as it is after it was kept: tuples are lists, keys are text."""
    return json.loads(json.dumps(value, allow_nan=False))


def _text(value: Any, indent: str) -> str:
    """JSON in which a row is a line: what is short or a list of plain values is not broken."""
    whole = json.dumps(value, ensure_ascii=False)
    plain = isinstance(value, list) and not any(isinstance(item, list | dict) for item in value)
    if plain or not isinstance(value, list | dict) or len(whole) + len(indent) <= _WIDTH:
        return whole
    inner = f"{indent} "
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(k)}: {_text(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _text(item, inner) for item in value) + f"\n{indent}]"


#: Identities: equal ones stay equal, what they are called may change.
_NAMES: Final = ("trial", "run", "launch")
_ROWS: Final = 3


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
    rows = list(zip(*varying.values(), strict=True))[:_ROWS]
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
    return {
        "nulls": len(values) - len(known),
        "distinct": len({*map(_digits, known)}),
        "digest": hashlib.sha256("\n".join(map(_digits, values)).encode()).hexdigest()[:16],
    }


def _digits(value: Any) -> str:
    """Seven digits of a figure: the last bits differ between machines."""
    return f"{value:.7g}" if type(value) is float else json.dumps(value)
