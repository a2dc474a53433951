"""AutoCCL's experiments (Xu et al., NSDI 2025), in simulation: how much, how soon, at what cost.

    python benchmarks/bench_autoccl.py [PART]...  # all: 3 seeds, ten minutes; FULL=1: 10 seeds

`micro` (section 5): AllGather, ReduceScatter and AllReduce of 4 KiB to 1 GiB, each task's first
1,000 calls, in groups of the five systems, in quiet and beside matrix products that take 39 % of
the bandwidth: what moves bytes lasts 1 / 0.61 as long. `knobs`: what the fastest choice saves with
knobs added one by one, and SHM against P2P. `jobs`: iterations of Phi-2, Llama-3.1 and a job like
VGG-19, one candidate each (AutoCCL's rhythm), or one in 10 s (`_10s`: ours, three calls or more of
each). Settled: an iteration under the incumbents stays within 1 % of what it is at last. `leader`:
CPU time of a job of the tests' harness (bench_plugin.py): on a quiet machine.

`autoccl` is coordinate descent from NCCL's own choice; `ours` begins with the drawn machines alone;
`priced`: channels cost 0.3 % each. With as many calls of a task as `autoccl` took: `afnfa` (Sensors
2023), the best by a random forest of random configs in quiet, one forest a system or job;
`afnfa_beside`, the same where it plays, if it beats NCCL's choice in medians of three; `random`,
the fastest of those; `by_hand`, one config of each algorithm and protocol in turn. `probes_to`:
until the incumbent is within 2 % of the fastest for good; who never arrives counts as many as there
are configs. `cost`: by how much probes were slower than incumbents. Noise of 2 %, t3 tails.
Speed-ups are geometric means; intervals are over systems (jobs: places).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from bench_job_time import QUIET, lasted_us
from bench_plugin import measure_leader
from harness import FULL, Figures, run_parts, student
from sklearn.ensemble import RandomForestRegressor

from dynamiccl.nccl import ABSTAIN, Collective, Config, Transport
from dynamiccl.serve.search.autoccl import DEFAULT, AutoCcl, Choice, SearchSpace, Tuner
from dynamiccl.serve.search.policy_search import PolicySearch, Prior
from dynamiccl.simulator.system import Call, Group, Launch, Surroundings
from dynamiccl.simulator.systems import SYSTEMS, System, find_system
from dynamiccl.simulator.workloads import Workload, make_workload
from dynamiccl.simulator.world import T3_ROBUST_SIGMA, World

SEEDS: Final = range(10 if FULL else 3)
NOISE, WITHIN, CALLS, SM_PRICE = 0.02, 0.02, 1000, 0.003
PRODUCTS: Final = Surroundings(intra=1.0 / 0.61, inter=1.0 / 0.61)
CHANNELS: Final = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CHUNKS: Final = (None, *(1 << k for k in range(15, 23)))
LAUNCHES: Final = (None, Transport.SHM), (None, 128, 256, 384, 512)
COLLECTIVES: Final = (Collective.AllReduce, Collective.AllGather, Collective.ReduceScatter)
SIZES: Final = tuple(1 << k for k in range(12, 31, 2))
LOGS: Final = {"speedup", "end", "whole", *(collective.wire for collective in COLLECTIVES)}
PLACES = [(name, Group(1, 8)) for name in ("h100-ib", "a100-nvswitch", "b300-nvlink")]
PLACES += [("h100-ib", Group(4, 8)), ("gb10-roce", Group(4, 1)), ("rtx5090-sockets", Group(2, 1))]
#: The most calls that a step tells of (a window of the leader's), and our settings in a job.
WINDOW, INTERVAL_US, IN_JOB = 8, 10e6, {"watch_calls": 3, "rest_calls": 0}
Array = npt.NDArray[np.float64]
Rows = dict[str, dict[str, list[float]]]


@dataclass(frozen=True, slots=True)
class Task:
    """One task key, with the true times of its choices (A,); `priced` with SM_PRICE."""

    call: Call
    space: SearchSpace
    quiet: Array
    products: Array
    priced: Array


def make_task(system: System, call: Call, *, launch: bool = False) -> Task:
    """The task of a call."""
    found = {DEFAULT: system.parts(call, ABSTAIN)}
    for algorithm, protocol in system.cells(call.group, call.collective):
        counts = [n for n in CHANNELS if n <= system.max_channels(call.group, algorithm)]
        parts: dict[Any, Any] = {}
        for way, threads, n, c in product(*(LAUNCHES if launch else [(None,)] * 2), counts, CHUNKS):
            asked = Config(algorithm, protocol, n, c)
            if system.resolve(call, asked).num_channels == n:  # more are not filled
                parts[way, threads, n, c] = system.parts(call, asked, Launch(threads, way))
        for axis in (0, 1, 3):  # what comes to NCCL's own value is that
            own = {at: parts[(*at[:axis], None, *at[axis + 1 :])].quiet_us for at in parts}
            same = {at for at in parts if math.isclose(parts[at].quiet_us, own[at], rel_tol=1e-9)}
            parts = {at: of for at, of in parts.items() if at[axis] is None or at not in same}
        for (way, threads, n, c), of in parts.items():
            found[Choice(Config(algorithm, protocol, n, c), threads, way)] = of
    space = SearchSpace([*found], default_runs=Choice(system.resolve(call, ABSTAIN)))
    quiet, products = np.array([[of.quiet_us, of.time_us(PRODUCTS)] for of in found.values()]).T
    channels = np.array([of.num_channels for of in found.values()])
    return Task(call, space, quiet, products, quiet * (1.0 + SM_PRICE * channels))


@cache
def make_tasks(name: str, *, launch: bool = False) -> list[Task]:
    """Every task of a system, in at most four of its groups with all ranks of a node."""
    system = find_system(name)
    most = max(group.ranks_per_node for group in system.groups())
    full = [g for g in system.groups() if g.ranks_per_node == most and g.num_ranks > 1]
    picks = np.unique(np.linspace(0, len(full) - 1, 4).round().astype(int)).tolist()
    calls = product([full[pick] for pick in picks], COLLECTIVES, SIZES)
    return [make_task(system, Call(*asked), launch=launch) for asked in calls]


def noisy(us: Any, random: np.random.Generator, count: int | None = None) -> Any:
    """Times with heavy tails, one of each or `count`."""
    return us * np.exp(NOISE / T3_ROBUST_SIGMA * random.standard_t(3, count or np.shape(us)))


def play(tuner: Tuner, us: Array, seed: Sequence[int], told: int = 1) -> tuple[Any, Any]:
    """What ran in each of CALLS steps of `told` calls, and the incumbents; the last after them."""
    random, ran, incumbent = np.random.default_rng(seed), [], []
    for _ in range(CALLS):
        incumbent.append(tuner.best(0))
        ran.append(tuner.ask(0))
        for time_us in noisy(us[ran[-1]], random, told):
            tuner.tell(0, float(time_us), ran[-1])
    return np.array(ran), np.array([*incumbent, tuner.best(0)])


def searches(task: Task, repeats: int = 1, **ours: int) -> dict[str, Tuner]:
    """The searches of one task."""
    drawn = Prior.drawn(task.space, task.call.size_bytes)
    shifted = replace(drawn, mean=drawn.mean + np.log(task.priced / task.quiet))
    return {
        "autoccl": AutoCcl(lambda _: task.space, repeats=repeats),
        "ours": PolicySearch(lambda _: task.space, lambda _: drawn, **ours),
        "priced": PolicySearch(lambda _: task.space, lambda _: shifted, **ours),
    }


def features(task: Task) -> Array:
    """(A, F) what a forest sees of each choice."""
    group, rows = task.call.group, []
    for choice in task.space.choices:
        config, is_shm = choice.config, choice.transport is not None
        names = [config.algorithm, config.protocol, task.call.collective]
        knobs = (config.num_channels, choice.num_threads, config.chunk_bytes, task.call.size_bytes)
        codes = [-1 if name is None else int(name) for name in names]
        logs = [math.log2(knob) if knob else -1.0 for knob in knobs]
        rows.append([*codes, *logs, is_shm, group.num_nodes, group.ranks_per_node])
    return np.array(rows, dtype=np.float64)


def play_rivals(tasks: Sequence[Task], us: str, budgets: Sequence[int], seed: int) -> Any:
    """Actions of AFNFA and the like by task, after `budgets` calls of each."""
    random, told = np.random.default_rng((seed, 17)), [features(task) for task in tasks]
    counts = [min(budget, len(task.quiet)) for task, budget in zip(tasks, budgets, strict=True)]
    drawn = [random.choice(len(x), n, replace=False) for x, n in zip(told, counts, strict=True)]
    found: dict[str, Any] = {"by_hand": []}
    for name, where in (("afnfa", "quiet"), ("afnfa_beside", us)):
        seen = [noisy(getattr(t, where)[d], random) for t, d in zip(tasks, drawn, strict=True)]
        forest = RandomForestRegressor(100, random_state=seed)
        picked = [rows[d] for rows, d in zip(told, drawn, strict=True)]
        forest.fit(np.concatenate(picked), np.log(np.concatenate(seen)))
        found[name] = [int(forest.predict(rows).argmin()) for rows in told]
        found["random"] = [int(d[s.argmin()]) for d, s in zip(drawn, seen, strict=True)]

    def fastest(times: Array, actions: Sequence[int], calls: int) -> int:
        return min(actions, key=lambda a: np.median(noisy(times[a], random, max(calls, 1))))

    for number, (task, budget) in enumerate(zip(tasks, budgets, strict=True)):
        times, space, checked = getattr(task, us), task.space, found["afnfa_beside"]
        checked[number] = fastest(times, [space.default, checked[number]], 3)
        cells = [space.default, *map(space.start, range(len(space.subspaces)))]
        found["by_hand"].append(fastest(times, cells, budget // len(cells)))
    return found


def measures(task: Task, us: Array, ran: Any, incumbent: Any) -> dict[str, Any]:
    """Of one episode, by name."""
    took, settled, own_us, best_us = us[ran], us[incumbent], us[task.space.default], us.min()
    is_probe = ran != incumbent[:-1]
    cost = np.maximum(took - settled[:-1], 0.0)[is_probe].sum() / settled[:-1].sum()
    row = {"cost": cost, "probes": is_probe.sum()}
    if own_us > (1.0 + WITHIN) * best_us:
        since = max(np.flatnonzero(settled > (1.0 + WITHIN) * best_us)) + 1
        arrives = since <= len(took)
        row |= {"arrive": arrives, "probes_to": is_probe[:since].sum() if arrives else len(us)}
    return row


def add(rows: Rows, player: str, **found: Any) -> None:
    """One more replicate of a player's measures."""
    for kind, value in found.items():
        rows[player][kind].append(float(value))


