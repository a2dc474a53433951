"""Whole simulated jobs: who plays them, how true communication times are compared, and a page.

Interference does not depend on actions (simulator/world.py): with one seed all players meet the
same congestion at the same calls. Intervals are over seeds. N jobs, A actions of the player's own
world.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.features import Observations
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.drawn_worlds import Floats
from dynamiccl.errors import UserError
from dynamiccl.evaluate.page import draw_courses, render, saved_text, write_page
from dynamiccl.nccl import ABSTAIN, Config
from dynamiccl.serve.search.autoccl import AutoCcl, Choice, Key, SearchSpace, Tuner, is_disturbed
from dynamiccl.serve.search.policy_search import PolicySearch, Prior, predicted
from dynamiccl.simulator.record_jobs import all_configs, check_workload
from dynamiccl.simulator.scenario import Scenario
from dynamiccl.simulator.systems import System
from dynamiccl.simulator.workloads import Workload
from dynamiccl.simulator.world import CallResults, World
from dynamiccl.train.environment import JobCalls, Tables, delay_calls
from dynamiccl.train.options import open_bar
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.study import student_interval
from dynamiccl.train.trigger import Detector

NCCL: Final = "nccl-default"
ORACLE: Final = "oracle"
#: The oracle with the delay of agreement: a bound for all deciding players.
DELAYED: Final = "oracle, delayed"
SEARCH: Final = "AutoCCL search"
#: Jobs that find the best fixed choices; seeds not used in the comparison.
_PILOT_SEEDS: Final = (1_000_001, 1_000_002)
_PILOT_STEPS: Final = 4_000
#: Beyond this, a call is slower than NCCL's choice in the same state.
SLOWER: Final = 0.01
#: A smaller gain of the oracle is none.
_WORTH_GAINING: Final = 0.03

Actions = npt.NDArray[np.int64]
MakeWatch = Callable[[], Detector]
Progress = Callable[[int], None]


class Player(Protocol):
    """Chooses the action of every job's next call."""

    def act(self, observation: Mapping[str, Any], env: JobCalls) -> Actions:
        """(N,) actions."""

    def learn(self, ran: CallResults, env: JobCalls) -> None:  # noqa: ARG002
        """Receive the results of the calls."""
        return


@dataclass(frozen=True, slots=True)
class Ruled(Player):
    """Follows a rule: a table, or the oracle."""

    rule: Callable[[JobCalls], Actions]

    def act(self, observation: Mapping[str, Any], env: JobCalls) -> Actions:  # noqa: ARG002
        """The rule's actions."""
        return self.rule(env)


def _fastest(env: JobCalls) -> Actions:
    return np.asarray(np.nanargmin(env.jobs.oracle_us(), axis=1))


class Learned(Player):
    """As the leader's brain: asks again when a key's last decision is in force."""

    def __init__(self, policy: TorchPolicy, env: JobCalls) -> None:
        self._policy = policy
        self._period = max(env.delay, 1)
        shape = (env.num_envs, len(env.world.keys))
        self._decided = np.full(shape, ABSTAIN_ACTION, dtype=np.int64)
        self._asked_at = np.full(shape, -self._period, dtype=np.int64)
        self._state = np.zeros((2, env.num_envs, policy.state_units), dtype=np.float32)
        self._job = np.arange(env.num_envs)
        self._calls = 0

    def act(self, observation: Mapping[str, Any], env: JobCalls) -> Actions:
        """Ask the policy about the keys that are due."""
        key = env.jobs.key
        due = np.flatnonzero(self._calls - self._asked_at[self._job, key] >= self._period)
        if len(due):
            seen = Observations(observation["window"][due], observation["context"][due])
            chosen = self._ask(seen, observation["mask"][due], due, key[due])
            self._decided[due, key[due]] = chosen
            self._asked_at[due, key[due]] = self._calls
        self._calls += 1
        return self._decided[self._job, key]

    def _ask(
        self, seen: Observations, mask: npt.NDArray[np.bool_], job: Actions, key: Actions
    ) -> Actions:
        if not self._policy.state_units:
            return self._policy.act(seen, mask)
        # A key without calls tells nothing of the job's state.
        told = self._asked_at[job, key] >= 0
        before = np.where(told, self._decided[job, key], -1)
        h, c = self._state[:, job]
        chosen, after = self._policy.step(seen, mask, before, (h, c))
        self._state[:, job[told]] = np.stack(after)[:, told]
        return chosen


