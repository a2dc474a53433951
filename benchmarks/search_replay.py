"""Online search replayed on published sweeps: measured times are the truth, no others are made up.

A task is what the job asked, where and under which conditions, with NCCL's own choice and two
forced configs or more. A cell's median over independent repeats is its true time; a call draws one
of the cell's repeats over that median, or, where a cell has one only, a repeat of another cell of
that system; A100 and B300 have none, and 2 % is assumed. **A hole** of the grid was never measured,
so its time is not known: it is no action at all, and a step along a knob passes over it
(SearchSpace).

A100's channel sweep has no call that was left to NCCL alone: its channels are always forced. NCCL's
own number on such a node is 24 (`num_channels` of sm80_8gpu in nccl_default_decisions.csv,
all-reduce of these sizes), so the iteration with 24 forced stands for the default. GB10's tasks
with two forced configs all miss the default: they are left out.

The config of NCCL's own choice is not known in these sweeps. Configs that force channels only form
a subspace of their own (algorithm and protocol left to NCCL). The grids are small, 2 to 38 configs
a task, so coordinate descent wastes few probes on them.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl
from search_episode import CALLS, WITHIN, EpisodeResult, noise, play

from dynamiccl.collect.imports import import_files
from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import usable
from dynamiccl.datasets.scoring import task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read
from dynamiccl.nccl import Algorithm, Config, Protocol
from dynamiccl.serve.search.autoccl import AutoCcl
from dynamiccl.serve.search.belief import Prior
from dynamiccl.serve.search.policy_search import PolicySearch
from dynamiccl.serve.search.space import DEFAULT, Choice, SearchSpace
from dynamiccl.serve.search.tuner import Tuner

#: The A100 sweep, its system's name here, and the channels that stand for NCCL's own choice.
A100: Final = ("a100_channels_overlap.csv", "a100-channels", 24)
#: Scatter of systems without repeats: assumed, 2 % with heavy tails.
ASSUMED: Final = noise(0.02, 200, np.random.default_rng(0))

Figures = dict[str, float | int | str | None]


@dataclass(frozen=True)
class Replayed:
    """One measured task."""

    system: str
    size_bytes: int
    space: SearchSpace
    #: (A,) medians, us; NaN where nothing was measured.
    times_us: npt.NDArray[np.float64]
    #: Action -> repeats over their median.
    scatter: dict[int, npt.NDArray[np.float64]]


def replayed(folder: Path) -> list[Replayed]:
    """The tasks of published sweeps."""
    # The targets there are not NCCL's.
    files = [path for path in sorted(folder.glob("*.csv")) if "targets" not in path.name]
    with tempfile.TemporaryDirectory() as out:
        import_files(files, Path(out))
        frame = usable(read(Path(out)))
        catalogue = Catalogue.from_frame(frame)
        grid = task_grid(frame, catalogue, list(Split))
    choices = [Choice(config) for config in catalogue.configs]
    pooled = _pooled(grid.tasks, grid.samples)
    found = []
    for task in range(grid.tasks.height):
        system = str(grid.tasks["system"][task])
        times = grid.times_us[task]
        actions = np.flatnonzero(~np.isnan(times)).tolist()
        scatter = {}
        for action in actions:
            samples = grid.samples[task, action]
            alone = pooled.get(system, ASSUMED)
            scatter[action] = samples / times[action] if len(samples) > 1 else alone
        size_bytes = int(grid.tasks["size_bytes"][task])
        found.append(Replayed(system, size_bytes, SearchSpace(choices, actions), times, scatter))
    sweep = folder / A100[0]
    return found + (_a100(sweep) if sweep.is_file() else [])


def _a100(sweep: Path) -> list[Replayed]:
    rows = pl.read_csv(sweep).filter(pl.col("time_us").is_not_null())
    found = []
    for (_, size_bytes), cells in rows.group_by("mode", "size_bytes", maintain_order=True):
        times: dict[Choice, float] = {}
        for row in cells.iter_rows(named=True):
            algorithm, protocol = row["algorithm"], row["protocol"]
            config = Config(
                Algorithm.parse(algorithm) if algorithm else None,
                Protocol.parse(protocol) if protocol else None,
                row["num_channels"],
            )
            stands = config == Config(num_channels=A100[2])
            times[DEFAULT if stands else Choice(config)] = row["time_us"]
        choices = [DEFAULT, *(choice for choice in times if choice != DEFAULT)]
        space = SearchSpace(choices)
        in_order = np.array([times[choice] for choice in choices], dtype=np.float64)
        scatter = dict.fromkeys(space.actions, ASSUMED)
        found.append(Replayed(A100[1], int(str(size_bytes)), space, in_order, scatter))
    return found


def _pooled(
    tasks: pl.DataFrame, samples: Mapping[tuple[int, int], npt.NDArray[np.float64]]
) -> dict[str, npt.NDArray[np.float64]]:
    """Repeats over their cell's median, by system."""
    found: dict[str, list[npt.NDArray[np.float64]]] = {}
    for (task, _), times in samples.items():
        if len(times) > 1:
            found.setdefault(str(tasks["system"][task]), []).append(times / np.median(times))
    return {system: np.concatenate(each) for system, each in found.items()}


