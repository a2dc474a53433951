"""Policies, rules and a filter under changing interference on several systems.

Each setting has a quiet sweep of the workload's collectives, recordings of jobs that stray from
NCCL's choice in half of their calls, at other sizes than the workload's, and a Trigger. From these
comes a Gaussian process that knows what each cell feels of an interference level. It plays against
the rivals of `scenario_rivals.py`, in the scenario that was recorded and in one that is *shifted*:
half as strong again, and coming and going twice as fast. Everybody's decisions are in force some
calls later, the delayed oracle's too.

*Gain* is the share of NCCL's own communication time that is saved; what counts is the sum of gains
over the settings over that of the delayed oracle. Intervals are bootstraps of seeds, and of the
jobs of each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
from harness import parallel
from scenario_places import JOBS, PLACES, prepare_place, shifted, trained
from scenario_rivals import (
    EXPECTED,
    Filter,
    Levels,
    Reopening,
    Rule,
    RuleSettings,
    RuleTables,
    best_settings,
)

from dynamiccl.datasets.cells import task_grid
from dynamiccl.datasets.features import TUNED
from dynamiccl.datasets.splits import Split
from dynamiccl.evaluate.simulate import (
    DELAYED,
    NCCL,
    ORACLE,
    Contender,
    Player,
    Searching,
    Setting,
    policy_contenders,
    roll_out,
    search_spaces,
    simple_contenders,
)
from dynamiccl.simulator.world import World
from dynamiccl.train.cautious import cell_of
from dynamiccl.train.cautious_fit import share_table
from dynamiccl.train.data import load_data
from dynamiccl.train.environment import JobCalls
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.trigger import Detector

Float64Array = npt.NDArray[np.float64]
SEEDS: Final = 2
PILOT_CALLS: Final = 10_000
#: With under a hundred tasks to calibrate on, a bound of 1 % would mean to abstain.
ALPHA: Final = 0.05
#: The second is the rule that ships.
RECIPES: Final = ("gaussian-process", "threshold-rule")
OURS: Final = "gaussian-process + Trigger"
RULE: Final = "threshold rule, fitted"


def scenario_figures(out: Path, seeds: int = SEEDS) -> dict[str, Any]:
    """The gains of all rows, and the keys that say how much of what can be gained they have."""
    jobs = [(out / f"{index}-{seed}", name, seed) for index, name in enumerate(PLACES)
            for seed in range(seeds)]  # fmt: skip
    found: dict[tuple[str, str, str], list[Float64Array]] = {}
    for (_, place, _), rows in parallel(play_place, jobs):
        for (row, world), times in rows.items():
            found.setdefault((row, world, place), []).append(times)
    figures: dict[str, Any] = {"data_sets": {}}
    names = dict.fromkeys(row for row, _, _ in found)
    for world in ("as recorded", "shifted"):
        table = {row: gain_row(found, row, world) for row in names}
        figures["data_sets"][f"scenarios, {world}"] = table
    return figures


def gain_row(
    found: Mapping[tuple[str, str, str], list[Float64Array]],
    row: str,
    world: str,
    places: Sequence[str] = tuple(PLACES),
) -> dict[str, float | None]:
    """Gains by place, and the ratio of sums with its interval.

    `found` has (JOBS,) us for each seed, by row, world and place.
    """
    random = np.random.default_rng(0)

    def totals(
        name: str, place: str, drawn: Sequence[npt.NDArray[np.int64]], who: list[int]
    ) -> float:
        return float(
            sum(found[name, world, place][s][d].sum() for s, d in zip(who, drawn, strict=True))
        )

    def ratio(*, resampled: bool) -> tuple[float, dict[str, float]]:
        gains: dict[str, float] = {}
        best = 0.0
        for place in places:
            seeds = len(found[NCCL, world, place])
            who = random.integers(seeds, size=seeds).tolist() if resampled else list(range(seeds))
            drawn = [
                random.integers(JOBS, size=JOBS) if resampled else np.arange(JOBS) for _ in who
            ]
            usual, mine, known = (totals(n, place, drawn, who) for n in (NCCL, row, DELAYED))
            gains[place] = 1.0 - mine / usual
            best += 1.0 - known / usual
        return sum(gains.values()) / best, gains

    value, gains = ratio(resampled=False)
    low, high = np.quantile([ratio(resampled=True)[0] for _ in range(500)], [0.025, 0.975])
    name = "gain_of_delayed_oracle"
    return {name: value, f"{name}_lo": float(low), f"{name}_hi": float(high), **gains}


def play_place(
    folder: Path,
    name: str,
    seed: int,
    others: Mapping[str, Callable[[Path], TorchPolicy]] = MappingProxyType({}),
) -> dict[tuple[str, str], Float64Array]:
    """(JOBS,) us of communication of each row in each of the two worlds.

    `others` are trained on the folder's data set, and play without a Trigger.
    """
    setting = prepare_place(folder, name, seed)
    settings = [f"trigger={folder}", f"alpha={ALPHA}"]
    policies = {name: trained(folder / "data", name, settings, seed) for name in RECIPES}
    added = {name: train(folder / "data") for name, train in others.items()}
    found: dict[tuple[str, str], Float64Array] = {}
    quiet_world = simple_contenders(setting)[0].world
    table = _fitted(quiet_world, folder)
    # By pilot jobs of the scenario that was recorded.
    settings_of_rule = best_settings(partial(_pilot, setting, table))
    for world, scenario in (
        ("as recorded", setting.scenario),
        ("shifted", shifted(setting.scenario)),
    ):
        here = replace(setting, scenario=scenario)
        rows = _contenders(here, folder, policies, partial(_rule, table, settings_of_rule))
        for other, policy in added.items():
            rows += policy_contenders(here, other, policy, None)
        for row in rows:
            found[row.name, world] = times_us(row, here, seed)
    return found


def times_us(row: Contender, setting: Setting, seed: int) -> Float64Array:
    """(JOBS,) us of communication of a row's jobs."""
    env, player = row.prepare(setting)
    return roll_out(env, player, setting.calls, seed=seed).total_us


