"""Random training steps: long and short episodes, terminated and cut-off ones."""

import numpy as np

from dynamiccl.datasets.features import FEATURES, HISTORY_SLICE
from dynamiccl.datasets.history import WINDOW_LENGTH, CallColumns
from dynamiccl.datasets.steps import Steps
from dynamiccl.nccl import Algorithm, Protocol

NUM_TASKS = 3
LENGTHS = (1, 2, 3, 5, 9, 20, 1, 2, 14)


def make_steps(
    *,
    seed: int = 0,
    lengths: tuple[int, ...] = LENGTHS,
    num_actions: int = 6,
    own_windows: bool = False,
) -> Steps:
    """Every second episode is cut off; some call attributes are unknown."""
    random = np.random.default_rng(seed)
    num_steps = sum(lengths)
    known = random.random((4, num_steps)) < 0.8
    algorithm = np.where(known[0], random.integers(0, len(Algorithm), num_steps), -1)
    protocol = np.where(known[1], random.integers(0, len(Protocol), num_steps), -1)
    calls = CallColumns(
        size_bytes=random.integers(1, 1 << 30, num_steps),
        time_us=np.exp2(random.uniform(0, 20, num_steps)).astype(np.float32),
        algorithm=algorithm.astype(np.int8),
        protocol=protocol.astype(np.int8),
        num_channels=np.where(known[2], random.integers(1, 65, num_steps), 0).astype(np.int16),
        interference=np.where(known[3], random.random(num_steps), -1.0).astype(np.float32),
        skew_us=np.where(known[0], random.random(num_steps), -1.0).astype(np.float32),
    )
    context = np.zeros((NUM_TASKS, len(FEATURES)), dtype=np.float32)
    context[:, : HISTORY_SLICE.start] = random.random((NUM_TASKS, HISTORY_SLICE.start))
    mask = (random.random((NUM_TASKS, num_actions)) < 0.6).astype(np.float32)
    mask[:, 0] = 1.0
    windows = random.integers(-1, num_steps, (num_steps, WINDOW_LENGTH))
    # Right-aligned: whatever stands before padding is padding.
    windows = np.where(np.minimum.accumulate(windows[:, ::-1], axis=1)[:, ::-1] < 0, -1, windows)
    return Steps(
        context=context,
        mask=mask,
        group=np.arange(NUM_TASKS) % 2,
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        task=np.arange(len(lengths)) % NUM_TASKS,
        terminated=np.arange(len(lengths)) % 2 == 0,
        calls=calls,
        action=random.integers(0, num_actions, num_steps),
        reward=-random.random(num_steps).astype(np.float32),
        windows=windows if own_windows else None,
    )
