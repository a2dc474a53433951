"""Job time under rules that choose configs call by call, with slack, and by the time of the step.

    python benchmarks/bench_job_time.py         # two minutes

Truth is the simulator's law (system.py) on four systems: ddp, fsdp, phi-2 and llama-3 overlap
(16 cases), megatron, moe and decode mostly wait (12). Worlds: `held`, blocks wait for their peers
as long as was fitted; `held_0`, not at all; both again with AllGather's channels `kept` at NCCL's
own (2.29 and 2.30 drop them); `waves`, compute loses whole waves of tiles; `memory`, compute loses
bandwidth and no multiprocessors. Nobody may raise channels above NCCL's own, as from 2.31 on.

Rules read one sweep (three repeats of every config *alone*, 2 % of noise); `job` also rows of
compute beside calls, and a trace. AutoCCL's search measures the job's calls instead, and a search
like Lagom's (arXiv 2602.20656, no code) is told the time that a call and the compute beside it take
together. Figures are shares of NCCL's job time; intervals in the tables are over cases.

    share_of_ceiling        saved by ours over saved by the best for the job: mean of 16 cases,
    cases_at_half           and cases with half of it or more, in the worst of the four held worlds
    worst_case              how much slower than NCCL ours is: any case, world and sweep
    slack_share_of_ceiling  share_of_ceiling of 5 % slack
    exposed_cost            decode: ours over the fastest call by call, the worst system
    slack_loss_over_bound   waves and memory: what 5 % slack loses to call by call, less 5 % of the
                            hidden calls' share of the job: at most 0 where it keeps its promise

K calls (each one task), A configs, the first NCCL's own choice.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from harness import write_result
from learning_belief import Row, by, mean_of, of, with_interval

from dynamiccl.datasets.objective import fewest_within, sure_change_us
from dynamiccl.drawn_worlds import Floats, Ints
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol
from dynamiccl.serve.search.autoccl import AutoCcl, Choice, Key, SearchSpace
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.system import Contention, Group, Parts
from dynamiccl.simulator.systems import System, find_system
from dynamiccl.simulator.workloads import WorkCall, Workload, make_workload
from dynamiccl.simulator.world import Noise, World

PLACES: Final = (
    ("a100-nvswitch", Group(1, 8)),
    ("b300-nvlink", Group(1, 8)),
    ("h100-ib", Group(1, 8)),
    ("h100-ib", Group(4, 8)),
)
OVERLAPPED: Final = ("ddp", "fsdp", "phi-2", "llama-3")
WAITING: Final = ("megatron", "moe", "decode")
COUNTS: Final = (None, 1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32)
CONFIGS: Final = (ABSTAIN, *(Config(a, p, n) for a in Algorithm for p in Protocol for n in COUNTS))
HELD: Final = ("held", "held_kept", "held_0", "held_0_kept")
SWEEPS: Final = 10
#: Settings of ours were chosen on sweeps 0 to 2 and 500 to 524.
JUDGED_FROM: Final = 100
REPEATS: Final = 3
#: Noise alone: a rule is judged by what it settles on, not by what changes cost.
QUIET: Final = find_scenario("quiet").model_copy(update={"switch_us": 0.0, "first_use_us": 0.0})
#: Draws by which ours knows how sure it is, and the spread of a median of three in them: 0.67 of a
#: repeat's (normal order statistics).
DRAWS: Final = 64
SPREAD: Final = 0.67 * QUIET.jitter.sigma
#: How far off rows and trace are for each call, standard deviations of logs (ours, chosen):
#: the compute of the rows is not the job's and loses another share, and the compute beside a call
#: does not take as long as in the trace in every iteration. Ours draws both.
OTHER_COMPUTE, OTHER_ITERATION = 0.3, 0.1
SLACKS: Final = {"call": 0.0, "slack_5": 0.05}


@dataclass(frozen=True, slots=True)
class Waves(Contention):
    """Compute of tiles that lose a whole wave where the multiprocessors left need one more.

    Alone the last of eight waves is half full (ours, chosen): a sixteenth of the multiprocessors
    is free to take, the next block costs a ninth of the speed.
    """

    def compute_speed(self, parts: Parts, size_bytes: int) -> float:  # noqa: ARG002
        """Speed of compute while the call runs, over its speed alone."""
        free = self.num_sms - min(parts.num_channels, self.num_sms - 1)
        return float(8 / np.ceil(7.5 * self.num_sms / free))


Law = Callable[[Contention], Contention]
#: What compute and calls do to each other in each world, from what was fitted to the system.
LAWS: Final[Mapping[str, Law]] = {
    "held": lambda known: known,
    "held_0": lambda known: replace(known, held_us=0.0),
    "waves": lambda known: Waves(*astuple(known)),
    # Compute that takes most of the memory's bandwidth, and multiprocessors without end.
    "memory": lambda known: Contention(10**9, known.memory_gbytes_per_s, 0.9, known.call_slowdown),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One iteration of a job, with the truth."""

    world: World
    #: (K,) how often an iteration makes each call.
    counts: Ints
    #: (K, A) configs that may be chosen: of those that come to the same the first.
    allowed: npt.NDArray[np.bool_]
    #: (K, A) from the compute before a call to the end of it and of compute beside it.
    lasted_us: Floats
    #: (K,) what a trace of NCCL's own choice tells: the kernel, and the compute beside it.
    kernel_us: Floats
    compute_us: Floats

    def step_us(self, actions: Ints) -> float:
        """The time of an iteration."""
        return float((self.lasted_us[np.arange(len(actions)), actions] * self.counts).sum())

    @property
    def hidden(self) -> npt.NDArray[np.bool_]:
        """(K,) calls with compute beside them."""
        return self.world.beside_us > 0.0


