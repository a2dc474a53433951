"""What Pensieve (Mao et al., SIGCOMM 2017) and the proposal after it promise, in simulation.

    python benchmarks/bench_pensieve.py [PART]...     # five minutes on 2 cores; FULL=1: more seeds

Jobs play in PLACES; every 28 ms all task keys get a decision, in force 28 ms later. A *learned*
policy is a network over the last calls of a key: surroundings do not depend on what is chosen, so
the simulator tells it what every config would have taken (Q-learning, gamma 0). Gains are shares of
NCCL's communication time without connecting. Intervals are over seeds, machines, or sizes.

* history: 0 to 16 past calls (section 5.4, figure 14), at the scenario's noise of a call (3 %) and
  at ten times that; and how many seeds would tell two lengths apart.
* rivals: robust MPC over the belief (section 2; Yin et al. 2015), MPC, a threshold rule, an oracle
  as late; rules are set on other seeds. At b300 up to 100 ms late, too (5.5).
* weights: lambda_switch and lambda_cong of the proposal's reward, by search on other seeds.
* machines: a machine's table on another, after 0 to 40 probes, against a whole sweep of that other
  (section 5.3); and the simulator's choices on published repeats.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from harness import FULL, Figures, parallel, run_parts, student
from judge_worlds import DISTINCT
from learning_belief import mean_of, with_interval
from learning_sweeps import cells, on_repeats, public_tables, transferred
from torch import nn

from dynamiccl.belief import Belief, prior_of
from dynamiccl.drawn_worlds import Grid
from dynamiccl.nccl import Algorithm, Protocol
from dynamiccl.simulator.record_jobs import all_configs
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import make_workload
from dynamiccl.simulator.world import World
from dynamiccl.train.environment import delay_calls

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SEEDS: Final = 20 if FULL else 5
#: System, shape, workloads, scenario, and the link that the scenario slows.
PLACES: Final = {
    "b300": ("b300-nvlink", Group(1, 8), ("decode", "lora"), "busy-host", "host"),
    "a100": ("a100-nvswitch", Group(1, 8), ("decode", "lora"), "shared-node", "intra"),
    "h100": ("h100-ib", Group(4, 8), ("decode",), "congested", "inter"),
}
LINKS: Final = ("intra", "inter", "host")
LENGTHS: Final = (0, 1, 2, 4, 8, 16)
MOST: Final = LENGTHS[-1]
NOISES: Final = (0.03, 0.3)
JOBS: Final = 64
ROUNDS: Final = 40
PILOT: Final = 10_000  # a seed for settings; no figure is of it
LATENCIES_MS: Final = (0.0, 1.0, 10.0, 28.0, 100.0)


@cache
def world_of(place: str, noise: float = NOISES[0]) -> World:
    """The world of a place, its calls scattered by `noise`."""
    name, shape, workloads, scenario, _ = PLACES[place]
    system, work = find_system(name), make_workload(workloads, shape)
    found = find_scenario(scenario)
    changed = {"jitter": found.jitter.model_copy(update={"sigma": noise}), "first_use_us": 0.0}
    return World(system, work, all_configs(system, work), found.model_copy(update=changed))


@dataclass
class View:
    """What is known before a decision: N jobs, K keys, A configs, the last MOST calls of a key."""

    world: World
    times: Floats  # (N, K, MOST) us, the latest last; NaN before the first
    ran: Ints  # (N, K, MOST)
    in_force: Ints  # (N, K)
    truth: Floats  # (N, K, A) us of all configs in the last round; NaN without a call
    calls: Ints  # (N, K) of the last round


Choose = Callable[[View], Ints]


def play(world: World, choose: Choose, seed: int, latency_ms: float = 28.0) -> Any:
    """The share of NCCL's own time that is saved, and all views."""
    run, period, job = world.jobs(JOBS, seed), delay_calls(world), np.arange(JOBS)
    delay = 0 if not latency_ms else delay_calls(world, 1e3 * latency_ms)
    shape = JOBS, len(world.keys)
    in_force, waiting = np.zeros(shape, dtype=np.int64), deque[tuple[int, Ints]]()
    times, ran = np.full((*shape, MOST), np.nan), np.zeros((*shape, MOST), dtype=np.int64)
    truth, calls = np.full((*shape, len(world.configs)), np.nan), np.zeros(shape, dtype=np.int64)
    total, usual, views = 0.0, 0.0, list[View]()
    for call in range(ROUNDS * period):
        if call % period == 0:
            truth = np.where(calls[..., None] > 0, truth / np.maximum(calls, 1)[..., None], np.nan)
            views.append(View(world, times.copy(), ran.copy(), in_force.copy(), truth, calls))
            waiting.append((call + delay, choose(views[-1])))
            truth, calls = np.zeros_like(truth), np.zeros_like(calls)
        while waiting and waiting[0][0] <= call:
            in_force = waiting.popleft()[1]
        key, us = run.key, run.oracle_us()
        done = run.step(in_force[job, key])
        truth[job, key] += us
        calls[job, key] += 1
        for kept, new in ((times, done.measured_us), (ran, done.action)):
            kept[job, key, :-1] = kept[job, key, 1:]
            kept[job, key, -1] = new
        total, usual = total + done.true_us.sum(), usual + us[:, 0].sum()
    return 1.0 - total / usual, views


