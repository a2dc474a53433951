"""What each part of online learning is worth: the ablations of the papers that it comes from.

    python benchmarks/online_ablations.py            # 90 minutes on 2 cores
    python benchmarks/online_ablations.py blocking   # some of the parts

All but the last three learn and play in `PLACE`, where surroundings come and go, so that what the
state shows counts.

* variants: A3C (Mnih et al. 2016) with a change each, `STEPS` updates, `SEEDS` seeds. Windows of
  no call to 4 calls (8 is the window's length); windows read by a 1-D convolution or an LSTM
  (Pensieve, Mao et al. 2017, section 5.1); no state of the job; no probes; a critic that sees the
  last decision alone, although it is not in force yet (mvfst-rl, Sivakumar et al. 2019); a
  statistic of RMSProp for each actor.
* finalists: the encoder that gained most, and our own, in IMPALA, with three times the updates
  and `FINAL_SEEDS` seeds.
* tabular: Q-learning over a table of each key's last slowdown (Pensieve's comparison), DDQN from
  recorded calls, a random policy, and the fitted rule.
* blocking: what calls take that wait for a policy of 0.1, 1 and 10 ms, and decide at once, beside
  calls that do not wait and whose decisions are in force when ranks have agreed.
* orders: the shifted scenario is what is real, and there are few recorded calls of it; the scenario
  as recorded is the simulator. Networks without a state of the job learn from the one, the other,
  the one and then the other, and both ways round.
* measured: the choices, cold, of IMPALA on measured sweeps, cross-fitted over their runs.
* rewards: IMPALA under each scale of rewards, on all shipped systems, one seed.
* systems: IMPALA on all of these systems but one, which plays on that one.

Figures are shares of the delayed oracle's gain, as in bench_online.py. Writes
out/bench/online-ablations.json.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from bench_online import PLACES, WORLDS
from harness import OUT, write_result
from learning_figures import parallel
from learning_real import import_sweeps, score_measured
from learning_scenarios import RULE, fitted_rule, gain_row, times_us
from online_tabular import Tabular, train_table
from online_variants import BASE, FINALISTS, ONLINE, VARIANTS, register_last_calls
from scenario_places import (
    EVERY,
    SMALL,
    prepare_place,
    record_exploring,
    run_of,
    setting_of,
    shifted,
    sweep_place,
    trained,
)
from scenario_rivals import Random

from dynamiccl.evaluate.simulate.lineup import (
    DELAYED,
    NCCL,
    Contender,
    Setting,
    policy_contenders,
    simple_contenders,
)
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipe_checks import RewardScale
from dynamiccl.train.trigger.detector import Detector

PLACE: Final = "b300, decode and lora, busy-host"
#: A place on each shipped system.
SYSTEMS: Final = (*PLACES, "a100, decode and lora, shared-node", *SMALL)
STEPS: Final = 200
SEEDS: Final = 3
FINAL_SEEDS: Final = 5
#: Half of the recipes' jobs; nothing to choose.
LENGTH: Final = (f"steps={STEPS}", "jobs=16", "probe_every=48")
TRAINING: Final = (*LENGTH, f"places={EVERY[PLACE].text}")
#: Of 64 jobs with 30,000 calls each: some 7 million calls, as `STEPS` updates take.
TABLE_EPISODES: Final = 4
LATENCIES_MS: Final = (0.1, 1.0, 10.0)
#: Recorded jobs of what is real; and how Q networks of the actors' form learn from them.
FEW: Final = {"jobs": 4, "calls": 5_000}
FROM_CALLS: Final = (
    *("use_calls=true", "gamma=0.5", "num_steps=3", "steps=2000"),
    "num_members=1",
)
#: The row of the part `systems`.
OTHERS: Final = "trained on the others"
PARTS: Final = (
    *("tabular", "blocking", "variants", "finalists", "orders"),
    *("measured", "systems", "rewards"),
)
Rows = dict[tuple[str, str], npt.NDArray[np.float64]]
Times = dict[tuple[str, str, str], list[npt.NDArray[np.float64]]]


def _setting(place: str, world: str) -> Setting:
    setting = setting_of(place)
    return replace(setting, scenario=shifted(setting.scenario)) if world == "shifted" else setting


def _rivals(setting: Setting) -> dict[str, Contender]:
    return {row.name: row for row in simple_contenders(setting)}


def _prepared(folder: Path, place: str, seed: int) -> Rows:
    """NCCL, the delayed oracle, a random policy and the fitted rule, once for each seed."""
    setting = prepare_place(folder, place, seed)
    rule = fitted_rule(setting, folder)
    found: Rows = {}
    for world in WORLDS:
        here = _setting(place, world)
        rows = _rivals(here)
        rows["random"] = replace(rows[DELAYED], make=Random)
        rows[RULE] = replace(rows[DELAYED], make=rule)
        for name in (NCCL, DELAYED, "random", RULE):
            found[name, world] = times_us(rows[name], here, seed)
    return found


def _variant(folder: Path, seed: int, name: str) -> Rows:
    """Train a variant, and play."""
    register_last_calls()
    recipe, settings = (VARIANTS | FINALISTS)[name]
    policy = trained(folder / "data", recipe, [*TRAINING, *settings], seed)
    return _played(policy, name, seed)


def _played(
    policy: TorchPolicy, name: str, seed: int, watch: Path | None = None, place: str = PLACE
) -> Rows:
    make_watch = None if watch is None else partial(Detector.load, watch)
    found: Rows = {}
    for world in WORLDS:
        here = _setting(place, world)
        row = policy_contenders(here, name, policy, make_watch)[0]
        found[name, world] = times_us(row, here, seed)
    return found


def _tabular(folder: Path, seed: int) -> Rows:
    """A table that learns in as many calls as A3C has, and double DQN from recorded calls."""
    setting = setting_of(PLACE)
    env, _ = _rivals(setting)[DELAYED].prepare(replace(setting, jobs=64), seed)
    values = train_table(env, TABLE_EPISODES, seed)
    found: Rows = {}
    for name in WORLDS:
        here = _setting(PLACE, name)
        row = replace(
            _rivals(here)[DELAYED], make=lambda env, seed: Tabular(env, values, seed=seed)
        )
        found["tabular Q-learning", name] = times_us(row, here, seed)
    settings = [f"trigger={folder}", "gamma=0.5", "num_steps=3", "steps=2000"]
    policy = trained(folder / "data", "ddqn-dueling", settings, seed)
    return found | _played(policy, "DDQN from recorded calls, + Trigger", seed, folder)


def _orders(folder: Path, seed: int) -> Rows:
    """From few recorded calls of what is real, from a simulator that differs, and from both."""
    data = folder / "few"
    sweep_place(data, PLACE, seed)
    record_exploring(_setting(PLACE, "shifted"), data, **FEW, seed=30_000 + seed)
    playing = [*TRAINING, "probe_every=0"]
    calls = run_of(data, "ddqn-actions", FROM_CALLS, seed)
    simulator = run_of(data, "a3c", playing, seed)
    runs = {
        "recorded calls": calls,
        "simulator": simulator,
        "recorded calls, then simulator": run_of(data, "a3c", [*playing, f"start={calls}"], seed),
        "simulator, then recorded calls": run_of(
            data, "ddqn-actions", [*FROM_CALLS, f"start={simulator}"], seed
        ),
    }
    found: Rows = {}
    for name, run in runs.items():
        found |= _played(TorchPolicy.load(run / "policy"), name, seed)
    return found


def _blocking(folder: Path) -> dict[str, Any]:
    """Share of NCCL's time that is saved, by what the policy takes and whether calls wait."""
    policy = trained(folder / "data", BASE, TRAINING, 0)
    setting = setting_of(PLACE)
    usual = times_us(_rivals(setting)[NCCL], setting, 0).sum()
    [row] = policy_contenders(setting, BASE, policy, None)
    saved = {"does not wait": 1.0 - times_us(row, setting, 0).sum() / usual}
    at_once = times_us(replace(row, at_once=True), setting, 0).sum()
    calls = setting.calls * setting.jobs
    for latency_ms in LATENCIES_MS:
        waited = at_once + calls * latency_ms * 1000.0
        saved[f"waits {latency_ms:g} ms a call"] = 1.0 - waited / usual
    return {name: float(value) for name, value in saved.items()}