class Measured:
    """What the rules may know of a job: a sweep, rows of compute beside calls, a trace, itself."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job = job
        self._random = np.random.default_rng(seed)
        #: (K, A) median us of a call alone; NaN where a config may not be chosen.
        self.times_us = np.where(job.allowed, job.world.quiet_us, np.nan)
        self.times_us *= self._scatter(self.times_us.shape)

    def _scatter(self, shape: tuple[int, ...]) -> Floats:
        """Medians of the repeats over the truth."""
        noise = Noise(QUIET.jitter, None, int(np.prod(shape)))
        draws = [np.exp(noise.log_factors(self._random)) for _ in range(REPEATS)]
        return np.asarray(np.median(draws, axis=0).reshape(shape))

    def _drawn(self, measured: Floats) -> Floats:
        """(D, ...) what the truth of measured values may be."""
        return np.asarray(
            measured * np.exp(SPREAD * self._random.standard_normal((DRAWS, *measured.shape)))
        )

    def beside(self) -> tuple[Floats, Floats]:
        """(D, K, A) draws of times beside compute and of the share of speed that compute loses.

        From rows that measure both sides: one a call and number of channels, of the config that is
        fastest alone with it, with the rate of compute alone and beside, and the kernel's time.
        Calls last longer beside compute than alone by one factor, that of the spreads of both
        times, whatever they wait for each other. With more channels compute never loses less.
        """
        world, times_us = self.job.world, self._drawn(self.times_us)
        loss = np.zeros(times_us.shape)
        waits_us = np.minimum(world.contention.held_us, world.beside_us / 4.0)
        for key in np.flatnonzero(self.job.hidden):
            channels = world.num_channels[key]
            counts, places = np.unique(channels, return_inverse=True)
            counted = np.where(channels == counts[:, None], self.times_us[key], np.nan)
            rows = np.nanargmin(counted[(known := ~np.isnan(counted).all(axis=1))], axis=1)
            speed = world.compute_speed[key, rows]
            rates = speed * self._scatter(rows.shape) / self._scatter(rows.shape)
            lost = 1.0 - self._drawn(rates)
            above = np.maximum.accumulate(lost, axis=1)
            below = np.minimum.accumulate(lost[:, ::-1], axis=1)[:, ::-1]
            # How far off the rows are, and in each draw how far off they may be.
            off = np.exp(OTHER_COMPUTE * self._random.standard_normal((1 + DRAWS, 1)))
            rising = np.zeros((DRAWS, len(counts)))
            rising[:, known] = 0.5 * (above + below) * off[0] * off[1:]
            loss[:, key] = rising[:, places].clip(0.0, 0.9)
            kernel_us = waits_us[key] + world.quiet_us[key, rows] * world.compute_slowdown
            kernel_us = self._drawn(kernel_us * self._scatter(rows.shape))
            longer = kernel_us.std(axis=1) / times_us[:, key, rows].std(axis=1).clip(1e-9)
            times_us[:, key] *= longer.clip(1.0, 2.0)[:, None]
        return times_us, loss

    def trace(self) -> tuple[Floats, Floats]:
        """(K,) time of the kernel, and (D, K) draws of the compute beside it."""
        kernel_us = self.job.kernel_us * self._scatter(self.job.kernel_us.shape)
        normal = self._random.standard_normal((1 + DRAWS, len(kernel_us)))
        told_us = self.job.compute_us * np.exp(OTHER_ITERATION * normal[0])
        # Half as wide again: a call that outlasts its compute after all costs much at once.
        return kernel_us, told_us * np.exp(1.5 * OTHER_ITERATION * normal[1:])

    def search(self, true_us: Floats, repeats: int) -> tuple[Ints, int]:
        """(K,) what AutoCCL's search finds by times (K, A), and the iterations that it spends."""
        world, keys = self.job.world, range(len(true_us))
        ran = (world.algorithm, world.protocol, world.num_channels)
        actions, spaces = list[Ints](), dict[Key, SearchSpace]()
        for key in keys:
            actions.append(np.flatnonzero(self.job.allowed[key]))
            cells = zip(*(part[key, actions[key]].tolist() for part in ran), strict=True)
            own, *others = [Choice(Config(Algorithm(a), Protocol(p), n)) for a, p, n in cells]
            # The first is NCCL's own choice: the same config by another name is left out.
            spaces[key] = SearchSpace([Choice(), *others], default_runs=own)
        search = AutoCcl(spaces.__getitem__, repeats=repeats)
        noise, iterations = Noise(QUIET.jitter, None, len(keys)), 0
        while not iterations or not all(search.is_over(key) for key in keys):
            scatter = np.exp(noise.log_factors(self._random))
            for key in keys:
                asked = actions[key][search.ask(key)]
                search.tell(key, float(true_us[key, asked] * scatter[key]))
            iterations += 1
        return np.array([actions[key][search.best(key)] for key in keys]), iterations


