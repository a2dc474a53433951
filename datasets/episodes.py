"""Makes training steps of measurements: observation, action, reward; one-step episodes.

A static sweep has no order, so every measurement is an episode of one step (gamma = 0). Each
becomes one cold row. If its run measured the same task key more than once, one warm row is added,
whose window holds the *other* measurements, so that no row sees its own time. Only training bins
are read: no window holds a held-out time.

Measurements beside interference become warm rows only, whose windows hold measurements of the same
run beside the same interference; their interference level is known. Cold rows are repeated until
they are half of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import (
    NOISE_KEY,
    independent,
    interfered,
    noise_bands,
    quiet,
    tuned,
    usable,
)
from dynamiccl.datasets.features import WINDOW_LENGTH, Float32Array, cold_observations
from dynamiccl.datasets.history import UNKNOWN, CallColumns
from dynamiccl.datasets.reward import (
    ReferenceKind,
    reward,
    with_interfered_reference,
    with_reference,
)
from dynamiccl.datasets.splits import Split, with_split
from dynamiccl.datasets.steps import Int64Array, Steps, Tasks
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
    "num_comms",
    "comm_split",
    "launch_profile",
    "in_place",
    "interference_kind",
    "interference_level",
)
#: Columns of a group: an action mask allows the configs measured in it.
_MASK_KEY: Final = ("system", "collective", "num_nodes", "ranks_per_node", "launch_profile")


@dataclass(frozen=True, slots=True)
class Counts:
    """How many rows of a data set became training steps, and why others did not."""

    rows: int
    unusable: int
    #: Rows measured beside interference, of any split.
    interfered: int
    not_tuned: int
    held_out: int
    without_action: int
    without_reward: int
    reference_interpolated: int
    #: Of those beside a disturbance: without the default, or anything else, beside the same one.
    interfered_without_level: int
    interfered_used: int
    cold: int
    warm: int


@dataclass(frozen=True, slots=True)
class TrainingSteps:
    """N one-step episodes, and counts of the rows that they come from."""

    steps: Steps
    noise: pl.DataFrame  # `noise_band` by NOISE_KEY, of the training bins
    counts: Counts


def training_steps(
    frame: pl.DataFrame,
    catalogue: Catalogue,
    profiles: Sequence[str],
    costs: pl.DataFrame | None = None,
    *,
    seed: int,
) -> TrainingSteps:
    """Build the training steps of a measurements frame.

    `costs` as in `cold_observations`; `seed` fixes which other measurements fill a warm window.
    Raises NotEnoughData when no row is
    left, with the counts that say why.
    """
    alone, counts = _quiet_rows(frame, catalogue)
    if alone.is_empty():
        raise NotEnoughData(
            f"no row to train on: {counts}; measure NCCL's default (quiet, launch profile "
            "'default') at sizes in even octaves, beside the forced configs"
        )
    beside = _interfered_rows(frame, catalogue)
    levelled = beside.filter(pl.col("interference").is_not_null())
    rows = pl.concat([alone, levelled]).with_row_index("row")
    noise = training_noise(frame)
    rows = with_noise(rows, noise)
    values = rows.select(reward(pl.col("time_us"), pl.col("reference_us"))).to_series().to_numpy()
    owners, windows = _warm(rows, np.random.default_rng(seed))
    # Tables are made of cold observations: there are never fewer of them than of warm ones.
    cold = np.resize(np.arange(alone.height), max(alone.height, len(owners)))
    row = np.concatenate([cold, owners])
    # Windows refer to steps; a row with several steps is represented by its first.
    step_of = np.full(rows.height, -1)
    step_of[row[::-1]] = np.arange(len(row))[::-1]
    used = int((owners >= alone.height).sum())
    knobs = ("algorithm", "protocol", "num_channels")
    ran = [pl.coalesce(f"actual_{each}", f"requested_{each}") for each in knobs]
    calls = call_columns(rows.with_columns(*ran, skew_us=pl.lit(None, pl.Float64)))
    steps = Steps(
        tasks=Tasks(
            context=cold_observations(rows, profiles, costs).context,
            mask=action_masks(frame, rows, catalogue),
            group=rows.select(pl.struct(NOISE_KEY).rank("dense")).to_series().to_numpy() - 1,
        ),
        starts=np.arange(len(row) + 1),
        task=row,
        terminated=np.ones(len(row), dtype=np.bool_),
        calls=calls.take(row),
        action=rows["action"].to_numpy().astype(np.int64)[row],
        reward=values.astype(np.float32)[row],
        windows=np.concatenate(
            [
                np.full((len(cold), WINDOW_LENGTH), -1),
                np.where(windows >= 0, step_of[windows], -1),
            ]
        ),
    )
    return TrainingSteps(
        steps=steps,
        noise=noise,
        counts=Counts(
            **counts,
            interfered_without_level=beside.height - used,
            interfered_used=used,
            cold=len(cold),
            warm=len(owners),
        ),
    )


def training_noise(frame: pl.DataFrame) -> pl.DataFrame:
    """The `noise_band` by NOISE_KEY, from quiet repeats of training bins only."""
    train = with_split(quiet(tuned(frame))).filter(pl.col("split") == Split.TRAIN.value)
    return noise_bands(train, NOISE_KEY).select(*NOISE_KEY, "noise_band")


def with_noise(tasks: pl.DataFrame, noise: pl.DataFrame) -> pl.DataFrame:
    """Add the `noise_band` column that observations need; null where unknown."""
    return tasks.join(noise, on=NOISE_KEY, how="left", maintain_order="left")


def _quiet_rows(frame: pl.DataFrame, catalogue: Catalogue) -> tuple[pl.DataFrame, dict[str, int]]:
    timed = independent(frame)
    alone = quiet(timed)
    asked = tuned(alone)
    train = with_split(asked).filter(pl.col("split") == Split.TRAIN.value)
    acted = train.with_columns(catalogue.actions(train)).drop_nulls("action")
    referenced = with_reference(acted, train)
    kept = referenced.filter(pl.col("reference_us").is_not_null())
    between = kept.filter(pl.col("reference_kind") == ReferenceKind.INTERPOLATED.value)
    return kept.with_columns(interference=0.0), {
        "rows": frame.height,
        "unusable": frame.height - timed.height,
        "interfered": timed.height - alone.height,
        "not_tuned": alone.height - asked.height,
        "held_out": asked.height - train.height,
        "without_action": train.height - acted.height,
        "without_reward": referenced.height - kept.height,
        "reference_interpolated": between.height,
    }


def _interfered_rows(frame: pl.DataFrame, catalogue: Catalogue) -> pl.DataFrame:
    """Training rows measured beside interference; `interference` is null where unknown."""
    train = with_split(tuned(independent(frame))).filter(pl.col("split") == Split.TRAIN.value)
    beside = interfered(train)
    acted = beside.with_columns(catalogue.actions(beside)).drop_nulls("action")
    return with_interfered_reference(acted, train)


def action_masks(frame: pl.DataFrame, rows: pl.DataFrame, catalogue: Catalogue) -> Float32Array:
    """(R, A) actions measured for each row's collective, group and profile; and ABSTAIN."""
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


