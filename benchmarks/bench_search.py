"""Number and cost of probes of online searches, AutoCCL's and ours.

    python benchmarks/bench_search.py    # FULL=1: all of it, half an hour

A task is a (system, group, collective, size) with everything that may run (search_world.py); an
episode is its first 1,000 calls, with heavy-tailed noise (search_episode.py). Coordinate descent
begins at what NCCL's own choice would set, and measures a candidate once, or three times (`x3`).
Ours begins with what drawn machines say, and once more (`informed`) with a model that learned a
noisy sweep of the same system, at what that would choose (search_warm.py).

Probes are counted to the moment from which on the incumbent is within 2 % of the best by true time
for good, on the tasks where NCCL's own choice is not; an episode that never gets there counts as if
it had probed every config of the task once. Means over tasks, systems alike; intervals are
Student's t over seeds, 95 %. Headline noise: 2 %, since half of the published cells with repeats
spread by less than 1.5 %. With FULL=1 also: other noise, which figures carry in their name.

Writes out/bench/search.json.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from harness import write_result
from learning_figures import student
from search_episode import CALLS, WITHIN, EpisodeResult, noise, play
from search_warm import informed
from search_world import Task, by_system, running

from dynamiccl.serve.search.autoccl import AutoCcl, SearchSpace, Tuner
from dynamiccl.serve.search.policy_search import PolicySearch, Prior
from dynamiccl.simulator.systems import SYSTEMS

SEEDS: Final = range(5)
HEADLINE: Final = 0.02
FULL: Final = bool(os.environ.get("FULL"))
NOISES: Final = (0.0, HEADLINE, 0.05, 0.1) if FULL else (HEADLINE,)
#: Ends the names of figures on what a running job can set.
RUNNING: Final = "_running"

TUNERS: Final = ("cd_default", "cd_default_x3", "ours", "informed")

#: What plays a task.
Make = Callable[[Task], Tuner]
Figures = dict[str, float | int | str | None]
#: (task, outcome of it) by seed.
Played = Mapping[int, Sequence[tuple[Task, EpisodeResult]]]


def tuners(tasks: Sequence[Task]) -> dict[str, Make]:
    """Coordinate descent, with and without repeats, and ours."""
    told = informed(tasks)
    return {
        "cd_default": lambda task: AutoCcl(lambda _: task.space),
        "cd_default_x3": lambda task: AutoCcl(lambda _: task.space, repeats=3),
        "ours": lambda task: _ours(task.space, Prior.drawn(task.space, task.call.size_bytes)),
        "informed": lambda task: _ours(*told[task.name]),
    }


def _ours(space: SearchSpace, prior: Prior) -> Tuner:
    return PolicySearch(lambda _: space, lambda _: prior)


def play_all(make: Make, tasks: Sequence[Task], sigma: float) -> Played:
    """Every task once with each seed; all tuners get the same noise."""
    return {
        seed: [
            (
                task,
                play(
                    make(task),
                    task.times_us,
                    noise(sigma, CALLS, np.random.default_rng((number, seed))),
                    task.space.default,
                ),
            )
            for number, task in enumerate(tasks)
        ]
        for seed in SEEDS
    }


def probes_to(played: Sequence[tuple[Task, EpisodeResult]]) -> float:
    """Mean number of probes to within 2 % for good, on tasks with something to gain."""
    counts = [
        len(task.space.actions) if outcome.probes_to is None else outcome.probes_to
        for task, outcome in played
        if task.headroom > WITHIN
    ]
    return float(np.mean(counts)) if counts else math.nan


def spent_until(played: Sequence[tuple[Task, EpisodeResult]]) -> float:
    """The same with the real number of probes of episodes that never get there."""
    counts = [
        outcome.probes if outcome.probes_to is None else outcome.probes_to
        for task, outcome in played
        if task.headroom > WITHIN
    ]
    return float(np.mean(counts)) if counts else math.nan


def reached(played: Sequence[tuple[Task, EpisodeResult]]) -> float:
    """Share of these episodes that get there."""
    found = [o.probes_to is not None for task, o in played if task.headroom > WITHIN]
    return float(np.mean(found)) if found else math.nan


def mean_of(name: str) -> Callable[[Sequence[tuple[Task, EpisodeResult]]], float]:
    """Mean of a field over all tasks."""
    return lambda played: float(np.mean([getattr(outcome, name) for _, outcome in played]))


MEASURES: Final[Mapping[str, Callable[[Sequence[tuple[Task, EpisodeResult]]], float]]] = {
    "probes_to_2pct": probes_to,
    "spent_until_2pct": spent_until,
    "reached_2pct": reached,
    "probes": mean_of("probes"),
    "probing_slowdown": mean_of("slowdown"),
    "total_over_default": mean_of("total_ratio"),
    "final_regret": mean_of("regret"),
}


def summarise(by_name: Mapping[str, Played], tuner: str, suffix: str) -> Figures:
    """Figures of a tuner: by system, and the mean of the systems with an interval over seeds."""
    figures: Figures = {}
    for measure, of in MEASURES.items():
        name = f"{measure}_{tuner}{suffix}"
        table = np.array([[of(played[seed]) for seed in SEEDS] for played in by_name.values()])
        means = table.mean(axis=1)
        # A system where NCCL's own choice is never worse than 2 % has nothing to find.
        figures |= student(table[~np.isnan(means)].mean(axis=0).tolist(), name)
        if suffix in {"", RUNNING}:
            figures |= {
                f"{name}_{system}": None if math.isnan(mean) else float(mean)
                for system, mean in zip(by_name, means, strict=True)
            }
    slow = [o.slowdown for seeds in by_name.values() for held in seeds.values() for _, o in held]
    figures[f"probing_slowdown_p95_{tuner}{suffix}"] = float(np.quantile(slow, 0.95))
    figures[f"probing_slowdown_worst_{tuner}{suffix}"] = max(slow)
    return figures


def compared(tasks: Mapping[str, Sequence[Task]], sigma: float, suffix: str) -> Figures:
    """Figures of all tuners."""
    figures = counted(tasks, suffix)
    makes = {system: tuners(held) for system, held in tasks.items()}
    for name in TUNERS:
        played = {
            system: play_all(makes[system][name], held, sigma) for system, held in tasks.items()
        }
        figures |= summarise(played, name, suffix)
    return figures | headlines(figures, suffix)


def simulated_figures() -> Figures:
    """Search on every simulated system, and with what a running job can set alone."""
    tasks = dict(by_system([make() for make in SYSTEMS.values()]))
    by_call = {name: [running(task) for task in held] for name, held in tasks.items()}
    figures: Figures = {"systems": len(tasks), "headline_noise_sigma": HEADLINE}
    for sigma in NOISES:
        suffix = "" if sigma == HEADLINE else f"_at_noise_{sigma:g}"
        figures |= compared(tasks, sigma, suffix)
    return figures | compared(by_call, HEADLINE, RUNNING)


def counted(tasks: Mapping[str, Sequence[Task]], suffix: str) -> Figures:
    """How many tasks there are, and of what size."""
    everything = [task for held in tasks.values() for task in held]
    sizes = [len(task.space.actions) for task in everything]
    return {
        f"tasks{suffix}": len(everything),
        f"tasks_to_search{suffix}": sum(task.headroom > WITHIN for task in everything),
        f"configs_per_task_mean{suffix}": float(np.mean(sizes)),
    }


def headlines(figures: Figures, suffix: str) -> Figures:
    """The bar: coordinate descent with the repeats that serve it best."""
    rivals = [name for name in TUNERS if name.startswith("cd")]

    def probes(tuner: str) -> float:
        return float(str(figures[f"probes_to_2pct_{tuner}{suffix}"]))

    rival = min(rivals, key=probes)
    return {
        **{f"probes_ratio_{name}{suffix}": probes(name) / probes("ours") for name in rivals},
        f"best_cd{suffix}": rival,
        f"probes_to_2pct_cd{suffix}": probes(rival),
        f"probes_ratio{suffix}": probes(rival) / probes("ours"),
        f"probing_slowdown{suffix}": figures[f"probing_slowdown_ours{suffix}"],
    }


def main() -> None:
    """Simulate, report."""
    write_result("search", simulated_figures())


if __name__ == "__main__":
    main()
