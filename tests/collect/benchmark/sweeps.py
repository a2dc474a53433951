"""Sweeps and launches for the tests of the nccl-tests runner."""

from dataclasses import replace

from dynamiccl.collect.grid import Trial
from dynamiccl.collect.schedule import Launch, LaunchMode
from dynamiccl.collect.sweep import Sweep, parse_sweep
from dynamiccl.nccl import ABSTAIN

PLAIN = {
    "name": '"grid"',
    "system": '"box"',
    "collectives": '["AllReduce"]',
    "groups": "[{ num_nodes = 1, ranks_per_node = 8 }]",
    "sizes": '{ min = "1M", max = "4M" }',
    "algorithms": '["Ring", "Tree"]',
    "protocols": '["LL", "Simple"]',
    "num_channels": "[0, 4]",
    "cycles": "2",
    "iterations": "5",
    "warmup_iterations": "2",
    "telemetry": "{ enabled = false }",
}


def text_of(**keys: str) -> str:
    """The plain sweep's text with some keys written anew."""
    return "\n".join(f"{key} = {value}" for key, value in (PLAIN | keys).items())


def sweep(**keys: str) -> Sweep:
    return parse_sweep(text_of(**keys), where="s.toml")


def feasible(made: Sweep) -> list[Trial]:
    """The trials that can run."""
    return [trial for trial in made.trials if trial.infeasible is None]


def picked(made: Sweep) -> list[Trial]:
    """Every feasible trial once, the default twice."""
    return [
        replace(trial, repeat=repeat)
        for trial in feasible(made)
        for repeat in range(2 if trial.config == ABSTAIN else 1)
    ]


def launch_of(
    trials: list[Trial],
    mode: LaunchMode = LaunchMode.SWEEP,
    *,
    scheduled: bool = True,
    repeats: int = 1,
) -> Launch:
    """A launch of some trials of one setting."""
    repeated = [replace(trial, repeat=repeat) for repeat in range(repeats) for trial in trials]
    return Launch("0:x", 0, trials[0].setting, mode, tuple(repeated), scheduled)