def _measured(data: Path) -> dict[str, Any]:
    """Figures of static choices by system and policy; it played on B300 alone."""
    import_sweeps(data)
    runs = [run_of(data, ONLINE, TRAINING, seed) for seed in range(SEEDS)]
    sets, _ = score_measured(data, data, {ONLINE: [run / "policy" for run in runs]})
    return sets


def _on_systems(
    folders: Mapping[str, Path], base: Times, work: Callable[..., Rows], names: Sequence[str]
) -> dict[str, Any]:
    """Gains by world of some rows on each system, beside those of `base`."""
    jobs = [(folder, place, name) for place, folder in folders.items() for name in names]
    found = base | _by_place(work, jobs)
    rows_of = dict.fromkeys(row for row, _, _ in found)
    return {
        world: {row: gain_row(found, row, world, SYSTEMS) for row in rows_of} for world in WORLDS
    }


def _by_place(work: Callable[..., Rows], jobs: Sequence[tuple[Path, str, Any]]) -> Times:
    """(JOBS,) us of each row in each place, of one seed; `work` is given (folder, place, what)."""
    found: Times = {}
    for job, rows in parallel(work, jobs):
        print(*job[1:], flush=True)
        found |= {(row, world, job[1]): [us] for (row, world), us in rows.items()}
    return found


