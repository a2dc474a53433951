"""Number and cost of probes of online searches, AutoCCL's and ours.

    python benchmarks/bench_search.py    # FULL=1: all configs, too, half an hour

A task is (system, group, collective, size). What may run is every (algorithm, protocol) of the
system with the channels, threads, chunk sizes and transports below; combinations that come to the
same thing are one: this spares coordinate descent probes that could tell it nothing, and plateaus
to get stuck on. Headline figures are of what a running job can set; with FULL=1 also of threads and
transport, whose figures end in `_everything`.

An episode is a task's first 1,000 calls, with heavy-tailed noise. Coordinate descent begins at what
NCCL's own choice would set, and measures a candidate once, or three times (`x3`). Ours begins with
drawn machines alone.

A *probe* is a call that runs another config than the incumbent of that moment. Probes are counted
to the moment from which on the incumbent is within 2 % of the best by true time for good, on the
tasks where NCCL's own choice is not; an episode that never gets there counts as if it had probed
every config of the task once. What probing costs is the true time by which probes were slower than
the incumbent, over the time of the episode with the incumbents alone; what they were faster by is
not set against it. Means over tasks, systems alike; intervals are Student's t over seeds, 95 %.
Noise: 2 %, since half of the published cells with repeats spread by less than 1.5 %.

Writes out/bench/search.json.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Final

import numpy as np
import numpy.typing as npt
from harness import Figures, student, write_result

from dynamiccl.nccl import ABSTAIN, Collective, Config, Transport
from dynamiccl.serve.search.autoccl import DEFAULT, AutoCcl, Choice, SearchSpace, Tuner
from dynamiccl.serve.search.policy_search import PolicySearch, Prior
from dynamiccl.simulator.system import Call, Group, Launch
from dynamiccl.simulator.systems import SYSTEMS, System, find_system

SEEDS: Final = range(5)
NOISE: Final = 0.02
FULL: Final = bool(os.environ.get("FULL"))
CHANNELS: Final = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CHUNKS: Final = (None, *(1 << k for k in range(15, 23)))
THREADS: Final = (None, 128, 256, 384, 512)
TRANSPORTS: Final = (None, Transport.SHM)
COLLECTIVES: Final = (Collective.AllReduce, Collective.AllGather, Collective.ReduceScatter)
SIZES: Final = tuple(1 << k for k in range(16, 31, 2))
#: Transport, threads, channels, chunk bytes.
_Place = tuple[Transport | None, int | None, int, int | None]


@dataclass(frozen=True)
class Task:
    """One task key with true times."""

    system: str
    call: Call
    space: SearchSpace
    #: (A,) true times, us.
    times_us: npt.NDArray[np.float64]

    @cached_property
    def headroom(self) -> float:
        """Time of NCCL's own choice / best time - 1."""
        return float(self.times_us[self.space.default] / self.times_us.min() - 1.0)


def tasks_of(system: System, groups: Sequence[Group]) -> list[Task]:
    """Every task of a system's groups."""
    known = [c for c in COLLECTIVES if c in system.collectives()]
    calls = [Call(g, c, s) for g, c, s in product(groups, known, SIZES)]
    return [task for call in calls if (task := make_task(system, call)) is not None]


def make_task(system: System, call: Call) -> Task | None:
    """The task of a call; None where there is nothing to choose from."""
    found: dict[Choice, float] = {DEFAULT: system.parts(call, ABSTAIN).quiet_us}
    for algorithm, protocol in system.cells(call.group, call.collective):
        found |= _subspace(system, call, Config(algorithm, protocol))
    if len(found) < 3:
        return None
    ran = Choice(system.resolve(call, ABSTAIN))
    space = SearchSpace(list(found), default_runs=ran)
    return Task(system.name, call, space, np.array(list(found.values())))


def running(task: Task) -> Task:
    """The choices that a running job can make: threads and transport are fixed at start."""
    kept = [
        action
        for action, choice in enumerate(task.space.choices)
        if choice.num_threads is None and choice.transport is None
    ]
    choices = [task.space.choices[action] for action in kept]
    space = SearchSpace(choices, default_runs=task.space.default_runs)
    return replace(task, space=space, times_us=task.times_us[kept])


