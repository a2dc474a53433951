"""From measurements to transitions: observation, action, reward, one-step episodes.

A static sweep has no order of its own, so every measurement is an episode of one step (gamma = 0).
Each becomes one cold row; where its run measured the same task key more than once, one warm row is
added whose window holds the *other* measurements, so at least half of all rows are cold and no row
sees its own time. Only training bins are read: no window holds a held-out time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import NOISE_KEY, independent, noise_bands, quiet, tuned, usable
from dynamiccl.datasets.features import (
    HISTORY_FEATURES,
    STATIC_FEATURES,
    WINDOW_LENGTH,
    Float32Array,
    cold_observations,
)
from dynamiccl.datasets.history import Call, history_arrays
from dynamiccl.datasets.reward import ReferenceKind, reward, with_reference
from dynamiccl.datasets.splits import Split, with_split
from dynamiccl.errors import NotEnoughData
from dynamiccl.nccl import Algorithm, Protocol

#: (collective, size bin, communicator group), and the run that measured them together.
_WINDOW_KEY: Final = (
    "system",
    "sweep",
    "run",
    "collective",
    "bin",
    "num_nodes",
    "ranks_per_node",
    "launch_profile",
    "in_place",
)
#: Configs that were measured here are what an action mask allows.
_MASK_KEY: Final = ("system", "collective", "num_nodes", "ranks_per_node", "launch_profile")


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the rows of a data set on the way to training."""

    rows: int
    unusable: int
    interfered: int
    not_tuned: int
    held_out: int
    without_action: int
    without_reward: int
    reference_interpolated: int
    cold: int
    warm: int


@dataclass(frozen=True, slots=True)
class Transitions:
    """N one-step transitions; every one of them ends its episode."""

    window: Float32Array  # (N, K, W)
    context: Float32Array  # (N, F)
    mask: Float32Array  # (N, A), 1 = allowed
    action: npt.NDArray[np.int64]  # (N,)
    reward: Float32Array  # (N,)
    is_cold: npt.NDArray[np.bool_]  # (N,)
    group: npt.NDArray[np.int64]  # (N,), number of the row's (system, collective)
    noise: pl.DataFrame  # `noise_band` by NOISE_KEY, of the training bins
    counts: Counts

    def __len__(self) -> int:
        return len(self.action)


def training_transitions(
    frame: pl.DataFrame, catalogue: Catalogue, profiles: Sequence[str], *, seed: int
) -> Transitions:
    """Build the training transitions of a measurements frame.

    `seed` fixes which other measurements fill a warm window. Raises NotEnoughData when no row is
    left, with the counts that say why.
    """
    rows, counts = _training_rows(frame, catalogue)
    if rows.is_empty():
        raise NotEnoughData(
            f"no row to train on: {counts}; measure NCCL's default (quiet, launch profile "
            "'default') at sizes in even octaves, beside the forced configs"
        )
    rows = rows.with_row_index("row")
    noise = training_noise(frame)
    rows = with_noise(rows, noise)
    mask = _masks(frame, rows, catalogue)
    cold = cold_observations(rows, profiles)
    values = rows.select(reward(pl.col("time_us"), pl.col("reference_us"))).to_series().to_numpy()
    warm_rows, warm_window, warm_history = _warm(rows, np.random.default_rng(seed))
    warm_context = cold.context[warm_rows].copy()
    start = len(STATIC_FEATURES)
    warm_context[:, start : start + len(HISTORY_FEATURES)] = warm_history
    index = np.concatenate([np.arange(rows.height), warm_rows])
    return Transitions(
        window=np.concatenate([cold.window, warm_window]),
        context=np.concatenate([cold.context, warm_context]),
        mask=mask[index],
        action=rows["action"].to_numpy().astype(np.int64)[index],
        reward=values.astype(np.float32)[index],
        group=rows.select(pl.struct(NOISE_KEY).rank("dense")).to_series().to_numpy()[index] - 1,
        is_cold=np.arange(len(index)) < rows.height,
        noise=noise,
        counts=Counts(**{**counts, "cold": rows.height, "warm": len(warm_rows)}),
    )


