"""Simulated jobs, call by call and in rounds: what is seen, in force when, and what it earns."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import polars as pl
import pytest
from gymnasium.utils.env_checker import check_env

import dynamiccl.train.online  # noqa: F401 - registers
from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import tuned, usable
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.steps import reward, sequence_steps, training_noise
from dynamiccl.datasets.store import read
from dynamiccl.errors import UnknownName
from dynamiccl.nccl import Collective
from dynamiccl.simulator.record_jobs import write_calls
from dynamiccl.simulator.scenario import MarkovLink, find_scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import WorkCall, Workload
from dynamiccl.simulator.world import World
from dynamiccl.train.environment import (
    LATE,
    Collectives,
    DecisionEnv,
    JobCalls,
    Rounds,
    Tables,
    Variation,
    delay_calls,
)
from tests.data_sets import sweep_text
from tests.rows import split_of

ID = "dynamiccl/Collectives-v0"
PROFILES = ["default"]
SWEEP = sweep_text(
    name='"quiet"',
    system='"h100-ib"',
    sizes='{ min = "64K", max = "64M", steps_per_octave = 4 }',
    seed=0,
)


def small_world(frame: pl.DataFrame) -> World:
    """Three task keys, in training bins, of two collectives."""
    sizes = [s for s in (1 << 18, 1 << 20, 1 << 22, 1 << 24) if split_of(s) is Split.TRAIN][:2]
    work = [*((Collective.AllReduce, size) for size in sizes), (Collective.AllGather, sizes[0])]
    calls = [WorkCall(Group(4, 8), collective, size, 500.0) for collective, size in work]
    catalogue = Catalogue.from_frame(usable(tuned(frame)))
    workload, around = Workload("small", (*calls, calls[0])), find_scenario("congested")
    return World(find_system("h100-ib"), workload, catalogue.configs, around)


def allowed(mask: np.ndarray, random: np.random.Generator) -> np.ndarray:
    drawn: np.ndarray = (random.random(mask.shape) * mask).argmax(axis=-1)
    return drawn


def test_what_is_seen_and_earned_is_what_datasets_makes_of_a_recording(tmp_path: Path) -> None:
    """One code: an environment's steps are those of the same calls, recorded and read back."""
    simulate(SWEEP, tmp_path / "quiet")
    sweep = read(tmp_path / "quiet")
    world, noise, default = small_world(sweep), training_noise(sweep), sweep.filter("is_default")
    keys = [(call.collective.wire, call.size_bytes) for call in world.keys]
    of_key = [default.filter(collective=name, size_bytes=size)["time_us"] for name, size in keys]
    reference_us = np.array([times.median() for times in of_key], dtype=np.float64)
    tables = replace(Tables.of(world, PROFILES, noise), reference_us=reference_us)
    recorded = []
    env, random = JobCalls(world, tables, 3), np.random.default_rng(0)
    observation = env.reset(seed=4)
    played: dict[tuple[int, int], list[tuple[dict[str, np.ndarray], int, float]]] = {}
    for _ in range(200):
        chosen = allowed(observation["mask"], random)
        key, before = env.jobs.key, observation
        observation, ran = env.step(chosen)
        earned = reward(ran.measured_us, tables.reference_us[key])
        recorded.append(ran)
        for job in range(3):
            seen = {name: part[job] for name, part in before.items()}
            steps = played.setdefault((job, int(key[job])), [])
            steps.append((seen, int(chosen[job]), float(earned[job])))
    write_calls(tmp_path / "played", world, "played", recorded)

    calls = read(tmp_path / "played", "calls")
    made, counts = sequence_steps(calls, sweep, Catalogue(world.configs), PROFILES, noise)
    assert made is not None
    assert counts["steps"] == 600
    assert len(made.starts) - 1 == len(played) == 9
    for episode in range(9):
        rows = np.arange(made.starts[episode], made.starts[episode + 1])
        first = float(made.reward[rows[0]])
        steps = min(played.values(), key=lambda each: abs(each[0][2] - first))
        played = {place: each for place, each in played.items() if each is not steps}
        found, mask, _ = made.observe(rows, np.full(len(rows), episode))
        assert len(rows) == len(steps)
        for name, part in (("window", found.window), ("context", found.context)):
            expected = np.stack([seen[name] for seen, _, _ in steps])
            np.testing.assert_allclose(part, expected, rtol=1e-5, atol=1e-5)
        assert (mask > 0.5).tolist() == [seen["mask"].tolist() for seen, _, _ in steps]
        assert made.action[rows].tolist() == [action for _, action, _ in steps]
        assert made.reward[rows] == pytest.approx([earned for *_, earned in steps], rel=1e-5)