def _reward(folder: Path, place: str, scale: str) -> Rows:
    """IMPALA under a scale of rewards, on one system."""
    settings = [*LENGTH, f"places={EVERY[place].text}", f"reward_scale={scale}"]
    policy = trained(folder / "data", ONLINE, settings, 0)
    return _played(policy, f"reward: {scale}", 0, place=place)


def _unseen(folder: Path, place: str, name: str) -> Rows:
    """IMPALA on the other systems; sweeps of all say which configs there are."""
    data = folder / "all" / "data"
    for index, each in enumerate(SYSTEMS):
        sweep_place(data, each, seed=index)
    others = [EVERY[other].text for other in SYSTEMS if other != place]
    settings = [*LENGTH, f"steps={2 * STEPS}", f"places={','.join(others)}"]
    return _played(trained(data, ONLINE, settings, 0), name, 0, place=place)


class OnSeeds(NamedTuple):
    """A part in `PLACE`: what is done, with which arguments after folder and seed."""

    work: Callable[..., Rows]
    arguments: Sequence[tuple[str, ...]] = ((),)
    seeds: int = SEEDS


def _figures(folders: Sequence[Path], part: OnSeeds, base: Times) -> dict[str, Any]:
    """Gains of a part's rows by world, beside those of `base` (NCCL, oracle, random, rule)."""
    known = {row: times[: part.seeds] for row, times in base.items()}
    jobs = [
        (folder, seed, *more)
        for seed, folder in enumerate(folders[: part.seeds])
        for more in part.arguments
    ]
    found = known | _collected(part.work, jobs)
    names = dict.fromkeys(row for row, _, _ in found)
    return {
        world: {row: gain_row(found, row, world, (PLACE,)) for row in names} for world in WORLDS
    }


def _collected(work: Callable[..., Rows], jobs: Sequence[tuple[Any, ...]]) -> Times:
    """(JOBS,) us of each row by seed, in the order of the jobs."""
    rows_of = {}
    for job, rows in parallel(work, jobs):
        print(*job[1:], flush=True)
        rows_of[job] = rows
    found: Times = {}
    for job in jobs:
        for (row, world), us in rows_of[job].items():
            found.setdefault((row, world, PLACE), []).append(us)
    return found


ON_SEEDS: Final[Mapping[str, OnSeeds]] = MappingProxyType(
    {
        "variants": OnSeeds(_variant, [(name,) for name in VARIANTS]),
        "finalists": OnSeeds(_variant, [(name,) for name in FINALISTS], FINAL_SEEDS),
        "tabular": OnSeeds(_tabular),
        "orders": OnSeeds(_orders),
    }
)
#: Parts on several systems: what is trained, and its rows.
WORK: Final[Mapping[str, tuple[Callable[..., Rows], Sequence[str]]]] = MappingProxyType(
    {"rewards": (_reward, tuple(RewardScale)), "systems": (_unseen, (OTHERS,))}
)


def main() -> None:
    """The parts that are named, or all."""
    parts = sys.argv[1:] or list(PARTS)
    if set(parts) - set(PARTS):
        sys.exit(f"unknown part among {' '.join(parts)}: choose from {', '.join(PARTS)}")
    path = OUT / "online-ablations.json"
    figures: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        # Blocking calls are of one seed.
        seeds = max((ON_SEEDS[part].seeds for part in parts if part in ON_SEEDS), default=1)
        by_seed = [root / str(seed) for seed in range(seeds)]
        by_place = {place: root / place for place in SYSTEMS}
        if set(parts) & {*ON_SEEDS, "blocking"}:
            jobs = [(folder, PLACE, seed) for seed, folder in enumerate(by_seed)]
            base = _collected(_prepared, jobs)
        if set(parts) & set(WORK):
            known = _by_place(_prepared, [(folder, place, 0) for place, folder in by_place.items()])
        for part in parts:
            if part in WORK:
                figures[part] = _on_systems(by_place, known, *WORK[part])
            elif part == "measured":
                figures[part] = _measured(root / part / "data")
            elif part == "blocking":
                figures[part] = _blocking(by_seed[0])
            else:
                figures[part] = _figures(by_seed, ON_SEEDS[part], base)
            write_result("online-ablations", figures)


if __name__ == "__main__":
    main()
