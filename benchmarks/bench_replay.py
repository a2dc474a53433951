"""Batches from columns against d3rlpy's own replay buffer: time and memory.

    python benchmarks/bench_replay.py

*Sampling*: a batch of 256 transitions out of 200,000 steps (1,000 episodes of 200 calls, 64
actions), d3rlpy's ReplayBuffer with its own picker against `Replay`: 1 step, and 3 steps with
gamma 0.5. d3rlpy's holds windows and masks made in advance, ours makes them. *Steps*: gradient
steps with either, the same networks (one member, double DQN, 3 steps). Both are minima of 30
rounds in turns, of 10 batches or 3 steps each. *Ready*: from columns in memory to a `Replay` over
10 million steps, and the memory that it takes.

Writes out/bench/replay.json. One thread.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import d3rlpy
import numpy as np
import torch
from d3rlpy.dataset import (
    BasicTransitionPicker,
    Episode,
    InfiniteBuffer,
    MultiStepTransitionPicker,
    ReplayBuffer,
)
from harness import write_result

from dynamiccl.datasets.features import FEATURES, HISTORY_SLICE
from dynamiccl.datasets.history import CallColumns
from dynamiccl.datasets.steps import Steps, Tasks
from dynamiccl.nccl import Algorithm, Protocol
from dynamiccl.train.algorithms import make_algorithm
from dynamiccl.train.recipes import make_recipe
from dynamiccl.train.replay import Replay

BATCH, NUM_ACTIONS, NUM_TASKS, EPISODE = 256, 64, 500, 200
NUM_STEPS, GAMMA = 3, 0.5
ROUNDS: Final = 30
#: Columns of a step, and how they are kept: 30 bytes in all.
STEP_TYPES: Final[dict[str, type[np.generic]]] = {
    "size_bytes": np.int64,
    "time_us": np.float32,
    "algorithm": np.int8,
    "protocol": np.int8,
    "num_channels": np.int16,
    "interference": np.float32,
    "skew_us": np.float32,
    "action": np.int16,
    "reward": np.float32,
}


def main() -> None:
    """Take all the figures."""
    torch.set_num_threads(1)
    figures: dict[str, float | int | str | None] = {}
    steps = make_steps(200_000)
    episodes = list(episodes_of(steps))
    one = BasicTransitionPicker()
    many = MultiStepTransitionPicker(NUM_STEPS, GAMMA)
    for name, picker, replay in (
        ("1step", one, Replay(steps, BATCH, seed=0)),
        ("nstep", many, Replay(steps, BATCH, seed=0, num_steps=NUM_STEPS, gamma=GAMMA)),
    ):
        stock = ReplayBuffer(InfiniteBuffer(), episodes=episodes, transition_picker=picker)
        theirs, ours = interleaved(
            lambda s=stock: s.sample_transition_batch(BATCH), replay.sample, repeats=10
        )
        figures |= {
            f"sampling_d3rlpy_{name}_ms": 1e3 * theirs,
            f"sampling_{name}_ms": 1e3 * ours,
            f"sampling_speedup_{name}": theirs / ours,
        }
    for name, recipe in (("mlp", "ddqn-dueling"), ("lstm", "drqn-lstm")):
        theirs, ours = gradient_steps(recipe, steps, stock, replay)
        figures |= {
            f"steps_d3rlpy_{name}_per_s": 1.0 / theirs,
            f"steps_{name}_per_s": 1.0 / ours,
            f"steps_speedup_{name}": theirs / ours,
        }
    figures |= in_own_process(ready_figures)
    write_result("replay", figures)


def make_steps(num_steps: int, *, seed: int = 0) -> Steps:
    """Terminated episodes of equal length."""
    random = np.random.default_rng(seed)
    columns: dict[str, Any] = {
        "size_bytes": random.integers(1, 1 << 30, num_steps),
        "time_us": np.exp2(random.uniform(0, 20, num_steps)),
        "algorithm": random.integers(0, len(Algorithm), num_steps),
        "protocol": random.integers(0, len(Protocol), num_steps),
        "num_channels": random.integers(1, 65, num_steps),
        "interference": random.random(num_steps),
        "skew_us": random.random(num_steps),
        "action": random.integers(0, NUM_ACTIONS, num_steps),
        "reward": -random.random(num_steps),
    }
    typed = {name: columns[name].astype(kind) for name, kind in STEP_TYPES.items()}
    return over(typed, make_tasks(random))


def make_tasks(random: np.random.Generator) -> Tasks:
    """Cold contexts and masks."""
    context = np.zeros((NUM_TASKS, len(FEATURES)), dtype=np.float32)
    context[:, : HISTORY_SLICE.start] = random.random((NUM_TASKS, HISTORY_SLICE.start))
    mask = (random.random((NUM_TASKS, NUM_ACTIONS)) < 0.6).astype(np.float32)
    mask[:, 0] = 1.0
    return Tasks(context, mask, np.arange(NUM_TASKS) % 5)


def over(columns: dict[str, Any], tasks: Tasks) -> Steps:
    """Steps over columns of calls, with episodes of equal length."""
    columns = dict(columns)
    action, reward = columns.pop("action"), columns.pop("reward")
    num_episodes = len(action) // EPISODE
    return Steps(
        tasks=tasks,
        starts=np.arange(num_episodes + 1) * EPISODE,
        task=np.arange(num_episodes) % NUM_TASKS,
        terminated=np.ones(num_episodes, dtype=np.bool_),
        calls=CallColumns(**columns),
        action=action,
        reward=reward,
    )


def episodes_of(steps: Steps) -> Iterator[Episode]:
    """The same steps as d3rlpy episodes."""
    rows = np.arange(len(steps))
    seen, mask, _ = steps.observe(rows, steps.episode_of(rows))
    for start in steps.starts[:-1]:
        part = slice(int(start), int(start) + EPISODE)
        yield Episode(
            observations=[seen.window[part], seen.context[part], mask[part]],
            actions=steps.action[part, None].astype(np.float32),
            rewards=steps.reward[part, None],
            terminated=True,
        )


def interleaved(
    theirs: Callable[[], object], ours: Callable[[], object], *, repeats: int
) -> tuple[float, float]:
    """Minimum seconds of each, measured alternately."""
    least = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        for index, call in enumerate((theirs, ours)):
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            least[index] = min(least[index], (time.perf_counter() - began) / repeats)
    return least[0], least[1]


def gradient_steps(
    recipe_name: str, steps: Steps, stock: ReplayBuffer, replay: Replay
) -> tuple[float, float]:
    """Minimum seconds of a gradient step with d3rlpy's buffer, and with ours."""
    settings = ["num_members=1", f"gamma={GAMMA}", f"num_steps={NUM_STEPS}", "entropy_start=0"]
    d3rlpy.seed(0)
    algorithm = make_algorithm(make_recipe(recipe_name, settings), steps)
    return interleaved(
        lambda: algorithm.update(stock.sample_transition_batch(BATCH)),
        lambda: algorithm.update(replay.sample()),
        repeats=3,
    )


def in_own_process(measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Run a measurement in a new process, so that its memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure)


def ready_figures() -> dict[str, float]:
    """Time and memory to prepare columns of 10 million steps."""
    num_steps = 10_000_000
    made = make_steps(num_steps)
    columns = {
        name: getattr(made if name in {"action", "reward"} else made.calls, name)
        for name in STEP_TYPES
    }
    tasks = made.tasks
    del made
    before = anonymous_mib()
    began = time.perf_counter()
    replay = Replay(over(columns, tasks), BATCH, seed=0, num_steps=NUM_STEPS, gamma=GAMMA)
    replay.sample()
    seconds = time.perf_counter() - began
    return {
        "ready_10m_s": seconds,
        "ready_10m_mib": anonymous_mib() - before,
        "columns_10m_mib": sum(column.nbytes for column in columns.values()) / 2**20,
        "sampling_10m_ms": 1e3 * least_seconds(replay.sample),
    }


def least_seconds(call: Callable[[], object], rounds: int = 100) -> float:
    """Minimum seconds of one call."""
    least = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - began)
    return least


def anonymous_mib() -> float:
    """Anonymous memory of this process in MiB (`RssAnon`)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) / 1024.0


if __name__ == "__main__":
    main()
