"""One draw of a world on disk: training data, questions, and the truth.

    DIR/worlds-1/WORLD/DRAW/train/          data set: three noisy cycles, NCCL's costs; no test size
    DIR/worlds-1/WORLD/DRAW/questions.csv   the test tasks with their choices, and no time
    DIR/worlds-1/WORLD/DRAW/truth/          data set: every time without noise

A draw is made under a hidden name and renamed, so that one is there whole or not at all.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import numpy as np
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import tuned, usable
from dynamiccl.datasets.provenance import program_record
from dynamiccl.datasets.schema import MEASUREMENTS, TASK_COLUMNS
from dynamiccl.datasets.scoring import ENVIRONMENT_COLUMNS, TaskGrid, task_grid
from dynamiccl.datasets.splits import Split, with_split
from dynamiccl.datasets.store import read, write_part
from dynamiccl.evaluate.worlds.kinds import NO_NOISE, WORLDS
from dynamiccl.nccl import Config

CYCLES: Final = 3
TRAIN_FOLDER: Final = "train"
QUESTIONS_NAME: Final = "questions.csv"
_TRUTH_FOLDER: Final = "truth"


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw, loaded; T test tasks and A actions."""

    world: str
    number: int
    folder: Path
    catalogue: Catalogue
    #: Tasks to learn from and to choose settings by, with times of noisy medians.
    training: TaskGrid
    validation: TaskGrid
    #: (T, A) the test tasks, with times without noise.
    truth: TaskGrid

    @classmethod
    def open(cls, world: str, number: int, out: Path) -> Self:
        """Load the draw below `out`; make it first if it is missing.

        Raises what reading a data set raises.
        """
        folder = out / world / str(number)
        if not folder.is_dir():
            partial = folder.with_name(f".{number}.partial")
            _sweep(world, number, partial)
            _write_questions(cls._read(world, number, partial), partial / QUESTIONS_NAME)
            partial.rename(folder)
        return cls._read(world, number, folder)

    @classmethod
    def _read(cls, world: str, number: int, folder: Path) -> Self:
        frame = tuned(read(folder / TRAIN_FOLDER))
        catalogue = Catalogue.from_frame(usable(frame))
        return cls(
            world,
            number,
            folder,
            catalogue,
            task_grid(frame, catalogue, [Split.TRAIN]),
            task_grid(frame, catalogue, [Split.VALIDATION]),
            task_grid(tuned(read(folder / _TRUTH_FOLDER)), catalogue, [Split.TEST]),
        )

    @property
    def name(self) -> str:
        """Name in messages and files, such as `h100-3`."""
        return f"{self.world}-{self.number}"

    @property
    def asked(self) -> TaskGrid:
        """(T, A) the test tasks with their choices; all times are 1, to hide the truth."""
        times = np.where(self.truth.mask, 1.0, np.nan)
        return replace(self.truth, times_us=times, samples={})

    @property
    def tasks(self) -> list[str]:
        """(T) the tasks' names, `AllReduce/2x8/8192`: collective, nodes x ranks a node, bytes."""
        place = ("collective", "num_nodes", "ranks_per_node", "size_bytes")
        rows = self.truth.tasks.select(place).iter_rows()
        return [f"{collective}/{nodes}x{ranks}/{size}" for collective, nodes, ranks, size in rows]

    @property
    def choices(self) -> list[dict[str, int]]:
        """(T) the action of each choice but NCCL's own, by its `choice_text`."""
        names = [choice_text(config) for config in self.catalogue.configs]
        return [
            {
                names[action]: int(action)
                for action in np.flatnonzero(row)
                if action != ABSTAIN_ACTION
            }
            for row in self.truth.mask
        ]


def choice_text(config: Config) -> str:
    """`Ring/LL128/8`, or `Ring/LL128` where NCCL sets the channels; empty: NCCL's own choice."""
    knobs = (config.algorithm, config.protocol)
    parts = ["" if knob is None else knob.wire for knob in knobs]
    channels = "" if config.num_channels is None else str(config.num_channels)
    return "/".join([*parts, channels]).rstrip("/")


def _sweep(world: str, number: int, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # what a killed command left
    kind = WORLDS[world]
    noisy = kind.sweep(folder / "noisy", number, "noisy", CYCLES, "")
    kind.sweep(folder / _TRUTH_FOLDER, number, "truth", 1, NO_NOISE)
    _without_test_sizes(noisy, folder / TRAIN_FOLDER)
    shutil.rmtree(noisy)


def _without_test_sizes(data: Path, out: Path) -> None:
    """Copy the measurements without test sizes, and all of NCCL's costs."""
    frame = read(data)
    kept = with_split(frame).filter(pl.col("split") != Split.TEST.value)
    table = kept.select(MEASUREMENTS.names).to_arrow().cast(MEASUREMENTS)
    write_part(out, table, provenance=program_record("benchmark"))
    shutil.copytree(data / "costs", out / "costs")


def _write_questions(draw: Draw, path: Path) -> None:
    choices = [" ".join(each) for each in draw.choices]
    told = draw.truth.tasks.select(*TASK_COLUMNS, *ENVIRONMENT_COLUMNS)
    told.insert_column(0, pl.Series("task", draw.tasks)).with_columns(
        choices=pl.Series(choices)
    ).write_csv(path)