def by_step(measured: Measured) -> Ints:
    """Ours: what surely shortens the step most; a time is surely one spread of its draws more."""
    times_us, loss = measured.beside()
    kernel_us, compute_us = measured.trace()
    logs = np.log(times_us)
    sure_us = np.exp(logs.mean(axis=0) + logs.std(axis=0))
    change = sure_change_us(sure_us, loss.mean(axis=0), kernel_us, compute_us.mean(axis=0))
    chosen: Ints = np.where(np.isnan(change), np.inf, change).argmin(axis=1)
    return chosen


def choices(measured: Measured) -> dict[str, tuple[Ints, int]]:
    """By rule: (K,) the actions, and the iterations of the job that it took to find them."""
    job, channels = measured.job, measured.job.world.num_channels
    found = {"nccl": np.zeros(len(channels), dtype=np.int64)}
    for name, slack in SLACKS.items():
        # The fewest channels within a slack of the fastest, on hidden calls only.
        at_most = np.where(job.hidden, slack, 0.0)[:, None]
        found[name] = fewest_within(measured.times_us, channels, at_most)
    found["job"] = by_step(measured)
    found["ceiling"] = np.where(job.allowed, job.lasted_us, np.inf).argmin(axis=1)
    together_us = job.lasted_us - job.world.before_us[:, None]
    return {name: (actions, 0) for name, actions in found.items()} | {
        "autoccl": measured.search(job.world.quiet_us, REPEATS),
        "lagom": measured.search(together_us, REPEATS),
        "lagom_12": measured.search(together_us, 4 * REPEATS),
    }


def lasted_us(world: World, plays: npt.NDArray[np.bool_]) -> Floats:
    """(K, A) us from the compute before each call to the end of all, infinite where none plays."""
    found, actions = np.full(plays.shape, np.inf), np.arange(plays.shape[1])
    # A job for each config: in as many steps as there are calls each plays all of them.
    jobs = world.jobs(len(actions), 0)
    for _ in world.keys:
        key = jobs.key
        found[key, actions] = jobs.step(np.where(plays[key, actions], actions, 0)).lasted_us
    return np.where(plays, found, np.inf)