def training_noise(frame: pl.DataFrame) -> pl.DataFrame:
    """`noise_band` by NOISE_KEY from the quiet repeats of training bins alone."""
    train = with_split(quiet(tuned(frame))).filter(pl.col("split") == Split.TRAIN.value)
    return noise_bands(train, NOISE_KEY).select(*NOISE_KEY, "noise_band")


def with_noise(tasks: pl.DataFrame, noise: pl.DataFrame) -> pl.DataFrame:
    """Add the `noise_band` column that observations need; null where it is unknown."""
    return tasks.join(noise, on=NOISE_KEY, how="left", maintain_order="left")


def _training_rows(
    frame: pl.DataFrame, catalogue: Catalogue
) -> tuple[pl.DataFrame, dict[str, int]]:
    timed = independent(frame)
    alone = quiet(timed)
    asked = tuned(alone)
    train = with_split(asked).filter(pl.col("split") == Split.TRAIN.value)
    acted = train.with_columns(catalogue.actions(train)).drop_nulls("action")
    referenced = with_reference(acted, train)
    kept = referenced.filter(pl.col("reference_us").is_not_null())
    between = kept.filter(pl.col("reference_kind") == ReferenceKind.INTERPOLATED.value)
    return kept, {
        "rows": frame.height,
        "unusable": frame.height - timed.height,
        "interfered": timed.height - alone.height,
        "not_tuned": alone.height - asked.height,
        "held_out": asked.height - train.height,
        "without_action": train.height - acted.height,
        "without_reward": referenced.height - kept.height,
        "reference_interpolated": between.height,
    }


def _masks(frame: pl.DataFrame, rows: pl.DataFrame, catalogue: Catalogue) -> Float32Array:
    measured = usable(frame)
    measured = measured.with_columns(catalogue.actions(measured)).drop_nulls("action")
    allowed = measured.group_by(_MASK_KEY).agg(allowed=pl.col("action").unique())
    lists = rows.select(_MASK_KEY).join(
        allowed, on=_MASK_KEY, how="left", nulls_equal=True, maintain_order="left"
    )["allowed"]
    mask = np.zeros((rows.height, len(catalogue)), dtype=np.float32)
    for index, actions in enumerate(lists):
        mask[index, actions.to_numpy()] = 1.0
    mask[:, 0] = 1.0  # abstaining is always allowed
    return mask


def _warm(
    rows: pl.DataFrame, random: np.random.Generator
) -> tuple[npt.NDArray[np.int64], Float32Array, Float32Array]:
    calls = [_call(row) for row in rows.iter_rows(named=True)]
    owners: list[int] = []
    windows: list[Float32Array] = []
    histories: list[Float32Array] = []
    groups = rows.group_by(_WINDOW_KEY, maintain_order=True).agg("row")["row"]
    for group in groups:
        members = group.to_numpy()
        for own in members if len(members) > 1 else ():
            others = members[members != own]
            size = min(len(others), int(random.integers(1, WINDOW_LENGTH + 1)))
            picked = random.choice(others, size=size, replace=False)
            window, history = history_arrays([calls[i] for i in picked])
            owners.append(int(own))
            windows.append(window)
            histories.append(history)
    if not owners:
        empty = cold_observations(rows.head(0), ())
        return (
            np.zeros(0, dtype=np.int64),
            empty.window,
            np.zeros((0, len(HISTORY_FEATURES)), np.float32),
        )
    return np.array(owners), np.stack(windows), np.stack(histories)


def _call(row: dict[str, object]) -> Call:
    algorithm = row["actual_algorithm"] or row["requested_algorithm"]
    protocol = row["actual_protocol"] or row["requested_protocol"]
    channels = row["actual_num_channels"] or row["requested_num_channels"]
    return Call(
        size_bytes=int(str(row["size_bytes"])),
        time_us=float(str(row["time_us"])),
        algorithm=Algorithm.parse(str(algorithm)) if algorithm else None,
        protocol=Protocol.parse(str(protocol)) if protocol else None,
        num_channels=int(str(channels)) if channels else None,
        interference=0.0,
    )
