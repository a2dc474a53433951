"""Runs a command as its user does, and takes from its output what differs from place to place."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest

from tests.cli.in_process import done_by
from tests.plugin_build import built
from tests.published import ROOT, WHOLE

#: A user's own settings would show.
_SETTINGS: Final = ("NCCL_", "FAKE_", "DYNAMICCL_", "SLURM_", "OMPI_", "COLUMNS")


def clean_environment(**settings: str) -> dict[str, str]:
    """The environment without settings of NCCL, Slurm, stand-in or ours; then `settings`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    return {**kept, "COLUMNS": "200", "PYTHONPATH": str(ROOT), **settings}


def library(name: str) -> Path:
    """A library of ours, built; skips where there is nothing to build it with."""
    if shutil.which("c++") is None or shutil.which("cmake") is None:
        pytest.skip("no compiler to build the plugin with")
    return built() / name


def dynamiccl(
    program: str, *words: object, directory: Path, settings: Mapping[str, str] | None = None
) -> tuple[object, Any]:
    """Exit code and document of `dynamiccl-PROGRAM WORDS`, run in this process, in `directory`.

    Names of places, and hashes in parts' names, are words. The document is None of an error.
    """
    environment = clean_environment(**(settings or {}))
    with contextlib.chdir(directory), mock.patch.dict(os.environ, environment, clear=True):
        done = done_by(f"dynamiccl-{program}", *words)
    text = done.out
    for place, word in ((directory, "HERE"), (WHOLE, "SHARED"), (ROOT, "ROOT")):
        text = text.replace(str(place), word)
    text = re.sub(r"part-[0-9a-f]{16}\.parquet", "part-HASH.parquet", text)
    return done.code, json.loads(text) if text[:1] in {"{", "["} else None


def shape(value: Any, kept: Iterable[str] = ()) -> Any:
    """The keys of a document and the kinds of its values; the values of keys `kept` (*: of all).

    >>> shape({"a": [{"b": None}, {"b": 2.0, "c": None}], "d": "x"}, ["d"])
    {'a': [{'b': 'number', 'c': 'null'}], 'd': 'x'}
    """
    if "*" in kept:
        return value
    if isinstance(value, dict):
        return {k: item if k in kept else shape(item, kept) for k, item in value.items()}
    if isinstance(value, list):
        return [reduce(_joined, (shape(item, kept) for item in value))] if value else []
    names = {bool: "flag", str: "text", type(None): "null"}
    return names.get(type(value), "number")


def _joined(one: Any, other: Any) -> Any:
    """One shape for two items of a list: what one of them does not know, the other tells."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        return {key: _joined(one.get(key, "null"), other.get(key, "null")) for key in keys}
    return other if one == "null" else one
