"""Number and cost of probes of online searches, AutoCCL's and ours.

    python benchmarks/bench_search.py    # FULL=1: all of it, half an hour

A task is a (system, group, collective, size) with everything that may run (search_world.py); an
episode is its first 1,000 calls, with heavy-tailed noise (search_episode.py). Coordinate descent
begins at what NCCL's own choice would set, or anywhere, and measures a candidate once, or three
times (`x3`). Ours begins with a model that was learned on the other systems (search_warm.py).

Probes are counted to the moment from which on the incumbent is within 2 % of the best by true time
for good, on the tasks where NCCL's own choice is not; an episode that never gets there counts as if
it had probed every config of the task once. Means over tasks, systems alike; intervals are
Student's t over seeds, 95 %. Headline noise: 2 %, since half of the published cells with repeats
spread by less than 1.5 %. With FULL=1 also: other noise, which figures carry in their name, and
ours from trained policies and from nothing.

Writes out/bench/search.json.
"""

import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from harness import write_result
from learning_figures import student
from search_episode import CALLS, WITHIN, EpisodeResult, noise, play
from search_policy import Policies, policy_priors, train_all
from search_warm import WarmStart, learn
from search_world import Task, by_system, running

from dynamiccl.serve.search.autoccl import AutoCcl, Tuner
from dynamiccl.serve.search.policy_search import PolicySearch, Prior
from dynamiccl.simulator.systems import SYSTEMS, find_system

SEEDS: Final = range(5)
HEADLINE: Final = 0.02
FULL: Final = bool(os.environ.get("FULL"))
NOISES: Final = (0.0, HEADLINE, 0.05, 0.1) if FULL else (HEADLINE,)
#: Ends the names of figures on what a running job can set.
RUNNING: Final = "_running"

#: What plays a task with a seed.
Make = Callable[[Task, int], Tuner]
Figures = dict[str, float | int | str | None]
#: (task, outcome of it) by seed.
Played = Mapping[int, Sequence[tuple[Task, EpisodeResult]]]
#: All tuners, and the tasks of a part, of which what they begin with has seen nothing.
Part = tuple[Mapping[str, Make], Sequence[Task]]


def rivals() -> dict[str, Make]:
    """Coordinate descent, from either start, with and without repeats."""
    return {
        "cd_default": lambda task, _: AutoCcl(lambda _: task.space),
        "cd_random": lambda task, seed: AutoCcl(lambda _: task.space, start="random", seed=seed),
        "cd_default_x3": lambda task, _: AutoCcl(lambda _: task.space, repeats=3),
        "cd_random_x3": lambda task, seed: AutoCcl(
            lambda _: task.space, start="random", seed=seed, repeats=3
        ),
    }


def ours(priors: Mapping[tuple[str, int], Prior]) -> Make:
    """Our search, with the priors of (task, seed)."""
    return lambda task, seed: PolicySearch(lambda _: task.space, lambda _: priors[task.name, seed])


def from_trees(warm: WarmStart, tasks: Sequence[Task]) -> Make:
    """Our search, with a prediction that is the same for every seed."""
    said = {task.name: warm.prior(task) for task in tasks}
    return ours({(name, seed): prior for name, prior in said.items() for seed in SEEDS})


def learned_elsewhere(tasks: Mapping[str, Sequence[Task]]) -> list[tuple[WarmStart, list[Task]]]:
    """Each system's tasks with what was learned on the others."""
    return [
        (learn([t for other in tasks if other != name for t in tasks[other]]), list(held))
        for name, held in tasks.items()
    ]


def play_all(make: Make, tasks: Sequence[Task], sigma: float) -> Played:
    """Every task once with each seed; all tuners get the same noise."""
    return {
        seed: [
            (
                task,
                play(
                    make(task, seed),
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


def compared(parts: Sequence[Part], sigma: float, suffix: str) -> Figures:
    """Figures of all tuners."""
    figures: Figures = {}
    for tuner in parts[0][0]:
        by_name: dict[str, dict[int, list[tuple[Task, EpisodeResult]]]] = {}
        for makes, held in parts:
            found = by_name.setdefault(held[0].system, {seed: [] for seed in SEEDS})
            for seed, played in play_all(makes[tuner], held, sigma).items():
                found[seed] += played
        figures |= summarise(by_name, tuner, suffix)
    return figures


def simulated_figures() -> Figures:
    """Search on every simulated system."""
    tasks = dict(by_system([find_system(name) for name in SYSTEMS]))
    parts = [
        (rivals() | {"ours": from_trees(warm, held)}, held)
        for warm, held in learned_elsewhere(tasks)
    ]
    figures: Figures = {
        "systems": len(tasks),
        "warm_start": "boosted trees (regression, no reinforcement)",
        **counted(tasks, ""),
        "headline_noise_sigma": HEADLINE,
    }
    for sigma in NOISES:
        suffix = "" if sigma == HEADLINE else f"_at_noise_{sigma:g}"
        figures |= compared(parts, sigma, suffix)
        figures |= headlines(figures, suffix)
    return figures | policy_figures(tasks) if FULL else figures


def policy_figures(tasks: Mapping[str, Sequence[Task]]) -> Figures:
    """Our search from policies, and from nothing; and all on what running jobs can set."""
    with tempfile.TemporaryDirectory() as out:
        trained = train_all(Path(out), SEEDS)
    others = beginnings(trained, tasks)
    figures = compared([(others, held) for held in tasks.values()], HEADLINE, "")
    by_call = {name: [running(task) for task in held] for name, held in tasks.items()}
    others = beginnings(trained, by_call)
    parts = [
        (rivals() | {"ours": from_trees(warm, held)} | others, held)
        for warm, held in learned_elsewhere(by_call)
    ]
    figures |= counted(by_call, RUNNING) | compared(parts, HEADLINE, RUNNING)
    return figures | headlines(figures, RUNNING)


def beginnings(trained: Policies, tasks: Mapping[str, Sequence[Task]]) -> dict[str, Make]:
    """Our search from a policy, and from the drawn worlds alone."""
    nothing = {
        (task.name, seed): prior
        for held in tasks.values()
        for task in held
        for prior in [Prior.drawn(task.space, task.call.size_bytes)]
        for seed in SEEDS
    }
    return {"policy": ours(policy_priors(trained, tasks, SEEDS)), "nothing": ours(nothing)}


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
    """The bar: the better of the two starts, each with the repeats that serve it best."""

    def probes(tuner: str) -> float:
        return float(str(figures[f"probes_to_2pct_{tuner}{suffix}"]))

    rival = min(rivals(), key=probes)
    return {
        **{f"probes_ratio_{name}{suffix}": probes(name) / probes("ours") for name in rivals()},
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