@pytest.mark.parametrize("delay", [0, 5])
def test_a_decision_about_a_call_is_in_force_after_the_delay_and_not_before(delay: int) -> None:
    world = small().world
    env, random = JobCalls(world, small().tables, 1, delay=delay), np.random.default_rng(delay)
    observation = env.reset(seed=1)
    decided: list[tuple[int, int]] = []
    for step in range(60):
        key, chosen = int(env.jobs.key[0]), allowed(observation["mask"], random)
        decided.append((key, int(chosen[0])))
        observation, ran = env.step(chosen)
        known = [a for k, a in decided[: max(step + 1 - delay, 0)] if k == key]
        assert ran.action[0] == (known[-1] if known else 0)


def small(num_jobs: int = 2, variation: Variation | None = None, **rounds: Any) -> DecisionEnv:
    env = Collectives(workload="lora").jobs
    settings = {"period_calls": 8, "delay_rounds": 1, "episode_rounds": 40} | rounds
    return DecisionEnv(env.world, env.tables, num_jobs, Rounds(**settings), variation=variation)


def drawn(env: DecisionEnv, random: np.random.Generator) -> np.ndarray:
    return allowed(np.broadcast_to(env.tables.mask, (env.num_envs, *env.tables.mask.shape)), random)


def test_it_passes_gymnasiums_checker_and_episodes_end_after_their_rounds() -> None:
    with warnings.catch_warnings():
        # Features have no bounds, and of decisions -1 is one.
        warnings.filterwarnings("ignore", ".*(Box observation space|probably too).*")
        check_env(gymnasium.make(ID, workload="lora").unwrapped, skip_render_check=True)
    env = gymnasium.make(ID, workload="lora", episode_rounds=3)
    env.reset(seed=0)
    none = np.zeros(env.action_space.shape or (), dtype=np.int64)
    assert [env.step(none)[3] for _ in range(3)] == [False, False, True]
    assert not env.reset()[0]["window"].any()


def test_worlds_are_named_and_names_that_are_none_are_refused() -> None:
    env = gymnasium.make(ID, system="a100-nvswitch", workload="decode+lora")
    observation, _ = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    with pytest.raises(UnknownName, match="b300-nvlink"):
        gymnasium.make(ID, system="b301")
    for wrong in ({"period_calls": -1}, {"episode_rounds": 0}, {"seen_decisions": -1}):
        with pytest.raises(ValueError, match="a round needs a call"):
            gymnasium.make(ID, **wrong)


