"""Runs a command as its user does, and takes from its output what differs from place to place."""

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from unittest import mock

from tests.published import ROOT, WHOLE

_MODULES: Final = {
    "collect": "dynamiccl.collect.cli",
    "train": "dynamiccl.train.cli",
    "evaluate": "dynamiccl.evaluate.cli",
    "deploy": "dynamiccl.serve.cli",
}
#: A user's own settings would show.
_SETTINGS: Final = ("NCCL_", "FAKE_", "DYNAMICCL_", "SLURM_", "OMPI_", "COLUMNS")


@dataclass(frozen=True)
class Done:
    """What a command printed, and its exit code."""

    code: object
    out: str
    err: str
    #: The directory that it ran in.
    directory: Path

    @property
    def json(self) -> Any:
        """Its document, without the names of places; raises AssertionError where it failed."""
        return self.document(0)

    def document(self, *codes: int) -> Any:
        """As `json`, where each of some exit codes is right."""
        assert self.code in codes, f"exit code {self.code}: {self.err}"
        return json.loads(self.without_places(self.out))

    def without_places(self, text: str) -> str:
        """The text with words in place of folders and of the hashes in parts' names."""
        for place, word in ((self.directory, "HERE"), (WHOLE, "SHARED"), (ROOT, "ROOT")):
            text = text.replace(str(place), word)
        return re.sub(r"part-[0-9a-f]{16}\.parquet", "part-HASH.parquet", text)


def clean_environment(**settings: str) -> dict[str, str]:
    """The environment without settings of NCCL, Slurm, stand-in or ours; then `settings`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    return {**kept, "COLUMNS": "200", "PYTHONPATH": str(ROOT), **settings}


def dynamiccl(
    program: str, *arguments: object, directory: Path, settings: Mapping[str, str] | None = None
) -> Done:
    """Run `dynamiccl-PROGRAM ARGUMENTS` in this process, in `directory`."""
    code: object = 0
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(directory),
        mock.patch.dict(os.environ, clean_environment(**(settings or {})), clear=True),
        mock.patch.object(sys, "argv", [f"dynamiccl-{program}", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            import_module(_MODULES[program]).main()
        except SystemExit as ended:
            code = ended.code or 0
    return Done(code, out.getvalue(), err.getvalue(), directory)


def shape(value: Any) -> Any:
    """The keys of a document, and the kinds of its values: for what differs between machines.

    >>> shape({"a": [{"b": None}, {"b": 2.0, "c": None}], "d": "x"})
    {'a': [{'b': 'number', 'c': 'null'}], 'd': 'text'}
    """
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [reduce(_joined, map(shape, value))] if value else []
    names = {bool: "flag", str: "text", type(None): "null"}
    return names.get(type(value), "number")


def _joined(one: Any, other: Any) -> Any:
    """One shape for two items of a list: what one of them does not know, the other tells."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        return {key: _joined(one.get(key, "null"), other.get(key, "null")) for key in keys}
    return other if one == "null" else one
