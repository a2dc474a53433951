"""All that a check may ask of the machine; the real one is the only part of doctor that acts."""

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
    """What a program answered."""

    #: None when it is not there, or had not ended after TIMEOUT_S.
    returncode: int | None
    #: Standard output and standard error.
    output: str

    @property
    def worked(self) -> bool:
        """Whether it ended with status 0."""
        return self.returncode == 0

    @property
    def first_line(self) -> str:
        """The first line that says something."""
        return next((line.strip() for line in self.output.splitlines() if line.strip()), "")


class Machine(Protocol):
    """A machine that can be asked."""

    @property
    def env(self) -> Mapping[str, str]:
        """The user's environment."""

    def run(self, *argv: str) -> ProgramResult:
        """Run a program to its end."""

    def read(self, path: str) -> str | None:
        """A file's text; None when it cannot be read."""

    def paths(self, pattern: str) -> list[str]:
        """Files that match a shell pattern, sorted."""

    def which(self, name: str, folder: str | None = None) -> str | None:
        """An executable of that name in `folder`, or on PATH."""

    def free_bytes(self, path: str) -> int | None:
        """Room for us on the file system that would hold `path`; None when that is not known."""


class ThisMachine:
    """The machine that we run on."""

    @property
    def env(self) -> Mapping[str, str]:
        """The user's environment."""
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
        """An executable of that name in `folder`, or on PATH."""
        return shutil.which(name, path=folder)

    def free_bytes(self, path: str) -> int | None:
        """Room on the file system of `path`, or of the folder above it that exists."""
        place = Path(path).absolute()
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            return shutil.disk_usage(place).free
        except OSError:
            return None