def oracle(view: View) -> Ints:
    """What was fastest in the last round, which it saw; a key without calls keeps its config."""
    known = np.where(np.isnan(view.truth), np.inf, view.truth)
    return np.where(view.calls > 0, known.argmin(axis=2), view.in_force)


def seen(view: View, length: int) -> torch.Tensor:
    """(N, K, F): times and configs of the last `length` calls of a key, and the key."""
    keys, count = view.world.mask.shape
    known = ~np.isnan(view.times) & (np.arange(MOST) >= MOST - length)
    default_us = view.world.quiet_us[:, :1]
    slow = np.where(known, np.log(np.where(known, view.times, 1.0) / default_us), 0.0)
    ran = (view.ran[..., None] == np.arange(count)) & known[..., None]
    of_key = np.broadcast_to(np.eye(keys), (len(slow), keys, keys))
    rows = np.concatenate([slow, ran.reshape(*slow.shape[:2], -1), of_key], axis=2)
    return torch.from_numpy(rows.astype(np.float32))


def learn(world: World, length: int, seed: int, switch: float = 0.0, cong: float = 0.0) -> Choose:
    """A policy over the last `length` calls, under lambda_switch and lambda_cong."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    quiet, masks = np.where(world.mask, world.quiet_us, np.inf), torch.from_numpy(world.mask)
    features, costs = list[torch.Tensor](), list[torch.Tensor]()
    net, scale, strays = nn.Sequential(), (torch.zeros(1), torch.ones(1)), 1.0

    def value(x: torch.Tensor) -> torch.Tensor:
        keys = x[..., -len(world.keys) :].argmax(dim=-1)
        return torch.where(masks[keys], net((x - scale[0]) / scale[1]), 1e9)

    def choose(view: View) -> Ints:
        with torch.no_grad():
            return value(seen(view, length)).argmin(dim=-1).numpy()

    def explore(view: View) -> Ints:
        drawn = torch.multinomial(masks.float(), JOBS, replacement=True).T.numpy()
        return np.where(torch.rand(drawn.shape).numpy() < strays, drawn, choose(view) if net else 0)

    for episode in range(3):
        _, views = play(world, explore, 1000 * (seed + 1) + episode)
        # Decided at one view, in force in the next round, whose times the view after has.
        for before, now, after in zip(views, views[1:], views[2:], strict=False):
            slow = np.maximum(after.truth - quiet, 0.0)
            changed = np.arange(len(world.configs)) != now.in_force[..., None]
            cost = (after.truth + cong * slow) / quiet[:, :1] + switch * changed
            cost = np.nan_to_num(cost - cost[..., :1])
            told = torch.from_numpy(after.calls > 0)
            features.append(seen(before, length)[told])
            costs.append(torch.from_numpy(cost.astype(np.float32))[told])
        x, wanted = torch.cat(features), torch.cat(costs)
        if not net:
            strays, scale = 0.2, (x.mean(dim=0), x.std(dim=0).clamp(min=0.05))
            net = nn.Sequential(nn.Linear(x.size(1), 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
            net.append(nn.Linear(64, len(world.configs)))
            optimizer = torch.optim.Adam(net.parameters(), 2e-3)
        for _ in range(150):
            at = torch.randint(len(x), (512,))
            loss = nn.functional.smooth_l1_loss(net((x[at] - scale[0]) / scale[1]), wanted[at])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return choose


def believed(world: World, on: str, seed: int) -> list[Floats]:
    """(K, A) us, a spread above what the belief expects: in quiet, and a link 1.5 times as slow."""
    random, keys, found = np.random.default_rng(seed), world.keys, []
    order = sorted(range(len(keys)), key=lambda k: keys[k].size_bytes)
    for slowdown in (1.0, 1.5):
        links = {name: np.full(len(keys), slowdown if name == on else 1.0) for name in LINKS}
        true = np.log(world.times_us(np.arange(len(keys)), **links))[..., None]
        log_us = true + 0.02 * random.standard_normal((*world.mask.shape, 3))
        us = np.full(world.mask.shape, np.inf)
        for what in {(call.collective, call.group) for call in keys}:
            at = [k for k in order if (keys[k].collective, keys[k].group) == what]
            own = [(Algorithm(world.algorithm[k, 0]), Protocol(world.protocol[k, 0])) for k in at]
            sizes = tuple(float(np.log2(keys[k].size_bytes)) for k in at)
            grid, mask = Grid(sizes, world.configs, tuple(own)), world.mask[at]
            belief = Belief(prior_of(grid), *cells(grid, log_us[at]), allowed=mask)
            doubt = belief.spread * (np.arange(mask.shape[1]) > 0)
            expected = np.exp(log_us[at, :1].mean(axis=2) - belief.gain + doubt)
            us[at] = np.where(mask, expected, np.inf)
        found.append(us)
    return found


def rule(tables: Sequence[Floats], threshold: float, hold: int) -> Choose:
    """What is best at 1.5 times while a key's last 7 calls are slow, and `hold` rounds more."""
    best, slow_at, rounds = [table.argmin(axis=1) for table in tables], np.array(-1e9), 0

    def choose(view: View) -> Ints:
        nonlocal slow_at, rounds
        rounds += 1
        key = np.arange(len(best[0]))[:, None]
        last = (view.times / tables[0][key, view.ran])[..., -7:]
        is_slow = np.median(np.nan_to_num(last, nan=1.0), axis=2) > 1.0 + threshold
        slow_at = np.where(is_slow, rounds, slow_at)
        return np.asarray(np.where(rounds - slow_at <= hold, best[1], best[0]))

    return choose


