"""Writes a system file as readable TOML, as `fit-simulator` does."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from dynamiccl.simulator.parameters import Parameter, SystemFile
from dynamiccl.simulator.toml_table import toml_value

_TABLES = ("environment", "nccl", "links", "threads", "chunks", "compute", "fit")


def system_text(file: SystemFile, *, head: str = "") -> str:
    """The file as TOML; `head` is a comment on top. Loading it gives an equal file."""
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
        # A parameter equal to the default is written too: its origin may differ.
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
    return toml_value(_data(value), number=_number)


def _data(value: Any) -> Any:
    """A value of the file as plain data."""
    if isinstance(value, Parameter):
        note = {"note": value.note} if value.note else {}
        return {"value": value.value, "origin": value.origin.value, **note}
    if isinstance(value, BaseModel):
        pairs = {key: getattr(value, key) for key in type(value).model_fields}
        return {key: _data(one) for key, one in pairs.items() if one is not None}
    if isinstance(value, Mapping):
        return {key: _data(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_data(one) for one in value]
    # NCCL's names are numbers to Python.
    return getattr(value, "wire", value)


def _number(value: float) -> str:
    """Five digits are more than any fit is worth."""
    return repr(float(f"{value:.5g}"))
