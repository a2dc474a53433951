"""Sweeps and launches for the tests of the nccl-tests runner, and the stand-in under it."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from rich.console import Console

from dynamiccl.collect.grid import Trial
from dynamiccl.collect.journal import journal_folder
from dynamiccl.collect.launch import NcclTestsRunner, Site
from dynamiccl.collect.launchers import Interrupt
from dynamiccl.collect.run import Summary, SweepProgress, run_sweep
from dynamiccl.collect.schedule import Launch, LaunchMode
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.sweep import Sweep, parse_sweep
from dynamiccl.datasets import store
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Protocol
from dynamiccl.simulator.h100 import true_us
from dynamiccl.simulator.system import Call, Group
from tests.fakes.nccl_tests.install import install_stand_in

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


ROOT = Path(__file__).resolve().parents[3]
#: What a shell sees of a launch: how it is told from the others.
_IS: dict[str, str] = {
    "read-back": '[ "$NCCL_DEBUG" = INFO ]',
    "sweep": '[ -n "$DYNAMICCL_MODE" ] && [ "$NCCL_DEBUG" = WARN ]',
}


class Lab:
    """A folder with the stand-in's programs in `bin`, in which sweeps are run into `out`."""

    def __init__(self, folder: Path, plugin: Path | None) -> None:
        self.folder, self.plugin, self.out = folder, plugin, folder / "out"
        self.programs = install_stand_in(folder / "bin")

    def site(self, made: Sweep) -> Site:
        work = journal_folder(made, self.out) / "work"
        return Site(self.out, work, nccl_tests_dir=self.programs, plugin=self.plugin)

    def run(
        self,
        made: Sweep,
        *,
        resume: bool = False,
        interrupt: Interrupt | None = None,
        site: Site | None = None,
        **known: Any,
    ) -> Summary:
        runner = NcclTestsRunner(made.file, site or self.site(made), interrupt, **known)
        strategy, progress = make_strategy(made.file, made.trials), None
        if interrupt is not None:
            nowhere = Console(file=io.StringIO())
            progress = SweepProgress("test", nowhere, lambda: interrupt.requested)
        summary = run_sweep(made, strategy, runner, self.out, resume=resume, progress=progress)
        runner.close()
        return summary

    def check(self, made: Sweep) -> None:
        """What is looked at before anything runs."""
        NcclTestsRunner(made.file, self.site(made)).check(feasible(made))

    def lose(self, mode: str, *numbers: int, by: str = "echo NCCL went away; exit 1") -> None:
        """Let launches of a mode end before they reach a config, those with `numbers`, from 1."""
        count, which = self.folder / "count", "|".join(map(str, numbers))
        for program in self.programs.iterdir():
            first, rest = program.read_text().split("\n", 1)
            lost = (
                f'case "$*" in *-b*) if {_IS[mode]}; then echo x >> {count}; '
                f"case $(wc -l < {count}) in {which}) {by};; esac; fi;; esac"
            )
            program.write_text(f"{first}\n{lost}\n{rest}")

    @property
    def rows(self) -> pl.DataFrame:
        return store.read(self.out)


def wanted(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows of forced configs that gave a time."""
    return frame.filter(~pl.col("is_default") & (pl.col("status") == "ok"))


def share_near_truth(forced: pl.DataFrame, group: Group) -> float:
    """The share of rows whose time is that of the simulated machine, but for noise."""
    ratios = [
        row["time_us"]
        / true_us(
            Call(group, Collective.parse(row["collective"]), row["size_bytes"]),
            (Algorithm.parse(row["actual_algorithm"]), Protocol.parse(row["actual_protocol"])),
            row["requested_num_channels"],
        )
        for row in forced.iter_rows(named=True)
    ]
    return float(np.mean([0.9 < ratio < 1.15 for ratio in ratios]))