def play_system(tasks: Sequence[Task], us: str) -> Rows:
    """By player: its measures, and log speed-ups by kind of task, of all tasks and seeds."""
    rows: Rows = defaultdict(lambda: defaultdict(list))

    def end(player: str, task: Task, action: int, **row: Any) -> None:
        of = getattr(task, us)
        gain = math.log(of[task.space.default] / of[action])
        add(rows, player, **{"speedup": gain, task.call.collective.wire: gain}, **row)

    for seed in SEEDS:
        budgets = []
        for number, task in enumerate(tasks):
            for player, tuner in [*searches(task).items()][:2]:
                episode = play(tuner, getattr(task, us), (number, seed))
                row = measures(task, getattr(task, us), *episode)
                end(player, task, episode[1][-1], **row)
                budgets += [int(row["probes"])] if player == "autoccl" else []
            end("oracle", task, int(getattr(task, us).argmin()))
        for player, actions in play_rivals(tasks, us, budgets, seed).items():
            for task, action in zip(tasks, actions, strict=True):
                end(player, task, action)
    return rows


def over(values: Sequence[Any], name: str, *, logs: bool = True) -> Figures:
    """The mean of means; of logarithms as a factor."""
    found = student([float(np.mean(each)) for each in values if len(each)], name)
    return {k: None if v is None else math.exp(v) if logs else v for k, v in found.items()}