class Searching(Player):
    """An online search for each job."""

    def __init__(self, tuners: Sequence[Tuner], *, alarmed: bool) -> None:
        """With `alarmed`, Trigger alarms are passed on."""
        self._tuners = tuners
        self._alarmed = alarmed
        self._disturbed: set[tuple[int, int]] = set()

    def act(self, observation: Mapping[str, Any], env: JobCalls) -> Actions:  # noqa: ARG002
        """Each tuner's requested action."""
        keys = env.jobs.key.tolist()
        asked = [tuner.ask(key) for tuner, key in zip(self._tuners, keys, strict=True)]
        return np.array(asked, dtype=np.int64)

    def learn(self, ran: CallResults, env: JobCalls) -> None:
        """Pass times, and alarms, to each tuner."""
        told = (ran.key.tolist(), ran.measured_us.tolist(), ran.action.tolist())
        for tuner, key, time_us, action in zip(self._tuners, *told, strict=True):
            tuner.tell(key, time_us, action)
        if self._alarmed:
            for job, (key, level) in enumerate(zip(told[0], env.level.tolist(), strict=True)):
                before = (job, key) in self._disturbed
                if is_disturbed(level, before=before) != before:
                    self._disturbed ^= {(job, key)}
                    self._tuners[job].alarm(key)


@dataclass(frozen=True, slots=True)
class Setting:
    """The simulated system, workload and scenario."""

    system: System
    workload: Workload
    scenario: Scenario
    calls: int
    jobs: int = 4

    def world(self, configs: Sequence[Config]) -> World:
        """The world with a catalogue's configs."""
        return World(self.system, self.workload, configs, self.scenario)


@dataclass(frozen=True, slots=True)
class Contender:
    """One row: a player, made anew for each seed, and its environment."""

    name: str
    world: World
    tables: Tables
    make: Callable[[JobCalls], Player]
    make_watch: MakeWatch | None = None
    observes: bool = False
    #: Whether decisions take effect at once: a table's, and the oracle's.
    at_once: bool = False
    trained: bool = False

    def prepare(self, setting: Setting) -> tuple[JobCalls, Player]:
        """A new environment and player."""
        env = JobCalls(
            self.world,
            self.tables,
            setting.jobs,
            self.make_watch,
            delay=0 if self.at_once else delay_calls(self.world),
            observed=self.observes,
        )
        return env, self.make(env)


def simple_contenders(setting: Setting) -> list[Contender]:
    """NCCL, fixed choices, AutoCCL's search, and the oracle, with and without the delay."""
    world = setting.world(all_configs(setting.system, setting.workload))
    tables = Tables.of(world, [DEFAULT_PROFILE])
    mean_us = _mean_times_us(world)
    fixed = {
        NCCL: np.zeros(len(world.keys), dtype=np.int64),
        "best fixed config": best_fixed(world, mean_us),
        "best quiet table": np.nanargmin(world.quiet_us, axis=1),
        # A bound for tables: each key's best config on average over states.
        "best table of all states": np.nanargmin(mean_us, axis=1),
    }

    def table(chosen: Actions) -> Callable[[JobCalls], Player]:
        return lambda _env: Ruled(lambda env: chosen[env.jobs.key])

    row = partial(Contender, world=world, tables=tables)
    return [
        *(row(name, make=table(chosen), at_once=True) for name, chosen in fixed.items()),
        row(SEARCH, make=_autoccl),
        row(DELAYED, make=lambda _env: Ruled(_fastest)),
        row(ORACLE, make=lambda _env: Ruled(_fastest), at_once=True),
    ]


