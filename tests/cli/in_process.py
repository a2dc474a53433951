"""Runs a command line in this process, to save Python's start and imports."""

import contextlib
import io
import shlex
import sys
from importlib import import_module

from tests.cli.conftest import MODULES


def run(line: str) -> tuple[object, str]:
    """Run a command line here: exit code, and all output."""
    command, *arguments = shlex.split(line, comments=True)
    said = io.StringIO()
    code: object = 0
    before = sys.argv
    sys.argv = [command, *arguments]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            import_module(MODULES[command]).main()
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        sys.argv = before
    return code, said.getvalue()