def _subspace(system: System, call: Call, cell: Config) -> dict[Choice, float]:
    times: dict[_Place, float] = {}
    assert cell.algorithm is not None
    opened = system.max_channels(call.group, cell.algorithm)
    counts = [count for count in CHANNELS if count <= opened]
    launches = (TRANSPORTS, THREADS) if _feels_launch(system, call, cell) else ((None,), (None,))
    for transport, threads, count, chunk in product(*launches, counts, CHUNKS):
        asked = Config(cell.algorithm, cell.protocol, count, chunk)
        ran = system.resolve(call, asked).num_channels
        if ran == count:  # more than are filled is the same again
            parts = system.parts(call, asked, Launch(threads, transport))
            times[transport, threads, count, chunk] = parts.quiet_us
    for axis in (0, 1, 3):
        times = _without_repeats(times, axis)
    return {
        Choice(Config(cell.algorithm, cell.protocol, count, chunk), threads, transport): time_us
        for (transport, threads, count, chunk), time_us in times.items()
    }


def _feels_launch(system: System, call: Call, cell: Config) -> bool:
    launches = [Launch(n, t) for t, n in product(TRANSPORTS, THREADS)]
    return len({system.parts(call, cell, launch).quiet_us for launch in launches}) > 1


def _without_repeats(times: dict[_Place, float], axis: int) -> dict[_Place, float]:
    """Drop values of a knob that equal NCCL's own value."""
    kept = {}
    for place, time_us in times.items():
        alone = times[(*place[:axis], None, *place[axis + 1 :])]  # type: ignore[index]
        if place[axis] is None or not math.isclose(time_us, alone, rel_tol=1e-9):
            kept[place] = time_us
    return kept


def chosen_groups(system: System) -> list[Group]:
    """At most four shapes with as many ranks a node as there are, spread over the node counts."""
    known = list(system.groups())
    most = max(group.ranks_per_node for group in known)
    full = [group for group in known if group.ranks_per_node == most and group.num_ranks > 1]
    picks = np.unique(np.linspace(0, len(full) - 1, 4).round().astype(int))
    return [full[pick] for pick in picks]


CALLS: Final = 1000
WITHIN: Final = 0.02
#: Degrees of freedom of the noise: stragglers (Student's t, as the Trigger agent is tested with).
_TAIL: Final = 3
#: The 0.75 quantile of t3 and of a normal: makes `sigma` the robust one (1.4826 x MAD).
_QUARTILE_T3, _QUARTILE_NORMAL = 0.764892, 0.674490


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """The result of an episode."""

    #: Probes made before the answer is good for ever; None: it was not at the end.
    probes_to: int | None
    probes: int
    slowdown: float
    #: Time of all calls over what NCCL's own choice would have taken.
    total_ratio: float


def noise(sigma: float, calls: int, random: np.random.Generator) -> npt.NDArray[np.float64]:
    """(calls,) factors with heavy tails; `sigma` is the robust one of their logarithm."""
    scale = sigma * _QUARTILE_NORMAL / _QUARTILE_T3
    factors: npt.NDArray[np.float64] = np.exp(scale * random.standard_t(_TAIL, calls))
    return factors


def play(
    tuner: Tuner, times_us: npt.NDArray[np.float64], factors: npt.NDArray[np.float64], default: int
) -> EpisodeResult:
    """Run a new tuner on the calls of one task, which scatter by `factors` (calls,)."""
    key = "task"
    calls = len(factors)
    ran, incumbent = np.zeros((2, calls), dtype=np.int64)
    for call in range(calls):
        incumbent[call] = tuner.best(key)
        ran[call] = action = tuner.ask(key)
        tuner.tell(key, float(times_us[action] * factors[call]))
    took, settled = times_us[ran], times_us[incumbent]
    is_probe = ran != incumbent
    last = tuner.best(key)
    good = np.append(settled, times_us[last]) <= (1.0 + WITHIN) * times_us.min()
    bad = np.flatnonzero(~good)
    since = int(bad[-1]) + 1 if len(bad) else 0
    return EpisodeResult(
        probes_to=int(is_probe[:since].sum()) if since <= calls else None,
        probes=int(is_probe.sum()),
        slowdown=float(np.maximum(took - settled, 0.0)[is_probe].sum() / settled.sum()),
        total_ratio=float(took.sum() / (calls * times_us[default])),
    )