def policy_contenders(
    setting: Setting, name: str, policy: TorchPolicy, make_watch: MakeWatch | None
) -> list[Contender]:
    """A policy alone; with a Trigger; and as the start of a search with a Trigger."""
    known = policy.manifest
    world = setting.world(known.actions().configs)
    tables = Tables.of(world, known.launch_profiles, known.noise_table(), known.cost_table())
    made = partial(Contender, world=world, tables=tables, make_watch=make_watch, trained=True)
    learned = partial(made, make=partial(Learned, policy), observes=True)
    if make_watch is None:
        return [learned(name)]
    spaces = search_spaces(world)
    # log(time / NCCL's own choice) of every task key without history.
    q = policy.values(Observations.cold(tables.context.copy()), tables.mask)
    priors: dict[Key, Prior] = {
        key: Prior.of_policy(spaces[key], call.size_bytes, predicted(q[key]))
        for key, call in enumerate(world.keys)
    }

    def search(env: JobCalls) -> Player:
        tuners = [PolicySearch(spaces.__getitem__, priors.__getitem__) for _ in range(env.num_envs)]
        return Searching(tuners, alarmed=True)

    return [
        learned(f"{name} + Trigger"),
        made(f"search from {name} + Trigger", make=search),
    ]


def _autoccl(env: JobCalls) -> Player:
    spaces = search_spaces(env.world)
    tuners = [AutoCcl(spaces.__getitem__) for _ in range(env.num_envs)]
    return Searching(tuners, alarmed=False)


def search_spaces(world: World) -> dict[Key, SearchSpace]:
    """By task key; each begins with NCCL's own knobs."""
    choices = [Choice(config) for config in world.configs]
    spaces: dict[Key, SearchSpace] = {}
    for key, call in enumerate(world.keys):
        own = Choice(world.system.resolve(call, ABSTAIN))
        able = np.flatnonzero(world.mask[key]).tolist()
        spaces[key] = SearchSpace(choices, able, default_runs=own)
    return spaces


def best_fixed(world: World, times_us: Floats) -> Actions:
    """The config of least total time by `times_us` (keys, A); NCCL's choice where it is missing."""
    calls = np.bincount(world.order, minlength=len(world.keys))[:, None]
    filled = np.where(np.isnan(times_us), times_us[:, :1], times_us)
    action = int((filled * calls).sum(axis=0).argmin())
    return np.where(world.mask[:, action], action, ABSTAIN_ACTION)


def _mean_times_us(world: World) -> Floats:
    """(keys, A) true times, averaged over states that the pilot's jobs meet."""
    total = np.zeros(world.mask.shape)
    count = np.zeros(len(world.keys))
    for seed in _PILOT_SEEDS:
        jobs = world.jobs(16, seed)
        none = np.zeros(len(jobs), dtype=np.int64)
        for _ in range(_PILOT_STEPS):
            key = jobs.key
            np.add.at(total, key, jobs.oracle_us())
            np.add.at(count, key, 1)
            jobs.step(none)
    # A seldom key has its quiet times.
    return np.where(count[:, None] > 0, total / np.maximum(count, 1)[:, None], world.quiet_us)


class Totals(NamedTuple):
    """Totals of a player's N jobs, each (N,)."""

    #: True, changes included.
    total_us: Floats
    #: Compute included.
    job_us: Floats
    #: The best config of each call, without changes.
    oracle_us: Floats
    changes: Floats
    #: Calls that took over 1 % more than NCCL's choice would have.
    slower: Floats
    alarms: Floats
    #: The first job, call by call; `slowdown` is the worst of links and host. None: not kept.
    course: pl.DataFrame | None