def summary(played: Sequence[Rows], head: str) -> Figures:
    """All measures of all players."""
    figures: Figures = {}
    for player, kind in [(player, kind) for player, of in played[0].items() for kind in of]:
        key, values = f"{head}_{player}_{kind}", [rows[player][kind] for rows in played]
        figures |= over(values, key, logs=kind in LOGS)
    return figures


def micro() -> Figures:
    """What searches and rivals find for single tasks."""
    figures: Figures = {"micro_seeds": len(SEEDS)}
    for us in ("quiet", "products"):
        played = [play_system(make_tasks(name), us) for name in SYSTEMS]
        figures |= summary(played, head := f"micro_{us}")
        for player, rival in product(("ours", "autoccl"), ("afnfa", "afnfa_beside")):
            of = [np.subtract(rows[player]["speedup"], rows[rival]["speedup"]) for rows in played]
            figures |= over(of, f"{head}_{player}_over_{rival}")
    return figures


def iteration(system: System, work: Workload) -> tuple[list[Task], list[int], list[Array]]:
    """A job's tasks, their calls an iteration, and how long one with them lasts by choice (A,)."""
    calls = Counter(work.calls)
    tasks = [make_task(system, Call(c.group, c.collective, c.size_bytes)) for c in calls]
    configs = [*dict.fromkeys(c.config for task in tasks for c in task.space.choices)]
    world = World(system, Workload(work.name, (*calls,)), configs, QUIET)
    lasted = lasted_us(world, world.mask)
    asked = [[configs.index(c.config) for c in task.space.choices] for task in tasks]
    return tasks, [*calls.values()], [each[at] for each, at in zip(lasted, asked, strict=True)]


