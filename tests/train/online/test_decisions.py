"""Rounds of decisions in the simulated world: what is in force when, and what it earns."""

import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import dynamiccl.train.online  # noqa: F401 - registers
from dynamiccl.datasets.reward import reward
from dynamiccl.errors import UnknownName, UserError
from dynamiccl.train.environment import LATE, Course, DecisionEnv, JobCalls, Rounds, make_vector

ID = "dynamiccl/Collectives-v0"


def allowed(env: DecisionEnv, random: np.random.Generator) -> np.ndarray:
    mask = np.broadcast_to(env.tables.mask, (env.num_envs, *env.tables.mask.shape))
    drawn: np.ndarray = (random.random(mask.shape) * mask).argmax(axis=2)
    return drawn


def small(num_jobs: int = 2, **rounds: Any) -> DecisionEnv:
    env = make_vector(num_jobs, workload="lora", episode_rounds=40)
    settings = {"period_calls": 8, "delay_rounds": 1, "episode_rounds": 40} | rounds
    return DecisionEnv(env.world, env.tables, num_jobs, Rounds(**settings))


def test_it_passes_gymnasiums_checker() -> None:
    with warnings.catch_warnings():
        # Features have no bounds, and of decisions -1 is one.
        warnings.filterwarnings("ignore", ".*(Box observation space|probably too).*")
        check_env(gymnasium.make(ID, workload="lora").unwrapped, skip_render_check=True)


def test_worlds_are_named_and_names_that_are_none_are_refused() -> None:
    env = gymnasium.make(ID, system="a100-nvswitch", workload=["decode", "lora"])
    observation, _ = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    with pytest.raises(UnknownName, match="b300-nvlink"):
        gymnasium.make(ID, system="b301")
    with pytest.raises(UserError, match="has no group of 3 nodes"):
        gymnasium.make(ID, num_nodes=3)


def test_the_period_is_a_brains_and_the_delay_covers_agreement() -> None:
    env = make_vector(workload="decode")
    assert env.rounds.delay_rounds == 1
    assert env.rounds.period_calls > 100
    assert Rounds.of(env.world, 10).delay_rounds == -(-env.rounds.period_calls // 10)


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_decision_is_in_force_after_the_delay_and_not_before(delay: int) -> None:
    env = small(delay_rounds=delay, seen_decisions=5)
    observation, _ = env.reset(seed=1)
    assert (observation["decided"] == LATE).all()
    random = np.random.default_rng(0)
    made: list[np.ndarray] = [np.zeros((2, len(env.world.keys)), dtype=np.int64)] * delay
    for _ in range(12):
        made.append(allowed(env, random))
        observation, _, _, _, info = env.step(made[-1])
        assert (info["in_force"] == made[-1 - delay]).all()
        assert (observation["decided"][:, :, -1] == made[-1]).all()


def test_who_is_late_leaves_the_last_decision_in_force() -> None:
    env = small(delay_rounds=1)
    env.reset(seed=1)
    chosen = allowed(env, np.random.default_rng(2))
    assert (chosen > 0).any()
    env.step(chosen)
    late = np.full_like(chosen, LATE)
    for _ in range(6):
        observation, _, _, _, info = env.step(late)
        assert (info["in_force"] == chosen).all()
    assert (observation["decided"] == chosen[:, :, None]).all()


def test_a_round_is_the_calls_of_the_same_world_call_by_call() -> None:
    env = small(num_jobs=3, delay_rounds=0)
    calls = JobCalls(env.world, env.tables, 3, Course(episode_calls=320))
    env.reset(seed=5)
    calls.reset(seed=5)
    random = np.random.default_rng(1)
    job = np.arange(3)
    for _ in range(10):
        chosen = allowed(env, random)
        true_us = np.zeros(3)
        rewards: dict[tuple[int, int], list[float]] = {}
        for _ in range(8):
            key = calls.jobs.key
            _, ran = calls.step(chosen[job, key])
            earned = reward(ran.measured_us, env.tables.reference_us[key])
            true_us += ran.true_us
            for each in job:
                rewards.setdefault((int(each), int(key[each])), []).append(float(earned[each]))
        observation, earned, _, _, told = env.step(chosen)
        assert told["true_us"] == pytest.approx(true_us)
        for place, of_key in rewards.items():
            assert told["calls"][place] == len(of_key)
            assert told["earned"][place] == pytest.approx(np.mean(of_key))
            assert observation["earned"][place] == pytest.approx(np.mean(of_key), rel=1e-6)
        mine = [
            np.mean([v for (j, _), vs in rewards.items() if j == each for v in vs]) for each in job
        ]
        assert earned == pytest.approx(mine)


def test_a_masked_action_is_refused_by_the_jobs_and_left_to_nccl_by_one() -> None:
    env = make_vector(2, system="h100-ib", workload="moe", scenario="quiet")
    env.reset(seed=0)
    key = int((~env.tables.mask).any(axis=1).argmax())
    action = int((~env.tables.mask[key]).argmax())
    chosen = np.zeros((2, len(env.world.keys)), dtype=np.int64)
    chosen[1, key] = action
    with pytest.raises(ValueError, match=f"job 1: action {action} is masked for"):
        env.step(chosen)
    one = gymnasium.make(ID, system="h100-ib", workload="moe", scenario="quiet")
    one.reset(seed=0)
    for _ in range(3):
        *_, info = one.step(chosen[1])
    assert info["in_force"][key] == 0


def test_episodes_end_after_their_rounds_and_begin_anew() -> None:
    env = small(episode_rounds=3)
    env.reset(seed=0)
    none = np.zeros((2, len(env.world.keys)), dtype=np.int64)
    assert [env.step(none)[3].all() for _ in range(3)] == [False, False, True]
    observation, earned, _, over, _ = env.step(none)
    assert not observation["window"].any()
    assert not earned.any()
    assert not over.any()


def test_rounds_without_length_are_refused() -> None:
    for wrong in ({"period_calls": 0}, {"episode_rounds": 0}, {"seen_decisions": -1}):
        with pytest.raises(ValueError, match="a round needs a call"):
            Rounds(**({"period_calls": 1, "delay_rounds": 0} | wrong))


def test_the_pages_example_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulator.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    assert names["env"].action_space.contains(names["env"].action_space.sample())
    assert names["info"]["true_us"] > 0