def roll_out(
    env: JobCalls,
    player: Player,
    calls: int,
    *,
    seed: int,
    progress: Progress = lambda _calls: None,
) -> Totals:
    """Run an episode of so many calls; every thousand `progress` is told of them."""
    observation = env.reset(seed)
    totals, course = np.zeros((6, env.num_envs)), []
    for call in range(calls):
        times = env.jobs.oracle_us()
        worst = max(env.jobs.intra[0], env.jobs.inter[0], env.jobs.host[0])
        usual = times[:, ABSTAIN_ACTION]
        observation, ran = env.step(player.act(observation, env))
        player.learn(ran, env)
        slower = ran.true_us > (1.0 + SLOWER) * usual
        best_us, alarm = np.nanmin(times, axis=1), env.alarm_began
        totals += ran.true_us, ran.lasted_us, best_us, ran.changed, slower, alarm
        seen = (ran.action, ran.changed, ran.measured_us, usual, env.level, alarm)
        course.append((*(each[0].item() for each in seen), float(worst)))
        if (call + 1) % 1000 == 0:
            progress(1000)
    names = ("action", "changed", "measured_us", "default_us", "level", "alarm", "slowdown")
    first = pl.DataFrame(course, schema=names, orient="row", infer_schema_length=1)
    return Totals._make((*totals, first))


def play(
    setting: Setting,
    contenders: Sequence[Contender],
    seeds: Sequence[int],
    progress: Progress = lambda _calls: None,
) -> dict[str, list[Totals]]:
    """By contender, for every seed; with the course of the first seed."""
    played: dict[str, list[Totals]] = {}
    for contender, seed in product(contenders, seeds):
        ready = contender.prepare(setting)
        total = roll_out(*ready, setting.calls, seed=seed, progress=progress)
        kept = total if seed == seeds[0] else total._replace(course=None)
        played.setdefault(contender.name, []).append(kept)
    return played


class Estimate(NamedTuple):
    """Mean over seeds and 95 % interval; None of a single seed."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: Sequence[float], least: float | None = None) -> Self:
        """Student's interval, cut off at `least`."""
        low, high = student_interval(values)
        if low is not None and least is not None:
            low = max(low, least)
        return cls(float(np.mean(values)), low, high)

    @property
    def ends(self) -> tuple[float, float]:
        """The interval; of one seed the mean twice."""
        return (self.mean, self.mean) if self.low is None else (self.low, self.high or 0.0)

    @property
    def sign(self) -> int:
        """-1: below 0, 1: above, 0: cannot be told."""
        low, high = self.ends
        return -1 if high < 0.0 else 1 if low > 0.0 else 0

    @property
    def saved(self) -> str:
        """Time saved, where this is time over another - 1: `page.saved_text`."""
        low, high = self.ends
        return saved_text(-self.mean, None if self.low is None else (-high, -low))


Comparison = dict[str, Any]
Row = dict[str, Any]


def make_row(name: str, totals: Sequence[Totals], default: Sequence[Totals], calls: int) -> Row:
    """The metrics of a contender; `default` are the totals of NCCL's choice, by seed.

    Times are true, config changes included; `seconds` and `seed_seconds` of one job's calls,
    `over_default` is time / NCCL's own - 1, and `job_over_default` the same of whole jobs, compute
    included. `regret` is time / fastest config of each call - 1, where changes cost nothing.
    """
    all_calls = calls * sum(len(each.total_us) for each in totals)

    def share(what: Callable[[Totals], float]) -> float:
        return float(sum(what(each) for each in totals)) / all_calls

    def over(time_of: Callable[[Totals], Any]) -> Estimate:
        pairs = zip(totals, default, strict=True)
        return Estimate.of([time_of(a).sum() / time_of(b).sum() - 1 for a, b in pairs])

    spent = [float(each.total_us.mean()) / 1e6 for each in totals]
    return {
        "name": name,
        "seconds": Estimate.of(spent, least=0.0),
        "over_default": over(lambda t: t.total_us),
        "job_over_default": over(lambda t: t.job_us),
        "regret": Estimate.of([t.total_us.sum() / t.oracle_us.sum() - 1 for t in totals], 0.0),
        "changes_per_1000_calls": 1e3 * share(lambda t: t.changes.sum()),
        "share_slower_than_default": share(lambda t: t.slower.sum()),
        "alarms_per_1e5_calls": 1e5 * share(lambda t: t.alarms.sum()),
        "seed_seconds": spent,
    }


