"""The two runners, by name."""

from pathlib import Path
from typing import Final

from dynamiccl.collect.nccl_tests_runner import NcclTestsRunner
from dynamiccl.collect.runner import Runner
from dynamiccl.collect.simulator.runner import SimulatorRunner
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.errors import UnknownName

RUNNERS: Final = ("nccl-tests", "simulator")


def make_runner(name: str, file: SweepFile, *, nccl_tests_dir: Path | None = None) -> Runner:
    """The runner called `name`. Raises UnknownName with the choices."""
    if name == "simulator":
        return SimulatorRunner(file)
    if name == "nccl-tests":
        return NcclTestsRunner(file, nccl_tests_dir)
    raise UnknownName("runner", name, RUNNERS)
