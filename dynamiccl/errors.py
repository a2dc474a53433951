"""All errors that DynamICCL raises on purpose, with the exit codes of commands.

A message says what was wrong, the value, the choices and the fix, on one line.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path


class DynamicclError(Exception):
    """`exit_code` is what a command ends with."""

    exit_code = 1


class UserError(DynamicclError):
    """The command line, a recipe or a file that a person wrote is wrong."""

    exit_code = 2


class UnknownName(UserError):
    """A name is not one of the choices."""

    def __init__(
        self, kind: str, value: object, choices: Iterable[str], *, where: str = ""
    ) -> None:
        names = list(choices)
        place = f" in {where}" if where else ""
        listed = ", ".join(names) if names else "none exist"
        hint = near_name(value, names)
        super().__init__(f"unknown {kind} '{value}'{place}{hint}; choose from {listed}")


def near_name(value: object, choices: Iterable[str]) -> str:
    """` (did you mean 'Ring'?)`, or nothing where no choice is near."""
    names = {name.lower(): name for name in choices}
    near = difflib.get_close_matches(str(value).lower(), names, n=1)
    return f" (did you mean '{names[near[0]]}'?)" if near else ""


class InvalidSweep(UserError):
    """A sweep file does not describe a grid that can be run."""


class MissingPath(UserError):
    """A named file or directory does not exist."""

    def __init__(self, what: str, path: Path, fix: str) -> None:
        super().__init__(f"no {what} at {path}; {fix}")


class DataError(DynamicclError):
    """A file is not what it says it is, or holds nothing usable."""

    exit_code = 3


class OutputError(DataError):
    """Benchmark output holds no usable row."""


class SchemaMismatch(DataError):
    """Columns or schema version are not those that this release reads."""


class CorruptFile(DataError):
    """A file's bytes do not decode."""


class ArtifactMismatch(DataError):
    """An artifact differs from its manifest."""


class NotEnoughData(DataError):
    """A data set holds too little for what was asked of it."""


class MachineError(DynamicclError):
    """The machine, not the user or the data, is at fault."""

    exit_code = 4


class PluginError(MachineError):
    """The built tuner plugin cannot be loaded or called."""


class Interrupted(DynamicclError):
    """The user stopped a command (130, as shells use for SIGINT)."""

    exit_code = 130
