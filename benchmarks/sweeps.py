"""Data of benchmarks: simulated sweeps, and data sets with systems left out."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from dynamiccl.collect.runs.run import run_sweep
from dynamiccl.collect.simulated.runner import SimulatorRunner
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.sweep.load import parse_sweep
from dynamiccl.simulator.system import System


def simulate(text: str, out: Path, system: System | None = None) -> Path:
    """Carry out a sweep file's text in the simulator; adds to the data set `out`.

    `system` takes the place of the one that the text names.
    """
    parsed = parse_sweep(text, where="bench")
    strategy = make_strategy(parsed.file, parsed.trials)
    run_sweep(parsed, strategy, SimulatorRunner(parsed.file, out, system), out, resume=False)
    return out


def without(data: Path, out: Path, systems: Iterable[str]) -> Path:
    """A copy of a data set with all files of some systems left out."""
    ignored = shutil.ignore_patterns(*(f"system={system}" for system in systems))
    shutil.copytree(data, out, ignore=ignored)
    return out