def mpc(world: World, tables: Sequence[Floats], forget: float, *, robust: bool) -> Choose:
    """The least time of the next five rounds, at the mean level of the last five calls.

    Robust: higher by the largest of five errors. A level that no config feels fades by a factor.
    """
    quiet, errors = tables[0], deque[Floats](maxlen=5)
    with np.errstate(invalid="ignore"):
        share = np.nan_to_num(np.maximum(tables[1] / quiet - 1.0, 0.0) / 0.5)
    level, key = np.zeros(()), np.arange(len(quiet))[:, None]

    def choose(view: View) -> Ints:
        nonlocal level
        ran, felt = view.ran[..., -5:], share[key, view.ran[..., -5:]]
        slow = np.nan_to_num(view.times[..., -5:] / quiet[key, ran] - 1.0)
        weight = felt * (felt > 0.3)
        total = (weight**2).sum(axis=(1, 2))
        told = np.maximum((weight * slow).sum(axis=(1, 2)) / np.maximum(total, 1e-9), 0.0)
        before, level = level, np.where(total > 0.0, told, forget * level)
        errors.append(np.abs(before - level) / (1.0 + level) * (total > 0.0))
        ahead = (1.0 + level) * (1.0 + robust * np.max(errors, axis=0)) - 1.0
        us = quiet * (1.0 + share * ahead[:, None, None])
        changes = np.arange(quiet.shape[1]) != view.in_force[..., None]
        calls = 5.0 * np.maximum(view.calls, 1)[..., None]
        return np.asarray((calls * us + world.scenario.switch_us * changes).argmin(axis=2))

    return choose


@cache
def settings_of(place: str) -> tuple[dict[str, Any], float]:
    """The rule's and the MPC's settings, the best on other seeds."""
    world, tables = world_of(place), believed(world_of(place), PLACES[place][4], PILOT)
    rules: list[Any] = [{"threshold": t, "hold": h} for t in (0.15, 0.3) for h in (0, 10, 50)]
    best = max(rules, key=lambda each: play(world, rule(tables, **each), PILOT)[0])
    fades = {f: play(world, mpc(world, tables, f, robust=True), PILOT)[0] for f in (0.9, 0.98)}
    return best, max(fades, key=lambda each: fades[each])