#: What plays a task.
Make = Callable[[Task], Tuner]
#: (task, outcome of it) by seed.
Played = Mapping[int, Sequence[tuple[Task, EpisodeResult]]]
TUNERS: Final[Mapping[str, Make]] = {
    "cd_default": lambda task: AutoCcl(lambda _: task.space),
    "cd_default_x3": lambda task: AutoCcl(lambda _: task.space, repeats=3),
    "ours": lambda task: PolicySearch(
        lambda _: task.space, lambda _: Prior.drawn(task.space, task.call.size_bytes)
    ),
}


def play_all(make: Make, tasks: Sequence[Task]) -> Played:
    """Every task once with each seed; all tuners get the same noise."""

    def play_one(number: int, task: Task, seed: int) -> EpisodeResult:
        factors = noise(NOISE, CALLS, np.random.default_rng((number, seed)))
        return play(make(task), task.times_us, factors, task.space.default)

    return {
        seed: [(task, play_one(number, task, seed)) for number, task in enumerate(tasks)]
        for seed in SEEDS
    }


def mean_where_searched(
    value: Callable[[Task, EpisodeResult], float],
) -> Callable[[Sequence[tuple[Task, EpisodeResult]]], float]:
    """Mean over the tasks with something to gain; nan without one."""

    def mean(played: Sequence[tuple[Task, EpisodeResult]]) -> float:
        found = [value(task, outcome) for task, outcome in played if task.headroom > WITHIN]
        return float(np.mean(found)) if found else math.nan

    return mean


def arrived(task: Task, outcome: EpisodeResult) -> float:
    """Probes to within 2 % for good, or all configs."""
    return len(task.space.actions) if outcome.probes_to is None else outcome.probes_to


def spent(_: Task, outcome: EpisodeResult) -> float:
    """The same with the real number of probes of episodes that never get there."""
    return outcome.probes if outcome.probes_to is None else outcome.probes_to


MEASURES: Final[Mapping[str, Callable[[Sequence[tuple[Task, EpisodeResult]]], float]]] = {
    "probes_to_2pct": mean_where_searched(arrived),
    "spent_until_2pct": mean_where_searched(spent),
    "reached_2pct": mean_where_searched(lambda _, outcome: outcome.probes_to is not None),
    "probing_slowdown": lambda played: float(np.mean([o.slowdown for _, o in played])),
    "total_over_default": lambda played: float(np.mean([o.total_ratio for _, o in played])),
}


def figures_of(tasks: Mapping[str, Sequence[Task]], suffix: str) -> Figures:
    """Figures of all tuners: the mean of the systems, with an interval over seeds."""
    everything = [task for held in tasks.values() for task in held]
    figures: Figures = {
        f"tasks{suffix}": len(everything),
        f"tasks_to_search{suffix}": sum(task.headroom > WITHIN for task in everything),
        f"configs_per_task_mean{suffix}": float(
            np.mean([len(task.space.actions) for task in everything])
        ),
    }
    for tuner, make in TUNERS.items():
        by_name = {name: play_all(make, held) for name, held in tasks.items()}
        for measure, of in MEASURES.items():
            name = f"{measure}_{tuner}{suffix}"
            table = np.array([[of(played[seed]) for seed in SEEDS] for played in by_name.values()])
            means = table.mean(axis=1)
            # A system where NCCL's own choice is never worse than 2 % has nothing to find.
            figures |= student(table[~np.isnan(means)].mean(axis=0).tolist(), name)
            figures |= {
                f"{name}_{system}": None if math.isnan(mean) else float(mean)
                for system, mean in zip(by_name, means, strict=True)
            }
    return figures


def main() -> None:
    """Search on every simulated system."""
    systems = [find_system(name) for name in SYSTEMS]
    tasks = {system.name: tasks_of(system, chosen_groups(system)) for system in systems}
    by_call = {name: [running(task) for task in held] for name, held in tasks.items()}
    figures: Figures = {"systems": len(tasks), "noise_sigma": NOISE, **figures_of(by_call, "")}
    write_result("search", figures | (figures_of(tasks, "_everything") if FULL else {}))


if __name__ == "__main__":
    main()