def _contenders(
    setting: Setting,
    folder: Path,
    policies: Mapping[str, TorchPolicy],
    rule: Callable[[JobCalls], Player],
) -> list[Contender]:
    def watch() -> Detector:
        return Detector.load(folder)

    rows = {row.name: row for row in simple_contenders(setting)}
    wanted = (NCCL, "best quiet table", "AutoCCL search", DELAYED, ORACLE)
    world, delayed = rows[NCCL].world, rows[DELAYED]
    levels = Levels.of(world, setting.scenario)
    makers: dict[str, Callable[[JobCalls], Player]] = {
        "filter that knows the scenario": lambda env: Filter(env, levels),
        RULE: rule,
    }
    named = policy_contenders(setting, RECIPES[0], policies[RECIPES[0]], None)
    for name, policy in policies.items():
        named += policy_contenders(setting, name, policy, watch)[:1]
    reopening = replace(
        delayed, name="AutoCCL that reopens on alarms", make=_reopening, make_watch=watch
    )
    played = [replace(delayed, name=name, make=make) for name, make in makers.items()]
    return [*(rows[name] for name in wanted), reopening, *played, *named]


def _rule(tables: RuleTables, settings: RuleSettings, env: JobCalls) -> Player:
    return Rule(env, tables, settings)


def _pilot(setting: Setting, tables: RuleTables, settings: RuleSettings) -> float:
    """Time of pilot jobs, with seeds not used for judging."""
    short = replace(setting, calls=PILOT_CALLS)
    [delayed] = [row for row in simple_contenders(setting) if row.name == DELAYED]
    row = replace(delayed, make=partial(_rule, tables, settings))
    return float(times_us(row, short, 1_000_003).sum())


def _reopening(env: JobCalls) -> Player:
    spaces = search_spaces(env.world)
    tuners = [Reopening(spaces.__getitem__) for _ in range(env.num_envs)]
    return Searching(tuners, alarmed=True)


def _fitted(world: World, folder: Path) -> RuleTables:
    """Tables for rules: interpolated quiet times, and which cells interference slows."""
    data = load_data(folder / "data", 0, str(folder), with_costs=True)
    grid = task_grid(data.frame, data.catalogue, [Split.TRAIN, Split.VALIDATION])
    actions = {config: action for action, config in enumerate(data.catalogue.configs)}
    shares = share_table(data.level_shares, [world.system.name])[0].numpy()
    quiet_us = np.full(world.mask.shape, np.nan)
    feels = np.ones(world.mask.shape)
    for key, call in enumerate(world.keys):
        mine = grid.tasks.select(
            found=(pl.col("collective") == call.collective.wire)
            & (pl.col("num_nodes") == call.group.num_nodes)
            & (pl.col("ranks_per_node") == call.group.ranks_per_node)
        )["found"].to_numpy()
        sizes = grid.tasks["size_bytes"].to_numpy()[mine]
        order = np.argsort(sizes)
        for action in np.flatnonzero(world.mask[key]):
            times = grid.times_us[mine, actions[world.configs[action]]][order]
            known = ~np.isnan(times)
            at = np.log(sizes[order][known]), np.log(times[known])
            quiet_us[key, action] = np.exp(np.interp(np.log(call.size_bytes), *at))
            ran = cell_of(world.algorithm[key, action], world.protocol[key, action])
            octave = int(np.log2(call.size_bytes))
            feels[key, action] = shares[TUNED.index(call.collective), ran, octave]
    disturbed_us = quiet_us * (1.0 + (EXPECTED - 1.0) * feels)
    return RuleTables(quiet_us, np.nanargmin(quiet_us, axis=1), np.nanargmin(disturbed_us, axis=1))
