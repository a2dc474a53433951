"""Simulated jobs call by call: delays, and that nothing is computed twice."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dynamiccl.collect.run import run_sweep
from dynamiccl.collect.simulated import SimulatorRunner
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.sweep import parse_sweep
from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import tuned, usable
from dynamiccl.datasets.history import WINDOW_COLUMN
from dynamiccl.datasets.reward import reward
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.steps import sequence_steps, training_noise
from dynamiccl.datasets.store import read
from dynamiccl.nccl import Collective
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.record_jobs import write_calls
from dynamiccl.simulator.scenario import Scenario, find_scenario
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import WorkCall, Workload
from dynamiccl.simulator.world import World
from dynamiccl.train.environment import Course, JobCalls, Tables, delay_calls
from tests.splits import split_of

SHAPE = Group(4, 8)
PROFILES = ["default"]
WHOLE = Course()
SWEEP = """
name = "quiet"
system = "h100-ib"
collectives = ["AllReduce", "AllGather"]
algorithms = ["Ring", "Tree", "NVLSTree"]
groups = [{ num_nodes = 4, ranks_per_node = 8 }]
sizes = { min = "64K", max = "64M", steps_per_octave = 4 }
nccl_version = "2.27.5"
cycles = 3
"""


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    out = tmp_path_factory.mktemp("quiet")
    parsed = parse_sweep(SWEEP, where="test")
    strategy = make_strategy(parsed.file, parsed.trials)
    run_sweep(parsed, strategy, SimulatorRunner(parsed.file), out, resume=False)
    return read(out)


def small_workload() -> Workload:
    """Three task keys, in training bins, of two collectives."""
    sizes = [s for s in (1 << 18, 1 << 20, 1 << 22, 1 << 24) if split_of(s) is Split.TRAIN][:2]
    assert len(sizes) == 2
    calls = [WorkCall(SHAPE, Collective.AllReduce, size, 500.0) for size in sizes]
    gather = WorkCall(SHAPE, Collective.AllGather, sizes[0], 500.0)
    return Workload("small", (*calls, gather, calls[0]))


def small_world(frame: pl.DataFrame, scenario: Scenario | None = None) -> World:
    catalogue = Catalogue.from_frame(usable(tuned(frame)))
    around = scenario or find_scenario("congested")
    return World(find_system("h100-ib"), small_workload(), catalogue.configs, around)


def small_env(frame: pl.DataFrame, jobs: int = 3, course: Course = WHOLE) -> JobCalls:
    world = small_world(frame)
    return JobCalls(world, Tables.of(world, PROFILES, training_noise(frame)), jobs, course)


def allowed(observation: dict[str, np.ndarray], random: np.random.Generator) -> np.ndarray:
    mask = observation["mask"]
    drawn: np.ndarray = (random.random(mask.shape) * mask).argmax(axis=1)
    return drawn


@dataclass(frozen=True)
class Step:
    seen: dict[str, np.ndarray]
    action: int
    reward: float


def references(frame: pl.DataFrame, world: World) -> np.ndarray:
    """NCCL's default as the sweep measured it, by task key."""
    default = frame.filter("is_default")
    return np.array(
        [
            default.filter(
                pl.col("collective") == call.collective.wire,
                pl.col("size_bytes") == call.size_bytes,
            )["time_us"].median()
            for call in world.keys
        ],
        dtype=np.float64,
    )


def test_what_is_seen_done_and_earned_is_what_datasets_makes_of_the_recording(
    sweep: pl.DataFrame, tmp_path: Path
) -> None:
    """One code: an environment's steps are those of the same calls, recorded and read back."""
    world = small_world(sweep)
    noise = training_noise(sweep)
    tables = replace(Tables.of(world, PROFILES, noise), reference_us=references(sweep, world))
    recorded = []
    env = JobCalls(world, tables, 3, Course(episode_calls=200))
    random = np.random.default_rng(0)
    observation = env.reset(seed=4)
    played: dict[tuple[int, int], list[Step]] = {}
    for _ in range(200):
        chosen = allowed(observation, random)
        key, before = env.jobs.key, observation
        observation, ran = env.step(chosen)
        earned = reward(ran.measured_us, tables.reference_us[key])
        recorded.append(ran)
        for job in range(3):
            seen = {name: part[job] for name, part in before.items()}
            one = Step(seen, int(chosen[job]), float(earned[job]))
            played.setdefault((job, int(key[job])), []).append(one)
    write_calls(tmp_path, world, "played", recorded)

    calls = read(tmp_path, "calls")
    made, counts = sequence_steps(calls, sweep, Catalogue(world.configs), PROFILES, noise)
    assert made is not None
    assert counts["steps"] == 600
    assert len(made.starts) - 1 == len(played) == 9
    for episode in range(9):
        rows = np.arange(made.starts[episode], made.starts[episode + 1])
        first = float(made.reward[rows[0]])
        steps = min(played.values(), key=lambda each: abs(each[0].reward - first))
        played = {place: each for place, each in played.items() if each is not steps}
        found, mask, _ = made.observe(rows, np.full(len(rows), episode))
        assert len(rows) == len(steps)
        for name, part in (("window", found.window), ("context", found.context)):
            expected = np.stack([step.seen[name] for step in steps])
            np.testing.assert_allclose(part, expected, rtol=1e-5, atol=1e-5)
        assert (mask > 0.5).tolist() == [step.seen["mask"].tolist() for step in steps]
        assert made.action[rows].tolist() == [step.action for step in steps]
        assert made.reward[rows] == pytest.approx([step.reward for step in steps], rel=1e-5)


