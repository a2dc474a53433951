"""The interface through which checks access a machine, and the machine that we run on."""

import glob
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

#: A program that needs longer has hung (nvidia-smi on a lost GPU, sinfo without a controller).
TIMEOUT_S: Final = 30.0
#: Files that are read are small, or are pseudo files.
_MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Exit status and output of a program."""

    #: None when it is not there, or had not ended after TIMEOUT_S.
    returncode: int | None
    #: Standard output and standard error.
    output: str

    @property
    def worked(self) -> bool:
        """Whether the exit status is 0."""
        return self.returncode == 0

    @property
    def first_line(self) -> str:
        """The first non-empty line of output."""
        return next((line.strip() for line in self.output.splitlines() if line.strip()), "")


class Machine(Protocol):
    """A machine that checks can query."""

    @property
    def env(self) -> Mapping[str, str]:
        """The environment variables."""

    def run(self, *argv: str) -> ProgramResult:
        """Run a program to its end."""

    def read(self, path: str) -> str | None:
        """A file's text, or None when it cannot be read."""

    def paths(self, pattern: str) -> list[str]:
        """Files that match a shell pattern, sorted."""

    def which(self, name: str, folder: str | None = None) -> str | None:
        """Path of an executable in `folder`, or on PATH; None without one."""

    def free_bytes(self, path: str) -> int | None:
        """Free bytes on the file system of `path`; None if unknown."""


class ThisMachine:
    """The machine that we run on."""

    @property
    def env(self) -> Mapping[str, str]:
        """The environment variables."""
        return os.environ

    def run(self, *argv: str) -> ProgramResult:
        """Run a program to its end, without input and with plain English output."""
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ProgramResult(None, f"no end after {TIMEOUT_S:g} s")
        except OSError as error:
            return ProgramResult(None, f"{argv[0]}: {error.strerror}")
        return ProgramResult(done.returncode, done.stdout.decode(errors="replace"))

    def read(self, path: str) -> str | None:
        """The first megabyte of a file's text."""
        try:
            with Path(path).expanduser().open("rb") as file:
                return file.read(_MAX_BYTES).decode(errors="replace")
        except OSError:
            return None

    def paths(self, pattern: str) -> list[str]:
        """Files that match a shell pattern, sorted."""
        return sorted(glob.glob(str(Path(pattern).expanduser())))  # noqa: PTH207 - absolute patterns

    def which(self, name: str, folder: str | None = None) -> str | None:
        """Path of an executable in `folder`, or on PATH; None without one."""
        return shutil.which(name, path=folder)

    def free_bytes(self, path: str) -> int | None:
        """Free bytes on the file system of `path`, or of its nearest existing parent."""
        place = Path(path).absolute()
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            return shutil.disk_usage(place).free
        except OSError:
            return None
