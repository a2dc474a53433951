"""Runs a command line in this process, to save Python's start and imports."""

import contextlib
import io
import json
import shlex
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final
from unittest import mock

MODULES: Final = {
    "dynamiccl-collect": "dynamiccl.collect.cli",
    "dynamiccl-train": "dynamiccl.train.cli",
    "dynamiccl-evaluate": "dynamiccl.evaluate.cli",
    "dynamiccl-deploy": "dynamiccl.serve.cli",
}


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command."""

    code: object
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert (self.code, self.err) == (0, "")
        return json.loads(self.out)


def done_by(command: str, *words: object) -> Done:
    """Run a command here."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", [command, *map(str, words)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            import_module(MODULES[command]).main()
        except SystemExit as ended:
            code = ended.code or 0  # type: ignore[assignment]
    return Done(code, out.getvalue(), err.getvalue())


def run(line: str) -> tuple[object, str]:
    """Run a command line here: exit code, and all output."""
    done = done_by(*shlex.split(line, comments=True))
    return done.code, done.out + done.err
