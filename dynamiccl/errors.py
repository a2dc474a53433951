"""All errors that DynamICCL raises on purpose, with the exit codes of commands.

A message says what was wrong, the value, the choices and the fix, on one line.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path


class DynamicclError(Exception):
    """Base of every error raised on purpose; `exit_code` is what a command ends with."""

    exit_code = 1


class UserError(DynamicclError):
    """Raised when the command line, a recipe or a file that a person wrote is wrong."""

    exit_code = 2


class UnknownName(UserError):
    """Raised when a name is not one of the known choices."""

    def __init__(
        self, kind: str, value: object, choices: Iterable[str], *, where: str = ""
    ) -> None:
        """Make the message: kind, value, place, choices, and the closest choice."""
        names = list(choices)
        place = f" in {where}" if where else ""
        listed = ", ".join(names) if names else "none exist"
        hint = near_name(value, names)
        super().__init__(f"unknown {kind} '{value}'{place}{hint}; choose from {listed}")


def near_name(value: object, choices: Iterable[str]) -> str:
    """` (did you mean 'Ring'?)`, or nothing where no choice is near; before a list of 40 names."""
    names = {name.lower(): name for name in choices}
    near = difflib.get_close_matches(str(value).lower(), names, n=1)
    return f" (did you mean '{names[near[0]]}'?)" if near else ""


class InvalidSweep(UserError):
    """Raised when a sweep file does not describe a grid that can be run."""


class MissingPath(UserError):
    """Raised when a file or directory that was named does not exist."""

    def __init__(self, what: str, path: Path, fix: str) -> None:
        """Make the message: what was looked for, where, and how to get it."""
        super().__init__(f"no {what} at {path}; {fix}")


class DataError(DynamicclError):
    """Raised when a file is not what it says it is, or holds nothing usable."""

    exit_code = 3


class OutputError(DataError):
    """Raised when benchmark output holds no usable row."""


class SchemaMismatch(DataError):
    """Raised when columns or schema version are not those that this release reads."""


class CorruptFile(DataError):
    """Raised when a file's bytes do not decode."""


class ArtifactMismatch(DataError):
    """Raised when an artifact differs from its manifest."""


class NotEnoughData(DataError):
    """Raised when a data set holds too little for what was asked of it."""


class MachineError(DynamicclError):
    """Raised when the machine, not the user or the data, is at fault."""

    exit_code = 4


class PluginError(MachineError):
    """Raised when the built tuner plugin cannot be loaded or called."""


class Interrupted(DynamicclError):
    """Raised when the user stopped a command (exit code 130, as shells use for SIGINT)."""

    exit_code = 130
