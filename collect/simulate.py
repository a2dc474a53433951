"""Runs the text of a sweep file in the simulator."""

from pathlib import Path

from dynamiccl.collect.runs.run import run_sweep
from dynamiccl.collect.simulated.runner import SimulatorRunner
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.sweep import parse_sweep
from dynamiccl.simulator.system import System


def simulate(text: str, out: Path, system: System | None = None) -> Path:
    """Run a sweep in the simulator; adds to the data set `out`, and returns its path.

    `system` replaces the one that the text names. Raises InvalidSweep and UserError.
    """
    parsed = parse_sweep(text, where="simulated sweep")
    strategy = make_strategy(parsed.file, parsed.trials)
    run_sweep(parsed, strategy, SimulatorRunner(parsed.file, out, system), out, resume=False)
    return out