def conclude(
    setting: Setting, played: Mapping[str, Sequence[Totals]], trained: frozenset[str]
) -> Comparison:
    """Metrics and verdicts; `trained` names the rows of policies; raises KeyError without NCCL."""
    default = played[NCCL]
    rows = [make_row(name, totals, default, setting.calls) for name, totals in played.items()]
    return {
        "system": setting.system.name,
        "workload": setting.workload.name,
        "scenario": setting.scenario.meaning,
        "calls": setting.calls,
        "jobs": setting.jobs,
        "seeds": len(default),
        "rows": rows,
        "verdicts": verdicts(rows, trained),
    }


def to_json(found: Comparison) -> dict[str, Any]:
    """Plain data."""
    rows = [
        {key: each._asdict() if isinstance(each, Estimate) else each for key, each in row.items()}
        for row in found["rows"]
    ]
    return {**found, "rows": rows}


def verdicts(rows: Sequence[Row], trained: frozenset[str]) -> list[str]:
    """What each policy gains, of no policy the best row; or that there is no gain."""
    oracle = next((row["over_default"] for row in rows if row["name"] == ORACLE), None)
    rivals = [row for row in rows if row["name"] not in {ORACLE, DELAYED, NCCL}]
    told = [row for row in rivals if row["name"] in trained]
    gained = any(row["over_default"].sign < 0 for row in rivals)
    if gained and not told:
        told = [min(rivals, key=lambda row: row["over_default"].mean)]
    # The oracle could gain, if more seeds told.
    is_open = oracle is not None and oracle.ends[0] < -_WORTH_GAINING
    header = {"gained": gained, "told": told, "oracle": oracle, "open": is_open}
    return render("simulate.words", header).splitlines()


def simulate(
    setting: Setting,
    policies: Mapping[str, Path],
    trigger: Path | None,
    seeds: Sequence[int],
    out: Path,
) -> Comparison:
    """Play all rows, write the page; raises UserError for a workload the system cannot run."""
    check_workload(setting.system, setting.workload)
    contenders = simple_contenders(setting)
    for name, folder in policies.items():
        policy = TorchPolicy.load(folder)
        if policy.manifest.slack is not None:
            raise UserError(
                f"{name} has {policy.manifest.slack.terms}, which simulated jobs do not keep to: "
                "give the run that it was made from"
            )
        contenders += policy_contenders(setting, name, policy, None)
        if trigger is not None:
            watch = partial(Detector.load, trigger)
            contenders += policy_contenders(setting, name, policy, watch)
    with open_bar() as progress:
        total = len(contenders) * len(seeds) * setting.calls
        bar = progress.add_task("calls", total=total)
        played = play(setting, contenders, seeds, lambda count: progress.update(bar, advance=count))
    trained = frozenset(each.name for each in contenders if each.trained)
    found = conclude(setting, played, trained)
    first = {name: each[0].course for name, each in played.items()}
    drawn = {*trained, SEARCH, ORACLE}
    svg = draw_courses({n: c for n, c in first.items() if n in drawn and c is not None})
    ends = [end for row in found["rows"] for end in row["over_default"].ends]
    # Less time is drawn to the right.
    reach = min(max(0.02, *map(abs, ends)), 1.0)
    header = {
        **found,
        "trained": trained,
        "delay": delay_calls(contenders[0].world),
        "course": svg,
        "reach": reach,
        "at": lambda over: 50.0 - 48.0 * min(max(over / reach, -1.0), 1.0),
    }
    write_page(out, "simulate", to_json(found), header)
    (out / "timeline.svg").write_text(svg, encoding="utf-8")
    return found