def test_rewards_are_minus_one_where_the_default_runs_undisturbed(sweep: pl.DataFrame) -> None:
    silent = find_scenario("quiet").model_copy(update={"first_use_us": 0.0, "switch_us": 0.0})
    world = small_world(sweep, silent)
    tables = Tables.of(world, PROFILES, training_noise(sweep))
    env = JobCalls(world, tables, 64, Course())
    env.reset(seed=0)
    made = [env.step(np.zeros(64, dtype=np.int64))[1] for _ in range(100)]
    earned = np.concatenate([reward(r.measured_us, tables.reference_us[r.key]) for r in made])
    assert np.median(earned) == pytest.approx(-1.0, abs=0.002)


def test_a_decision_is_in_force_after_the_delay_and_not_before(sweep: pl.DataFrame) -> None:
    for delay in (0, 1, 5):
        env = small_env(sweep, jobs=1, course=Course(episode_calls=100, delay_calls=delay))
        observation = env.reset(seed=1)
        random = np.random.default_rng(delay)
        decided: list[tuple[int, int]] = []
        for step in range(60):
            key = int(env.jobs.key[0])
            chosen = allowed(observation, random)
            decided.append((key, int(chosen[0])))
            observation, ran = env.step(chosen)
            known = [a for k, a in decided[: max(step + 1 - delay, 0)] if k == key]
            assert ran.action[0] == (known[-1] if known else 0)


def test_a_masked_action_is_refused_with_its_job_and_call(sweep: pl.DataFrame) -> None:
    env = small_env(sweep)
    env.reset(seed=0)
    mask = env.tables.mask[env.jobs.key]
    bad = (~mask).argmax(axis=1)
    assert not mask[np.arange(3), bad].all()
    with pytest.raises(ValueError, match=r"job \d: action \d+ is masked for All"):
        env.step(bad)


def test_equal_seeds_play_alike_and_others_do_not(sweep: pl.DataFrame) -> None:
    def times(seed: int) -> np.ndarray:
        env = small_env(sweep)
        env.reset(seed=seed)
        zeros = np.zeros(3, dtype=np.int64)
        return np.stack([env.step(zeros)[1].measured_us for _ in range(20)])

    assert (times(1) == times(1)).all()
    assert (times(1) != times(2)).any()


class HalfOfIt:
    """A watch that tells each key's number of calls, over a hundred."""

    def __init__(self) -> None:
        self.count: dict[int, int] = {}

    def observe(
        self, stream: np.ndarray, log_time: np.ndarray, *, key: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        assert np.isfinite(log_time).all()
        assert (stream >= key).all()
        for each in key.tolist():
            self.count[each] = self.count.get(each, 0) + 1
        level = np.array([self.count[each] / 100.0 for each in key.tolist()])
        return level > 1.0, level


def test_what_a_watch_tells_is_seen_with_the_call(sweep: pl.DataFrame) -> None:
    world = small_world(sweep)
    tables = Tables.of(world, PROFILES, training_noise(sweep))
    env = JobCalls(world, tables, 2, Course(), HalfOfIt)
    env.reset(seed=0)
    valid, at = WINDOW_COLUMN["valid"], WINDOW_COLUMN["interference"]
    for _ in range(30):
        observation = env.step(np.zeros(2, dtype=np.int64))[0]
    for window in observation["window"]:
        levels = window[window[:, valid] > 0, at]
        assert np.diff(levels) == pytest.approx(np.full(len(levels) - 1, 0.01), abs=1e-6)


def test_the_delay_is_the_agreements_time_over_that_between_calls(sweep: pl.DataFrame) -> None:
    world = small_world(sweep)
    assert delay_calls(world, 0.0) == 0
    assert delay_calls(world, 10.5 * world.nominal_us.mean()) == 11


def test_a_course_without_calls_is_refused() -> None:
    with pytest.raises(ValueError, match="episode"):
        Course(episode_calls=0)
    with pytest.raises(ValueError, match="delay"):
        Course(delay_calls=-1)
