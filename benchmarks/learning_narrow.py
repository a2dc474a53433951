"""Training on narrow logs: a table in use, with 5 % exploration.

The system is that of the grid, three shapes of it. A table was made from one noisy cycle of a sweep
over powers of four; then it ran: 40 times of each task, of which 95 % are of what the table says
and the rest of any config. Policies learn from these times alone, and are judged by times without
noise on the test sizes. Intervals are Student's over seeds.
"""

import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
from harness import Figures, parallel, student
from learning_grids import NO_NOISE, train

from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import TaskGrid, task_grid, tuned, usable
from dynamiccl.datasets.schema import MEASUREMENTS, TASK_COLUMNS
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import part_paths, program_record, read, write_part
from dynamiccl.evaluate import baselines
from dynamiccl.evaluate.baselines import Actions, LearnedPolicy
from dynamiccl.train.policy import TorchPolicy

SEEDS: Final = 3
TIMES: Final = 40
NOISE: Final = 0.03
EXPLORED: Final = 0.05
_ONE_STEP: Final = ("gamma=0", "num_steps=1", "entropy_start=0", "steps=2000")
ARMS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "DDQN": ("ddqn-dueling", (*_ONE_STEP, "action_inputs=false")),
    "CQL, weight 1": ("cql", (*_ONE_STEP, "conservative_weight=1")),
    "gaussian-process": ("gaussian-process", ()),
}
SWEEP: Final = """
name = "{name}"
system = "h100-ib"
collectives = ["AllReduce", "AllGather", "ReduceScatter"]
algorithms = ["Ring", "Tree", "NVLSTree", "PAT"]
groups = [
  {{ num_nodes = 2, ranks_per_node = 8 }},
  {{ num_nodes = 4, ranks_per_node = 8 }},
  {{ num_nodes = 8, ranks_per_node = 8 }},
]
sizes = {{ min = "1K", max = "1G", {sizes} }}
cycles = {cycles}
[simulator]
seed = {seed}
{noise}
"""


def narrow_figures(out: Path, seeds: int = SEEDS) -> dict[str, Any]:
    """Regret, share slower and gain kept of all rows."""
    found: dict[str, list[dict[str, float]]] = {}
    jobs = [(out / f"seed-{seed}", seed) for seed in range(seeds)]
    for _, rows in parallel(_simple, jobs):
        for name, row in rows.items():
            found.setdefault(name, []).append(row)
    for (_, _, arm), row in parallel(_arm, [(*job, arm) for arm in ARMS for job in jobs]):
        found.setdefault(arm, []).append(row)
    return {"data_sets": {"h100-ib, narrow": {name: _row(rows) for name, rows in found.items()}}}


def _row(rows: list[dict[str, float]]) -> Figures:
    made: Figures = {}
    for key in rows[0]:
        made |= student([row[key] for row in rows], key)
    return made


def _simple(folder: Path, seed: int) -> dict[str, dict[str, float]]:
    """Make the logs; figures of baselines without training."""
    _make_logs(folder, seed)
    truth, training, catalogue = _grids(folder)
    players = (baselines.NCCL_DEFAULT, baselines.Interpolated(training))
    rows = {player.name: _judged(truth, player.choose(truth)) for player in players}
    return rows | {"the table in use": _judged(truth, _table(folder, truth, catalogue))}


def _arm(folder: Path, seed: int, arm: str) -> dict[str, float]:
    """Train one recipe on the logs, and judge it."""
    recipe, settings = ARMS[arm]
    policy = TorchPolicy.load(train(folder / "log", recipe, seed, "narrow", settings))
    truth, _, catalogue = _grids(folder)
    return _judged(truth, LearnedPolicy(policy, catalogue, arm).choose(truth))


def _make_logs(folder: Path, seed: int) -> None:
    """The truth, the sweep that the table was made from, and 40 calls of each task."""
    half, four = "steps_per_octave = 2", "factor = 4"
    for name, sizes, noise in (("truth", half, NO_NOISE), ("first", four, "")):
        text = SWEEP.format(name=name, sizes=sizes, cycles=1, seed=seed, noise=noise)
        simulate(text, folder / name)
    frame = tuned(read(folder / "truth"))
    catalogue = Catalogue.from_frame(usable(frame))
    grid = task_grid(frame, catalogue, list(Split))
    table = _table(folder, grid, catalogue)
    random = np.random.default_rng(seed)
    tasks = np.repeat(np.arange(len(table)), TIMES)
    explores = random.random(len(tasks)) < EXPLORED
    drawn = (random.random((len(tasks), len(catalogue))) * grid.mask[tasks]).argmax(axis=1)
    taken = np.where(explores, drawn, table[tasks])
    # NCCL's own choice was timed when the job began: a reward needs it.
    asked = pl.DataFrame(
        {
            "task": np.concatenate([tasks, np.arange(len(table))]),
            "action": np.concatenate([taken, np.full(len(table), ABSTAIN_ACTION)]),
        }
    ).with_columns(repeat=pl.int_range(pl.len()).over("task", "action"))
    numbered = grid.tasks.select(TASK_COLUMNS).with_row_index("task")
    rows = frame.with_columns(action=catalogue.actions(frame)).join(
        numbered, on=TASK_COLUMNS, nulls_equal=True
    )
    called = asked.with_columns(pl.col("task").cast(pl.UInt32)).join(
        rows.drop("repeat"), on=["task", "action"]
    )
    factor = np.exp(NOISE * random.standard_normal(called.height))
    called = called.with_columns(time_us=pl.col("time_us") * factor, sweep=pl.lit("log"))
    called = called.with_columns(pl.col("repeat").cast(frame.schema["repeat"]))
    written = called.select(frame.columns).to_arrow().cast(MEASUREMENTS)
    write_part(folder / "log", written, provenance=program_record("bench"))
    for part in part_paths(folder / "truth", "costs"):
        there = folder / "log" / part.relative_to(folder / "truth")
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(part, there)


def _table(folder: Path, grid: TaskGrid, catalogue: Catalogue) -> Actions:
    """The choices of the table in use."""
    first = task_grid(tuned(read(folder / "first")), catalogue, list(Split))
    return baselines.NearestSize(first).choose(grid)


def _grids(folder: Path) -> tuple[TaskGrid, TaskGrid, Catalogue]:
    """Truth on the test sizes; the logs on the training sizes."""
    frame = tuned(read(folder / "truth"))
    catalogue = Catalogue.from_frame(usable(frame))
    log = task_grid(tuned(read(folder / "log")), catalogue, [Split.TRAIN])
    return task_grid(frame, catalogue, [Split.TEST]), log, catalogue


def _judged(truth: TaskGrid, chosen: Actions) -> dict[str, float]:
    ratio = truth.chosen_us(chosen) / truth.default_us
    loses = truth.default_us > 1.01 * truth.oracle_us
    regret = truth.regret(chosen)
    return {
        "mean_regret": float(regret.mean()),
        "headroom_regret": float(regret[loses].mean()),
        "share_worse": float((ratio > 1.01).mean()),
        "gain_kept": float(np.log(ratio).sum() / np.log(truth.oracle_us / truth.default_us).sum()),
    }