def job_of(system: System, calls: Mapping[WorkCall, int], law: Law, *, kept: bool) -> Job:
    """The job under a law: the time of each call under each config, as the simulator plays it."""
    changed: Any = copy.copy(system)
    changed.contention = law(system.contention)
    world = World(changed, Workload("job", tuple(calls)), CONFIGS, QUIET)
    assert len(world.keys) == len(calls), "one task is called beside different compute"
    actions = np.arange(len(CONFIGS))
    plays = world.mask & (world.num_channels <= world.num_channels[:, :1])
    plays &= world.stream == actions
    allowed = plays.copy()
    for number, call in enumerate(world.keys):
        if kept and call.collective is Collective.AllGather:
            own = [a for a, config in enumerate(CONFIGS) if config.num_channels is None]
            allowed[number] &= np.isin(actions, world.stream[number, own])
    lasted, beside_us = lasted_us(world, plays), world.beside_us
    own_us = lasted[:, 0] - world.before_us
    slowed = np.where(beside_us > 0.0, world.compute_slowdown, 1.0)
    kernel_us = world.quiet_us[:, 0] * slowed
    kernel_us += np.minimum(world.contention.held_us, beside_us / 4.0)
    ends_us = beside_us / world.compute_speed[:, 0]
    outlasts = ends_us < kernel_us
    traced = np.where(outlasts, own_us, kernel_us), np.where(outlasts, ends_us, own_us)
    return Job(world, np.array([*calls.values()]), allowed, lasted, *traced)


def play(job: Job) -> tuple[list[Row], float]:
    """What each rule saves on noisy sweeps of a job, and the hidden calls' share of its time."""
    own_us = job.step_us(np.zeros(len(job.counts), dtype=np.int64))
    seeds = range(JUDGED_FROM, JUDGED_FROM + SWEEPS)
    chosen = [choices(Measured(job, seed)) for seed in seeds]
    rows: list[Row] = []
    for rule in chosen[0]:
        saved = np.array([1.0 - job.step_us(each[rule][0]) / own_us for each in chosen])
        spent = np.mean([each[rule][1] for each in chosen])
        row = {"rule": rule, "saved": saved.mean(), "slower": 0.0 - saved.min(), "spent": spent}
        rows.append(row)
    [most] = (row["saved"] for row in rows if row["rule"] == "ceiling")
    alone_us = job.world.quiet_us[:, 0] * job.world.compute_slowdown * job.counts
    share = float(alone_us[job.hidden].sum() / own_us)
    return [row | {"most": most} for row in rows], share


def rule_table(rows: Sequence[Row]) -> dict[str, Any]:
    """By rule: saved, its share of the ceiling, and what it takes, over some cases."""
    table: dict[str, Any] = {}
    for rule, mine in by(rows, "rule").items():
        # A share of nothing is none.
        shares = [row | {"share": row["saved"] / row["most"]} for row in mine if row["most"] > 1e-4]
        table[rule] = {
            **with_interval("saved", mine, mean_of("saved")),
            **with_interval("share_of_ceiling", shares, mean_of("share")),
            "cases_at_half": int(sum(row["share"] >= 0.5 for row in shares)),
            "slowest": float(max(row["slower"] for row in mine)),
            "iterations_spent": mean_of("spent")(mine),
        }
    return table


def main() -> None:
    """Play all worlds, and write."""
    rows: list[Row] = []
    over_bound, exposed = [], []
    places = product(PLACES, (*OVERLAPPED, *WAITING), (*HELD, "waves", "memory"))
    for (name, shape), workload, world in places:
        calls = Counter(make_workload([workload], shape).calls)
        law = LAWS[world.removesuffix("_kept")]
        found, share = play(job_of(find_system(name), calls, law, kept="kept" in world))
        kind = "overlapped" if workload in OVERLAPPED else "waiting"
        rows += [row | {"world": world, "kind": kind} for row in found]
        saved = {row["rule"]: float(row["saved"]) for row in found}
        if world not in HELD and kind == "overlapped":
            over_bound.append(saved["call"] - saved["slack_5"] - 0.05 * share)
        if workload == "decode":
            exposed.append(saved["call"] - saved["job"])
    tables: dict[str, dict[str, Any]] = {}
    for (world, kind), mine in by(rows, "world", "kind").items():
        tables.setdefault(world, {})[kind] = rule_table(mine)
    held = [tables[world]["overlapped"] for world in HELD]
    figures = {
        "share_of_ceiling": min(rules["job"]["share_of_ceiling"] for rules in held),
        "cases_at_half": min(rules["job"]["cases_at_half"] for rules in held),
        "worst_case": float(max(row["slower"] for row in of(rows, rule="job"))),
        "slack_share_of_ceiling": min(rules["slack_5"]["share_of_ceiling"] for rules in held),
        "exposed_cost": max(exposed),
        "slack_loss_over_bound": max(over_bound),
        "sweeps": SWEEPS,
    }
    write_result("job_time", figures | tables)


if __name__ == "__main__":
    main()
