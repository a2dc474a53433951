"""Steps in files that are mapped, not read: as many as the disk holds, in the memory of a few.

A directory holds one `.npy` file a column (NumPy's format, version 1.0), so any tool can read them.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.history import CallColumns
from dynamiccl.datasets.steps import Steps, Tasks
from dynamiccl.errors import CorruptFile, MissingPath

_TASKS: Final = ("context", "mask", "group")
_EPISODES: Final = ("starts", "task", "terminated")
#: Columns of a step, and how they are stored: 30 bytes in all.
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


def write_steps(
    directory: Path, parts: Iterable[Steps], *, num_steps: int, num_episodes: int
) -> None:
    """Write steps part by part, each with the same tasks and whole episodes.

    Only one part need be in memory. Raises ValueError when there are not as many as was said, and
    for windows that are not those of the episode: these cannot be kept here.
    """
    directory.mkdir(parents=True, exist_ok=True)
    columns = {
        name: _create(directory / f"{name}.npy", kind, num_steps)
        for name, kind in STEP_TYPES.items()
    }
    starts = _create(directory / "starts.npy", np.int64, num_episodes + 1)
    task = _create(directory / "task.npy", np.int64, num_episodes)
    terminated = _create(directory / "terminated.npy", np.bool_, num_episodes)
    step = episode = 0
    for part in parts:
        if part.windows is not None:
            raise ValueError("windows of their own cannot be written")
        for name, column in columns.items():
            column[step : step + len(part)] = _column(part, name)
        episodes = slice(episode, episode + len(part.task))
        starts[episodes] = part.starts[:-1] + step
        task[episodes], terminated[episodes] = part.task, part.terminated
        if step == 0:
            for name in _TASKS:
                np.save(directory / f"{name}.npy", getattr(part.tasks, name))
        step, episode = step + len(part), episode + len(part.task)
    starts[-1] = step
    if (step, episode) != (num_steps, num_episodes):
        raise ValueError(
            f"{step} steps of {episode} episodes instead of {num_steps} of {num_episodes}"
        )


def open_steps(directory: Path) -> Steps:
    """The steps of a directory, mapped; raises MissingPath and CorruptFile."""
    columns = {name: _open(directory, name) for name in STEP_TYPES}
    tasks = Tasks(**{name: np.asarray(_open(directory, name)) for name in _TASKS})
    episodes = {name: _open(directory, name) for name in _EPISODES}
    action, reward = columns.pop("action"), columns.pop("reward")
    try:
        calls = CallColumns(**columns)
        return Steps(tasks=tasks, **episodes, calls=calls, action=action, reward=reward)
    except ValueError as error:
        raise CorruptFile(f"{directory}: {error}; write it again") from error


def _create(path: Path, kind: type[np.generic], size: int) -> npt.NDArray[Any]:
    return np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=(size,))


def _open(directory: Path, name: str) -> npt.NDArray[Any]:
    path = directory / f"{name}.npy"
    if not path.exists():
        raise MissingPath("steps", path, "give a directory that write_steps made")
    try:
        # As plain arrays: each look at a numpy.memmap costs microseconds of bookkeeping.
        return np.asarray(np.load(path, mmap_mode="r"))
    except ValueError as error:
        raise CorruptFile(f"{path} is no column of steps: {error}") from error


def _column(part: Steps, name: str) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = getattr(part if name in {"action", "reward"} else part.calls, name)
    return found