def _warm(rows: pl.DataFrame, random: np.random.Generator) -> tuple[Int64Array, Int64Array]:
    """Owners (M,) of the warm rows, and the rows (M, K) in their windows, -1 = padding."""
    owners: list[int] = []
    windows: list[Int64Array] = []
    groups = rows.group_by(_WINDOW_KEY, maintain_order=True).agg("row")["row"]
    for group in groups:
        members = group.to_numpy()
        for own in members if len(members) > 1 else ():
            others = members[members != own]
            size = min(len(others), int(random.integers(1, WINDOW_LENGTH + 1)))
            window = np.full(WINDOW_LENGTH, -1, dtype=np.int64)
            window[-size:] = random.choice(others, size=size, replace=False)
            owners.append(int(own))
            windows.append(window)
    shape = (len(owners), WINDOW_LENGTH)
    return np.array(owners, dtype=np.int64), np.array(windows, dtype=np.int64).reshape(shape)


def call_columns(rows: pl.DataFrame) -> CallColumns:
    """The calls of rows that have `interference` and `skew_us`, one a row."""
    algorithms = {each.wire: int(each) for each in Algorithm}
    protocols = {each.wire: int(each) for each in Protocol}

    def codes(name: str, known: dict[str, int]) -> pl.Series:
        return rows[name].replace_strict(known, default=UNKNOWN, return_dtype=pl.Int8)

    return CallColumns(
        size_bytes=rows["size_bytes"].to_numpy().astype(np.int64),
        time_us=rows["time_us"].to_numpy(),
        algorithm=codes("actual_algorithm", algorithms).to_numpy(),
        protocol=codes("actual_protocol", protocols).to_numpy(),
        num_channels=rows["actual_num_channels"].fill_null(0).to_numpy().astype(np.int16),
        interference=rows["interference"].to_numpy(),
        skew_us=rows["skew_us"].fill_null(UNKNOWN).to_numpy().astype(np.float32),
    )