def test_the_period_is_a_brains_and_the_delay_is_the_agreements_time() -> None:
    env = Collectives(workload="decode").jobs
    assert env.rounds.delay_rounds == 1
    assert env.rounds.period_calls > 100
    assert Rounds.of(env.world, 10).delay_rounds == -(-env.rounds.period_calls // 10)
    assert delay_calls(env.world, 0.0) == 0
    assert delay_calls(env.world, 10.5 * env.world.nominal_us.mean()) == 11


@pytest.mark.parametrize("delay", [0, 3])
def test_a_decision_is_in_force_after_the_delay_and_a_late_one_leaves_the_last(delay: int) -> None:
    env = small(delay_rounds=delay, seen_decisions=5)
    observation = env.reset(seed=1)
    assert (observation["decided"] == LATE).all()
    random = np.random.default_rng(0)
    made: list[np.ndarray] = [np.zeros((2, len(env.world.keys)), dtype=np.int64)] * delay
    for _ in range(12):
        made.append(drawn(env, random))
        observation, info = env.step(made[-1])
        assert (info["in_force"] == made[-1 - delay]).all()
        assert (observation["decided"][:, :, -1] == made[-1]).all()
    for _ in range(6):
        observation, info = env.step(np.full_like(made[-1], LATE))
    assert (info["in_force"] == made[-1]).all()
    assert (observation["decided"] == made[-1][:, :, None]).all()


def test_a_round_is_the_calls_of_the_same_world_call_by_call() -> None:
    env = small(num_jobs=3, delay_rounds=0)
    calls = JobCalls(env.world, env.tables, 3)
    env.reset(seed=5)
    calls.reset(seed=5)
    random, job = np.random.default_rng(1), np.arange(3)
    for _ in range(10):
        chosen = drawn(env, random)
        true_us = np.zeros(3)
        rewards: dict[tuple[int, int], list[float]] = {}
        for _ in range(8):
            key = calls.jobs.key
            _, ran = calls.step(chosen[job, key])
            earned = reward(ran.measured_us, env.tables.reference_us[key])
            true_us += ran.true_us
            for each in job:
                rewards.setdefault((int(each), int(key[each])), []).append(float(earned[each]))
        observation, told = env.step(chosen)
        assert told["true_us"] == pytest.approx(true_us)
        for place, of_key in rewards.items():
            assert told["calls"][place] == len(of_key)
            assert told["earned"][place] == pytest.approx(np.mean(of_key))
            assert observation["earned"][place] == pytest.approx(np.mean(of_key), rel=1e-6)


def test_a_masked_action_is_refused_by_the_jobs_and_left_to_nccl_by_one() -> None:
    one = Collectives(system="h100-ib", workload="moe", scenario="quiet")
    env = DecisionEnv(one.jobs.world, one.jobs.tables, 2, one.jobs.rounds)
    env.reset(seed=0)
    key = int((~env.tables.mask).any(axis=1).argmax())
    action = int((~env.tables.mask[key]).argmax())
    chosen = np.zeros((2, len(env.world.keys)), dtype=np.int64)
    chosen[1, key] = action
    with pytest.raises(ValueError, match=f"job 1: action {action} is masked for"):
        env.step(chosen)
    one.reset(seed=0)
    for _ in range(3):
        _, earned, *_, info = one.step(chosen[1])
    assert info["in_force"][key] == 0
    of_calls = np.repeat(info["earned"], info["calls"])
    assert earned == pytest.approx(of_calls.mean())


def test_the_pages_example_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    assert names["env"].action_space.contains(names["env"].action_space.sample())
    assert names["info"]["true_us"] > 0


def link_of(env: DecisionEnv) -> MarkovLink:
    (link,) = [each for each in env.world.scenario.link if isinstance(each, MarkovLink)]
    return link


def test_strengths_and_dwell_times_are_drawn_within_the_factor() -> None:
    env = small(variation=Variation(1.5, 0.0))
    usual, found = link_of(env), []
    for seed in range(40):
        env.reset(seed=seed)
        link = link_of(env)
        slow = zip(link.slowdowns, usual.slowdowns, strict=True)
        strength = [(now - 1) / (before - 1) for now, before in slow if before > 1]
        dwell = [now / before for now, before in zip(link.dwell_us, usual.dwell_us, strict=True)]
        for each in (strength, dwell):  # one factor for all
            assert each == pytest.approx([each[0]] * len(each))
        found.append((strength[0], dwell[0]))
    for factors in np.array(found).T:
        assert 1 / 1.5 <= factors.min() < 0.8
        assert 1.25 < factors.max() <= 1.5
    last = link_of(env)
    env.reset()
    assert link_of(env) != last  # every episode is another world, and a seed repeats it
    env.reset(seed=39)
    assert link_of(env) == last


def test_times_of_a_cell_move_together_and_what_data_say_stays() -> None:
    env, before = small(variation=Variation(1.0, 0.2)), small()
    env.reset(seed=3)
    world, usual = env.world, before.world
    ratio = world.quiet_us / usual.quiet_us
    pairs = {*zip(world.algorithm.flat, world.protocol.flat, strict=True)}
    cells = [ratio[(world.algorithm == a) & (world.protocol == p)] for a, p in pairs if a >= 0]
    assert all(np.allclose(each, each[0]) for each in cells)
    assert len({round(float(each[0]), 9) for each in cells}) == len(cells)
    assert link_of(env) == link_of(before)
    assert env.tables.reference_us == pytest.approx(world.quiet_us[:, ABSTAIN_ACTION])
    assert np.array_equal(env.tables.context, before.tables.context)
    assert np.array_equal(env.tables.mask, before.tables.mask)