def play_job(system: System, work: Workload) -> Rows:
    """By player: log speed-up at the end and over all steps, and when it settled."""
    tasks, counts, lasts = iteration(system, work)
    rows: Rows = defaultdict(lambda: defaultdict(list))

    def step_us(actions: Sequence[Any]) -> Any:
        each = zip(counts, lasts, actions, strict=True)
        return np.sum([n * lasted[action] for n, lasted, action in each], axis=0)

    own_us = step_us([task.space.default for task in tasks])
    add(rows, "oracle", end=np.log(own_us / step_us([t.quiet.argmin() for t in tasks])))
    add(rows, "oracle_step", end=np.log(own_us / step_us([last.argmin() for last in lasts])))
    for seed, rhythm in product(SEEDS, ("", "_10s")):
        found: dict[str, list[Any]] = defaultdict(list)
        per_step = max(INTERVAL_US / own_us, 1.0) if rhythm else 1.0
        told = [min(WINDOW, round(n * per_step)) for n in counts]
        for key, (task, calls) in enumerate(zip(tasks, told, strict=True)):
            for player, tuner in searches(task, 3 if rhythm else calls, **IN_JOB).items():
                times = task.priced if player == "priced" else task.quiet
                found[player].append(play(tuner, times, (key, seed), calls))
        for player, episodes in found.items():
            took, settled = (step_us(part) for part in zip(*episodes, strict=True))
            since = max(np.flatnonzero(abs(settled / settled[-1] - 1) > 0.01), default=-1) + 1
            spent_us = since * INTERVAL_US if rhythm else took[:since].sum()
            end, whole = np.log(own_us / settled[-1]), np.log(own_us / np.mean(took))
            add(rows, player + rhythm, end=end, whole=whole, settled_s=spent_us / 1e6)
        if not rhythm:
            probed = [int((ran != best[:-1]).sum()) for ran, best in found["autoccl"]]
            budgets = [n * calls for n, calls in zip(probed, told, strict=True)]
            for player, actions in play_rivals(tasks, "quiet", budgets, seed).items():
                add(rows, player, end=np.log(own_us / step_us(actions)))
    return rows


def jobs() -> Figures:
    """Whole iterations of jobs; `all` are the three."""
    figures: Figures = {"jobs_seeds": len(SEEDS), "jobs_places": len(PLACES)}
    of_all: dict[str, list[Rows]] = {"all": []}
    for work in ("phi-2", "llama-3", "vgg-19"):
        of_all[work] = [play_job(find_system(n), make_workload([work], g)) for n, g in PLACES]
        of_all["all"] += of_all[work]
    for work, played in of_all.items():
        apart = [np.subtract(rows["priced"]["end"], rows["ours"]["end"]) for rows in played]
        figures |= summary(played, f"jobs_{work}") | over(apart, f"jobs_{work}_priced_over_ours")
    return figures


def knobs() -> Figures:
    """What the fastest saves of the choices that set no further knobs; SHM against P2P."""
    names = ("cell", "channels", "chunk", "threads", "transport", "shm")
    logs: Any = {knob: {name: [] for name in SYSTEMS} for knob in names}
    for name, task in ((n, task) for n in SYSTEMS for task in make_tasks(n, launch=True)):
        times, space = task.quiet, task.space
        cells = [space.default, *map(space.start, range(len(space.subspaces)))]
        sets = [(c.transport, c.num_threads, c.config.chunk_bytes) for c in space.choices]
        for level, knob in enumerate(names[:-1]):
            may = [not any(each[: 4 - level]) for each in sets] if level else cells
            logs[knob][name].append(math.log(times[space.default] / times[may].min()))
        if any(is_shm := np.array([each[0] is Transport.SHM for each in sets])):
            logs["shm"][name].append(math.log(times[~is_shm].min() / times[is_shm].min()))
    figures: Figures = {
        "knobs_shm_best": math.exp(max(map(max, filter(None, logs["shm"].values()))))
    }
    for knob, of in logs.items():
        figures |= over([*of.values()], f"knobs_{knob}")
        figures |= {f"knobs_{knob}_{n}": math.exp(np.mean(each)) for n, each in of.items() if each}
    return figures


PARTS: Final = {"micro": micro, "knobs": knobs, "jobs": jobs, "leader": measure_leader}


if __name__ == "__main__":
    run_parts("autoccl", PARTS)
