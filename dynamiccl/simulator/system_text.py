"""The text of a system file: what `fit-simulator` writes, laid out for people."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from dynamiccl.simulator.parameters import Parameter, SystemFile

_TABLES = ("environment", "nccl", "links", "threads", "chunks", "compute", "fit")
#: Of a cell, what is left at its default says nothing.
_WIDTH = 110


def system_text(file: SystemFile, *, head: str = "") -> str:
    """The file as TOML; `head` stands above it as a comment. Reading it gives the same file."""
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    lines += [""] if head else []
    lines += [f"{key} = {_value(value)}" for key, value in _plain(file)]
    for name in _TABLES:
        lines += _table(name, getattr(file, name))
    for transport, held in file.transports.items():
        lines += _table(f"transports.{transport}", held)
    for cell in file.cells:
        lines += ["", "[[cells]]", *_entries(cell)]
    return "\n".join(lines) + "\n"


def _plain(file: SystemFile) -> Iterator[tuple[str, Any]]:
    for key in SystemFile.model_fields:
        if key not in {*_TABLES, "transports", "cells"}:
            yield key, getattr(file, key)


def _table(name: str, table: Any) -> list[str]:
    entries = list(_entries(table))
    return ["", f"[{name}]", *entries] if entries else []


def _entries(table: Any) -> Iterator[str]:
    if isinstance(table, BaseModel):
        given = table.model_dump(exclude_defaults=True)
        pairs = {key: getattr(table, key) for key in given}
        # A number whose value is the default's still has an origin of its own.
        pairs |= {
            key: value
            for key in table.model_fields_set
            if isinstance(value := getattr(table, key), Parameter)
        }
        pairs = {key: pairs[key] for key in type(table).model_fields if key in pairs}
    else:
        pairs = dict(table)
    for key, value in pairs.items():
        yield f"{key} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, Parameter):
        note = f", note = {json.dumps(value.note, ensure_ascii=False)}" if value.note else ""
        return f'{{ value = {_number(value.value)}, origin = "{value.origin.value}"{note} }}'
    if isinstance(value, BaseModel):
        pairs = {key: getattr(value, key) for key in type(value).model_fields}
        return _inline({key: one for key, one in pairs.items() if one is not None})
    if isinstance(value, Mapping):
        return _inline(value)
    if isinstance(value, tuple | list):
        return _list([_value(one) for one in value])
    return _plain_value(value)


def _plain_value(value: Any) -> str:
    if isinstance(value, float):
        return _number(value)
    # NCCL's names are numbers to Python.
    return json.dumps(getattr(value, "wire", value), ensure_ascii=False)


def _inline(pairs: Mapping[str, Any]) -> str:
    if not pairs:
        return "{}"
    return "{ " + ", ".join(f"{key} = {_value(one)}" for key, one in pairs.items()) + " }"


def _list(items: list[str]) -> str:
    line = "[" + ", ".join(items) + "]"
    if len(line) <= _WIDTH:
        return line
    return "[\n" + "".join(f"    {item},\n" for item in items) + "]"


def _number(value: float) -> str:
    """Five digits are more than any fit is worth."""
    return repr(float(f"{value:.5g}"))