def transferred(tasks: Sequence[Replayed], task: Replayed) -> npt.NDArray[np.float64]:
    """(A,) mean log(time / default) of each config on the *other* systems; 0 where it has none.

    The plainest policy that can be had of so small grids: a mean, not learned by size.
    """
    seen: dict[Choice, list[float]] = {}
    for other in tasks:
        # The three rtx5090 systems are one machine.
        if other.system[:12] != task.system[:12]:
            for action in other.space.actions:
                ratio = math.log(other.times_us[action] / other.times_us[other.space.default])
                seen.setdefault(other.space.choices[action], []).append(ratio)
    return np.array([float(np.mean(seen.get(choice, [0.0]))) for choice in task.space.choices])


def _play(task: Replayed, tuner: Tuner, seed: int) -> EpisodeResult:
    random = np.random.default_rng(seed)
    draws = {action: random.choice(each, CALLS) for action, each in task.scatter.items()}
    factors = np.ones((CALLS, len(task.times_us)))
    for action, each in draws.items():
        factors[:, action] = each
    return play(tuner, np.where(np.isnan(task.times_us), math.inf, task.times_us), factors, 0)


def replay_figures(folder: Path, seeds: Sequence[int]) -> Figures:
    """Both searches on published sweeps."""
    tasks = replayed(folder)
    gain = [t for t in tasks if t.times_us[0] > (1.0 + WITHIN) * np.nanmin(t.times_us)]
    priors = [
        Prior.of_policy(task.space, task.size_bytes, transferred(tasks, task)) for task in tasks
    ]
    figures: Figures = {
        "replay_systems": len({task.system for task in tasks}),
        "replay_tasks": len(tasks),
        "replay_tasks_to_search": len(gain),
        "replay_configs_per_task_mean": float(np.mean([len(t.space.actions) for t in tasks])),
    }
    for name in ("cd_default", "cd_random", "ours"):
        outcomes = [
            (task, _play(task, _tuner(name, task, prior, seed), seed))
            for task, prior in zip(tasks, priors, strict=True)
            for seed in seeds
        ]
        chosen = [(t, o) for t, o in outcomes if any(t is each for each in gain)]
        counts = [len(t.space.actions) if o.probes_to is None else o.probes_to for t, o in chosen]
        figures |= {
            f"replay_probes_to_2pct_{name}": float(np.mean(counts)),
            f"replay_reached_2pct_{name}": float(
                np.mean([o.probes_to is not None for _, o in chosen])
            ),
            f"replay_probes_{name}": float(np.mean([o.probes for _, o in outcomes])),
            f"replay_probing_slowdown_{name}": float(np.mean([o.slowdown for _, o in outcomes])),
            f"replay_total_over_default_{name}": float(
                np.mean([o.total_ratio for _, o in outcomes])
            ),
        }
    return figures


def _tuner(name: str, task: Replayed, prior: Prior, seed: int) -> Tuner:
    if name == "ours":
        return PolicySearch(lambda _: task.space, lambda _: prior)
    if name == "cd_random":
        return AutoCcl(lambda _: task.space, start="random", seed=seed)
    return AutoCcl(lambda _: task.space)