def rival_rows(place: str, seed: int, latencies_ms: Sequence[float]) -> dict[str, Any]:
    """The gain of each player, by latency."""
    world, tables = world_of(place), believed(world_of(place), PLACES[place][4], seed)
    of_rule, forget = settings_of(place)
    learned = learn(world, 8, seed)
    makers: dict[str, Callable[[], Choose]] = {
        "rule": lambda: rule(tables, **of_rule),
        "mpc": lambda: mpc(world, tables, forget, robust=False),
        "robust_mpc": lambda: mpc(world, tables, forget, robust=True),
        "learned": lambda: learned,
        "oracle": lambda: oracle,
    }
    return {
        name: {each: play(world, make(), seed, each)[0] for each in latencies_ms}
        for name, make in makers.items()
    }


def trained(place: str, seed: int, noise: float, length: int, *weights: float) -> float:
    """A learned policy's gain."""
    world = world_of(place, noise)
    return float(play(world, learn(world, length, seed, *weights), seed)[0])


def history() -> Figures:
    """Gains by length and noise, and the seeds that tell lengths apart (80 % of the time)."""
    jobs = [("b300", s, z, n) for z in NOISES for n in LENGTHS for s in range(SEEDS)]
    found, figures = dict(parallel(trained, jobs)), Figures(seeds=SEEDS)
    for noise in NOISES:
        of = {n: [found["b300", s, noise, n] for s in range(SEEDS)] for n in LENGTHS}
        before = f"history_{100 * noise:.0f}"
        for length, gains in of.items():
            figures |= student(gains, f"{before}_{length}")
        for less, more in ((1, 8), (4, 8), (8, 16)):
            name, apart = f"{before}_{more}_over_{less}", np.subtract(of[more], of[less])
            figures |= student(apart.tolist(), name)
            needed = (1.96 + 0.84) ** 2 * apart.var(ddof=1) / (apart.mean() ** 2 + 1e-12)
            figures[f"{name}_seeds"] = float(np.ceil(needed))
    return figures


def rivals() -> Figures:
    """Gains of all players in all places, and at one of them the time that latency costs."""
    jobs = [(p, s, LATENCIES_MS if p == "b300" else (28.0,)) for p in PLACES for s in range(SEEDS)]
    found, figures = {job[:2]: each for job, each in parallel(rival_rows, jobs)}, Figures()
    for place, name in product(PLACES, found["b300", 0]):
        told = [found[place, s][name] for s in range(SEEDS)]
        figures |= student([each[28.0] for each in told], f"rivals_{place}_{name}")
        for ms in LATENCIES_MS[1:] if place == "b300" else ():
            more = [(1.0 - each[ms]) / (1.0 - each[0.0]) - 1.0 for each in told]
            figures |= student(more, f"latency_{name}_{ms:.0f}")
    return figures


def weights() -> Figures:
    """The weights that gain most on another seed, and what they gain over none."""
    pairs = [(0.0, 0.0), (0.05, 0.0), (0.5, 0.0), (0.0, 0.5), (0.05, 0.5)]
    jobs: list[Any] = [(p, PILOT, NOISES[0], 8, *w) for p in PLACES for w in pairs]
    tried, figures = dict(parallel(trained, jobs)), Figures(weights_seeds=SEEDS)
    for place in PLACES:
        best = max((tried[place, PILOT, NOISES[0], 8, *w], w) for w in pairs)[1]
        figures |= {f"weights_{place}_switch": best[0], f"weights_{place}_cong": best[1]}
        jobs = [(place, s, NOISES[0], 8, *w) for w in (pairs[0], best) for s in range(SEEDS)]
        found = dict(parallel(trained, list(dict.fromkeys(jobs))))
        without, chosen = np.array([found[job] for job in jobs]).reshape(2, SEEDS)
        figures |= student((chosen - without).tolist(), f"weights_{place}_more")
    return figures


def machines() -> Figures:
    """A table from another machine, and the simulator's where repeats were published."""
    ways = (("a100-nvswitch", "b300-nvlink"), ("b300-nvlink", "a100-nvswitch"))
    jobs = [(*way, each, seed) for way in ways for each in DISTINCT for seed in range(SEEDS)]
    rows = {"transfer": [row for _, row in sorted(parallel(transferred, jobs), key=str)]}
    tables = [table for table in public_tables() if " rtx5090-sockets-2x1 " in table.name]
    rows["measured"] = [row for table in tables for row in on_repeats(table, "rtx5090-sockets")]
    figures = Figures({f"{part}_rows": len(found) for part, found in rows.items()})
    for part, name in [(part, name) for part, found in rows.items() for name in (*found, {})[0]]:
        figures |= with_interval(f"{part}_{name}", rows[part], mean_of(name))
    return figures


if __name__ == "__main__":
    run_parts("pensieve", {part.__name__: part for part in (history, rivals, weights, machines)})
