"""Runs the stand-in's programs from a test, in a clean environment.

A program is forked from a process that has loaded it: starting a Python and numpy anew would take
ten times as long as most runs do.
"""

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory

#: Long enough for a loaded machine; a test that waits for a hang sets its own.
TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class StandIn:
    """A folder of programs; `run` runs one."""

    folder: Path

    def run(
        self,
        program: str,
        *arguments: str,
        settings: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """One program, reproducible unless FAKE_LAUNCH is set; raises TimeoutExpired."""
        command = [str(self.folder / program), *arguments]
        with TemporaryDirectory() as folder:
            printed = [Path(folder) / name for name in ("out", "err")]
            process = _loaded().Process(
                target=_begin, args=(command, environment(settings), self.folder, *printed)
            )
            process.start()
            process.join(timeout_s)
            if process.is_alive():
                process.kill()
                process.join()
                raise subprocess.TimeoutExpired(command, timeout_s)
            assert process.exitcode is not None
            texts = [path.read_text(encoding="utf-8") for path in printed]
        return subprocess.CompletedProcess(command, process.exitcode, *texts)

    def output(
        self, program: str, *arguments: str, settings: Mapping[str, str] | None = None
    ) -> str:
        """What a run that succeeds prints."""
        done = self.run(program, *arguments, settings=settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@cache
def _loaded() -> ForkServerContext:
    """Where programs are forked from, begun here so that it finds the package `tests`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fakes.nccl_tests.benchmark"])
    with contextlib.chdir(Path(__file__).parents[2]):
        forkserver.ensure_running()
    return context


def _begin(
    command: list[str], variables: Mapping[str, str], directory: Path, out: Path, err: Path
) -> None:
    from tests.fakes.nccl_tests.program import main  # it is there already

    for number, place in enumerate((Path(os.devnull), out, err)):
        os.dup2(os.open(place, os.O_RDWR | os.O_CREAT, 0o600), number)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    sys.exit(main(command, os.environ))


def environment(settings: Mapping[str, str] | None) -> dict[str, str]:
    """PATH, one fixed launch, and the given settings."""
    return {"PATH": os.environ["PATH"], "FAKE_LAUNCH": "0", **(settings or {})}


def tuning_lines(text: str) -> list[str]:
    """What NCCL's log says about each call, without its prefix."""
    lines = [line for line in text.splitlines() if " Bytes -> " in line]
    return [line.rpartition("NCCL INFO ")[2] for line in lines]


def times_us(text: str) -> list[float]:
    """Both times of every row."""
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdecimal()]
    return [float(row[i]) for row in rows for i in (5, 9)]
