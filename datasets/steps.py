"""Training steps: stored as columns, sampled as batches, made of measurements or of recorded calls.

A step is one collective call: the observation before it, the action, and the result. Only the
calls' attributes are stored, 30 bytes a step; observations are computed when a batch is drawn.

    r = -time / reference - lambda_switch * [config changed] - lambda_congestion * congestion

The last two terms apply to recorded calls only, whose order is known. `reference` is the median
time of the default's training repeats, in quiet, in the user's untouched environment, of the same
run, else of all runs; of sizes without one it is interpolated between measured ones at most an
octave away on each side. Beside interference it is the default beside the same.

**Of measurements** (`training_steps`) each is an episode of one step (gamma = 0), a cold row. If
its run measured the same task key more than once, one warm row is added, whose window holds the
*other* measurements, so that no row sees its own time; those beside interference become warm rows
only. Cold rows are repeated until they are half of all.

**Of calls** (`sequence_steps`) an episode is the calls of one task key on one communicator of a
job, in order. It is cut off, never terminated; a step's window holds the calls before it.

Only training bins become steps: no window holds a held-out time.

N steps, E episodes, T tasks, B rows of a batch, K calls in the window, F features of the context,
A actions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets import cells, history
from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.features import (
    ENVIRONMENT_COLUMNS,
    HISTORY_SLICE,
    Observations,
    cold_observations,
    set_sizes,
)
from dynamiccl.datasets.history import CallColumns, Float32Array
from dynamiccl.datasets.schema import DEFAULT_PROFILE, DefaultScope
from dynamiccl.datasets.splits import Split, with_split
from dynamiccl.errors import NotEnoughData
from dynamiccl.nccl import Algorithm, Config, Protocol
from dynamiccl.sizes import bin_center_bytes

Int64Array = npt.NDArray[np.int64]

_LOOK_BACK: Final = np.arange(-history.WINDOW_LENGTH, 0)
_WINDOW_KEY: Final = (
    *("system", "sweep", "run", "collective", "bin", "num_nodes", "ranks_per_node"),
    *("num_comms", "comm_split", "launch_profile", "in_place"),
    *("interference_kind", "interference_level"),
)
#: An action mask allows the configs measured in such a group.
_MASK_KEY: Final = ("system", "collective", "num_nodes", "ranks_per_node", "launch_profile")
CALLS_USED: Final = (
    *("system", "sweep", "run", "comm", "sequence", "replay"),
    *("collective", "size_bytes", "num_nodes", "ranks_per_node", "nccl_version"),
    *("decided", "actual_algorithm", "actual_protocol", "actual_num_channels"),
    *("time_us", "skew_us", "ranks_agree"),
    *ENVIRONMENT_COLUMNS,
)
_TASK: Final = ("system", "nccl_version", "collective", "num_nodes", "ranks_per_node", "bin")
#: Calls of one task key of a communicator; a Trigger's stream adds the config.
KEY_COLUMNS: Final = (*_TASK, "sweep", "run", "comm")
STREAM_COLUMNS: Final = (*KEY_COLUMNS, "actual_algorithm", "actual_protocol", "actual_num_channels")
#: Traces of other tools do not tell these.
_NEEDED: Final = (
    *("comm", "sequence", "replay", "size_bytes", "num_nodes"),
    *("decided", "actual_num_channels"),
)
#: Timed on all ranks, with equal arguments and complete attributes.
_IS_TIMED: Final = (
    (pl.col("time_us") > 0)
    & pl.col("ranks_agree")
    & pl.all_horizontal(pl.col(name).is_not_null() for name in _NEEDED)
)
#: Interference level of each timed call; -1 = unknown (train/trigger.py).
Levels = Callable[[pl.DataFrame], npt.NDArray[np.float32]]
#: To a measured default, on each side.
MAX_GAP_OCTAVES: Final = 1.0
#: log2(2^29) is not exactly 29; no two sizes are so close.
_LOG_TOLERANCE: Final = 1e-9
#: Tasks that share a reference default differ in these and in the launch profile.
_DISTURBED_BY: Final = ("num_comms", "comm_split", "interference_kind", "interference_level")
_REFERENCE_KEY: Final = tuple(
    name for name in cells.PLACED_COLUMNS if name not in {"launch_profile", *_DISTURBED_BY}
)
#: A run's name is unique within its sweep only.
_RUN: Final = ("sweep", "run")
_BESIDE: Final = (*_REFERENCE_KEY, *_RUN, *_DISTURBED_BY)
#: Of an interference level: the Trigger clips residuals of log time at 8.
_LEVELS: Final = (0.0, math.expm1(8.0))
_CURVE_KEY: Final = tuple(name for name in _REFERENCE_KEY if name != "size_bytes")
#: Calls lack these, or have them otherwise.
_NOT_COMPARED: Final = ("gpu", "datatype", "in_place")


@dataclass(frozen=True)
class Steps:
    """The steps of an episode are adjacent."""

    context: Float32Array  # (T, F), cold
    mask: Float32Array  # (T, A), 1 = allowed
    group: Int64Array  # (T,), number of the task's (system, collective)
    starts: Int64Array  # (E + 1,), the first step of each episode, and N
    task: Int64Array  # (E,), the episode's task
    terminated: npt.NDArray[np.bool_]  # (E,), else cut off: no next state
    calls: CallColumns  # (N,), the calls, with their times
    action: npt.NDArray[np.integer]  # (N,)
    reward: Float32Array  # (N,)
    #: (N, K) steps that each sees, right-aligned, -1 = padding; None: the K before in its episode.
    windows: Int64Array | None = None

    def __len__(self) -> int:
        return len(self.action)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of one observation's window, context and mask."""
        window = (history.WINDOW_LENGTH, len(history.WINDOW_FEATURES))
        return [window, self.context.shape[1:], self.mask.shape[1:]]

    @cached_property
    def choosable(self) -> Int64Array:
        """(E,) steps with a next state: all but the last of a cut-off episode."""
        return np.diff(self.starts) - ~self.terminated

    def episode_of(self, rows: Int64Array) -> Int64Array:
        """(B,); fastest for sorted rows."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def observe(
        self, rows: Int64Array, episode: Int64Array
    ) -> tuple[Observations, Float32Array, Int64Array]:
        """Observations before `rows` of `episode`, masks and tasks."""
        if self.windows is None:
            seen = rows[:, None] + _LOOK_BACK
            valid = seen >= self.starts[episode][:, None]
        else:
            seen = self.windows[rows]
            valid = seen >= 0
        window, past = history.history_features(self.calls.take(np.maximum(seen, 0)), valid)
        task = self.task[episode]
        context = self.context[task]
        set_sizes(context, np.log2(np.maximum(self.calls.size_bytes[rows], 1)))
        context[:, HISTORY_SLICE] = past
        return Observations(window, context), self.mask[task], task

    def advance(
        self, rows: Int64Array, episode: Int64Array, num_steps: int
    ) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """As d3rlpy's MultiStepTransitionPicker (2.8.1): a cut-off episode never ends."""
        end, terminated = self.starts[episode + 1], self.terminated[episode]
        following = np.minimum(rows + num_steps, np.where(terminated, end, end - 1))
        return following, following == end

    def charged(self, lambda_switch: float, lambda_congestion: float) -> Self:
        """These steps with the costs of config changes and of congestion taken off the rewards.

        Both in units of NCCL's default: `lambda_switch` for a step whose action is not that of the
        step before it in its episode, `lambda_congestion` for each unit of interference level; an
        unknown level costs nothing.
        """
        if not lambda_switch and not lambda_congestion:
            return self
        changed = np.diff(self.action, prepend=self.action[:1]) != 0
        changed[self.starts[:-1]] = False
        cost = lambda_switch * changed
        cost = cost + lambda_congestion * np.maximum(self.calls.interference, 0.0)
        return replace(self, reward=(self.reward - cost).astype(np.float32))

    def held(self, most: int) -> Self:
        """Mean rewards of at most `most` calls of one action: a decision stays in force."""
        if most <= 1:
            return self
        place = np.arange(len(self))
        changes = np.diff(self.action, prepend=-1) != 0
        changes[self.starts[:-1]] = True
        bounds = np.append(np.flatnonzero(changes), len(self))
        run_end = bounds[np.cumsum(changes)]
        end = np.minimum(run_end, place + most)
        total = np.concatenate([[0.0], np.cumsum(self.reward, dtype=np.float64)])
        mean = (total[end] - total[place]) / (end - place)
        return replace(self, reward=mean.astype(np.float32))

    def discounted(self, rows: Int64Array, following: Int64Array, gamma: float) -> Float32Array:
        """(B,) discounted rewards from `rows` to before `following`."""
        total = np.zeros(len(rows))
        last = len(self) - 1
        for step in range(int((following - rows).max(initial=0))):
            inside = rows + step < following
            total += inside * gamma**step * self.reward[np.minimum(rows + step, last)]
        return total.astype(np.float32)


def reward(time_us: Any, reference_us: Any) -> Any:
    """-1 is as good as NCCL's default; columns or arrays."""
    return -1.0 * time_us / reference_us


def with_reference(frame: pl.DataFrame, training: pl.DataFrame) -> pl.DataFrame:
    """Add `reference_us`, and whether it was measured at this size, to measurement rows.

    Args:
        frame: measurement rows that need a reference.
        training: the rows that references may be taken from (training repeats only).
    """
    untouched = cells.quiet(_untouched(training))
    median = pl.col("time_us").median()
    same_run = untouched.group_by([*_REFERENCE_KEY, *_RUN]).agg(_same_us=median)
    any_run = untouched.group_by(_REFERENCE_KEY).agg(_any_us=median)
    joined = frame.join(same_run, on=[*_REFERENCE_KEY, *_RUN], how="left", nulls_equal=True).join(
        any_run, on=_REFERENCE_KEY, how="left", nulls_equal=True
    )
    joined = _interpolate(joined, any_run)
    measured = pl.coalesce("_same_us", "_any_us")
    return joined.with_columns(
        reference_us=pl.coalesce(measured, "_between_us"), reference_measured=measured.is_not_null()
    ).drop("_same_us", "_any_us", "_between_us")


def with_interfered_reference(frame: pl.DataFrame, training: pl.DataFrame) -> pl.DataFrame:
    """Add the columns of `with_reference`, and `interference`, to rows beside interference.

    The reference is beside the same interference in the same run; `interference` its excess over
    the quiet time (1: twice as long). Null where the default was not measured both ways.
    """
    now = (
        cells.interfered(_untouched(training))
        .group_by(_BESIDE)
        .agg(_now_us=pl.col("time_us").median())
    )
    joined = with_reference(frame, training).join(
        now, on=_BESIDE, how="left", nulls_equal=True, maintain_order="left"
    )
    level = (pl.col("_now_us") / pl.col("reference_us") - 1.0).clip(*_LEVELS)
    return joined.with_columns(
        interference=pl.when("reference_measured").then(level),
        reference_us=pl.when("reference_measured").then(pl.col("_now_us")),
    ).drop("_now_us")


def _untouched(frame: pl.DataFrame) -> pl.DataFrame:
    is_untouched = pl.col("default_scope") == DefaultScope.UNTOUCHED.value
    own = (pl.col("launch_profile") == DEFAULT_PROFILE) & is_untouched
    return cells.usable(frame).filter(pl.col("is_default") & own)


def _interpolate(frame: pl.DataFrame, points: pl.DataFrame) -> pl.DataFrame:
    key = [*_CURVE_KEY, "size_bytes"]
    asked = frame.select(key).unique().join(points, on=key, how="anti", nulls_equal=True)
    curve = pl.concat([points, asked], how="diagonal").sort("size_bytes")
    curve = curve.with_columns(_x=pl.col("size_bytes").log(2.0), _y=pl.col("_any_us").log(2.0))
    x, y = pl.col("_x"), pl.col("_y")
    known = pl.when(y.is_not_null()).then(x)
    gaps = (x - known.forward_fill(), known.backward_fill() - x)
    is_near = pl.all_horizontal(
        (gap <= MAX_GAP_OCTAVES + _LOG_TOLERANCE).over(_CURVE_KEY) for gap in gaps
    )
    between = pl.lit(2.0).pow(y.interpolate_by(x).over(_CURVE_KEY))
    found = curve.select(*key, _between_us=pl.when(is_near).then(between))
    return frame.join(found, on=key, how="left", nulls_equal=True)


@dataclass(frozen=True, slots=True)
class TrainingSteps:
    """One-step episodes, and counts of the rows behind them."""

    steps: Steps
    noise: pl.DataFrame  # `noise_band` by NOISE_KEY, of the training bins
    #: Rows that became steps, and why others did not; `interfered` ones of any split.
    #: `interfered_without_level` lack the default, or anything else, beside the same.
    counts: dict[str, int]


def training_steps(
    frame: pl.DataFrame,
    catalogue: Catalogue,
    profiles: Sequence[str],
    costs: pl.DataFrame | None = None,
    *,
    seed: int,
) -> TrainingSteps:
    """The steps of a measurements frame; raises NotEnoughData when no row is left."""
    alone, beside, counts = _training_rows(frame, catalogue)
    if alone.is_empty():
        raise NotEnoughData(
            f"no row to train on: {counts}; measure NCCL's default (quiet, launch profile "
            "'default') at sizes in even octaves, beside the forced configs"
        )
    levelled = beside.filter(pl.col("interference").is_not_null())
    rows = pl.concat([alone, levelled]).with_row_index("row")
    noise = training_noise(frame)
    rows = with_noise(rows, noise)
    owners, windows = _warm(rows, np.random.default_rng(seed))
    # Tables are made of cold observations: there are never fewer of them than warm ones.
    cold = np.resize(np.arange(alone.height), max(alone.height, len(owners)))
    row = np.concatenate([cold, owners])
    # A row with several steps is represented by its first.
    step_of = np.full(rows.height, -1)
    step_of[row[::-1]] = np.arange(len(row))[::-1]
    seen = np.where(windows >= 0, step_of[windows], -1)
    used = int((owners >= alone.height).sum())
    knobs = ("algorithm", "protocol", "num_channels")
    ran = [pl.coalesce(f"actual_{each}", f"requested_{each}") for each in knobs]
    calls = call_columns(rows.with_columns(*ran, skew_us=pl.lit(None, pl.Float64)))
    steps = Steps(
        context=cold_observations(rows, profiles, costs).context,
        mask=action_masks(frame, rows, catalogue),
        group=_groups(rows),
        starts=np.arange(len(row) + 1),
        task=row,
        terminated=np.ones(len(row), dtype=np.bool_),
        calls=calls.take(row),
        action=rows["action"].to_numpy().astype(np.int64)[row],
        reward=_rewards(rows)[row],
        windows=np.vstack([np.full((len(cold), history.WINDOW_LENGTH), -1), seen]),
    )
    counts |= {"interfered_without_level": beside.height - used, "interfered_used": used}
    return TrainingSteps(steps, noise, counts | {"cold": len(cold), "warm": len(owners)})


def _groups(rows: pl.DataFrame) -> Int64Array:
    return rows.select(pl.struct(cells.NOISE_KEY).rank("dense")).to_series().to_numpy() - 1


def _rewards(rows: pl.DataFrame) -> Float32Array:
    values = rows.select(reward(pl.col("time_us"), pl.col("reference_us"))).to_series()
    return values.to_numpy().astype(np.float32)


def training_noise(frame: pl.DataFrame) -> pl.DataFrame:
    """`noise_band` by NOISE_KEY, of quiet repeats of training bins."""
    train = with_split(cells.quiet(cells.tuned(frame))).filter(pl.col("split") == Split.TRAIN.value)
    return cells.noise_bands(train)


def with_noise(tasks: pl.DataFrame, noise: pl.DataFrame) -> pl.DataFrame:
    """Add `noise_band`; null where unknown."""
    return tasks.join(noise, on=cells.NOISE_KEY, how="left", maintain_order="left")


def _training_rows(
    frame: pl.DataFrame, catalogue: Catalogue
) -> tuple[pl.DataFrame, pl.DataFrame, dict[str, int]]:
    """Rows alone, rows beside interference (level null: unknown), and counts of others."""
    timed = cells.independent(frame)
    asked = cells.tuned(timed)
    train = with_split(asked).filter(pl.col("split") == Split.TRAIN.value)
    acted = train.with_columns(catalogue.actions(train)).drop_nulls("action")
    referenced = with_reference(cells.quiet(acted), train)
    kept = referenced.filter(pl.col("reference_us").is_not_null())
    alone = [cells.quiet(rows).height for rows in (timed, asked, train, acted)]
    counts = {
        "rows": frame.height,
        "unusable": frame.height - timed.height,
        "interfered": timed.height - alone[0],
        "not_tuned": alone[0] - alone[1],
        "held_out": alone[1] - alone[2],
        "without_action": alone[2] - alone[3],
        "without_reward": referenced.height - kept.height,
        "reference_interpolated": int((~kept["reference_measured"]).sum()),
    }
    beside = with_interfered_reference(cells.interfered(acted), train)
    return kept.with_columns(interference=0.0), beside, counts


def action_masks(frame: pl.DataFrame, rows: pl.DataFrame, catalogue: Catalogue) -> Float32Array:
    """(R, A) ABSTAIN, and actions measured for each row's _MASK_KEY."""
    measured = cells.usable(frame)
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
            size = min(len(others), int(random.integers(1, history.WINDOW_LENGTH + 1)))
            window = np.full(history.WINDOW_LENGTH, -1, dtype=np.int64)
            window[-size:] = random.choice(others, size=size, replace=False)
            owners.append(int(own))
            windows.append(window)
    shape = (len(owners), history.WINDOW_LENGTH)
    return np.array(owners, dtype=np.int64), np.array(windows, dtype=np.int64).reshape(shape)


def call_columns(rows: pl.DataFrame) -> CallColumns:
    """One call a row; needs `interference` and `skew_us`."""
    algorithms = {each.wire: int(each) for each in Algorithm}
    protocols = {each.wire: int(each) for each in Protocol}

    def codes(name: str, known: dict[str, int]) -> pl.Series:
        return rows[name].replace_strict(known, default=history.UNKNOWN, return_dtype=pl.Int8)

    return CallColumns(
        size_bytes=rows["size_bytes"].to_numpy().astype(np.int64),
        time_us=rows["time_us"].to_numpy(),
        algorithm=codes("actual_algorithm", algorithms).to_numpy(),
        protocol=codes("actual_protocol", protocols).to_numpy(),
        num_channels=rows["actual_num_channels"].fill_null(0).to_numpy().astype(np.int16),
        interference=rows["interference"].to_numpy(),
        skew_us=rows["skew_us"].fill_null(history.UNKNOWN).to_numpy().astype(np.float32),
    )


def sequence_steps(  # noqa: PLR0913, PLR0917 - all that a data set says of calls
    calls: pl.DataFrame,
    frame: pl.DataFrame,
    catalogue: Catalogue,
    profiles: Sequence[str],
    noise: pl.DataFrame,
    levels: Levels | None = None,
    costs: pl.DataFrame | None = None,
) -> tuple[Steps | None, dict[str, int]]:
    """Steps of a calls frame (CALLS_USED), with rewards and masks by a measurements frame.

    None when no call is left. Counts: `unusable` calls lack a time of all ranks, their agreement,
    or what ran; `without_reward`, a default within an octave.
    """
    asked = cells.tuned(calls)
    timed = timed_calls(asked)
    told = (
        np.full(timed.height, history.UNKNOWN, dtype=np.float32)
        if levels is None
        else levels(timed)
    )
    train = timed.with_columns(interference=told).filter(pl.col("split") == Split.TRAIN.value)
    acted = train.with_columns(_actions(train, catalogue)).drop_nulls("action")
    rows = _referenced(acted, frame).sort([*KEY_COLUMNS, "sequence", "replay"], nulls_last=True)
    # In that order the rows of an episode follow each other, and the episodes of a task.
    ids = {"episode": pl.struct(KEY_COLUMNS).rle_id(), "task": pl.struct(_TASK).rle_id()}
    rows = rows.with_columns(**ids)
    starts = rows["episode"].unique_counts().to_numpy().cumsum()
    counts = {
        "calls": calls.height,
        "unusable": asked.height - timed.height,
        "held_out": timed.height - train.height,
        "without_action": train.height - acted.height,
        "without_reward": acted.height - rows.height,
        "steps": rows.height,
        "episodes": len(starts),
    }
    if rows.is_empty():
        return None, counts
    episodes, keys = (
        rows.unique(name, keep="first", maintain_order=True) for name in ("episode", "task")
    )
    known = _told_by_sweeps(with_noise(keys, noise), frame)
    mask = action_masks(frame, known, catalogue)
    mask[rows["task"].to_numpy(), rows["action"].to_numpy()] = 1.0
    steps = Steps(
        context=cold_observations(known, profiles, costs).context,
        mask=mask,
        group=_groups(known),
        starts=np.concatenate([[0], starts]).astype(np.int64),
        task=episodes["task"].to_numpy().astype(np.int64),
        terminated=np.zeros(len(starts), dtype=np.bool_),
        calls=call_columns(rows.with_columns(pl.col("time_us").cast(pl.Float32))),
        action=rows["action"].to_numpy().astype(np.int16),
        reward=_rewards(rows),
    )
    return steps, counts


def timed_calls(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls with a time and with what ran, with `bin` and `split`, in order by communicator."""
    rows = with_split(cells.tuned(calls).filter(_IS_TIMED))
    return rows.sort(["system", "sweep", "run", "comm", "sequence", "replay"], nulls_last=True)


def _actions(calls: pl.DataFrame, catalogue: Catalogue) -> pl.Series:
    """By the pair that ran, else with its channels; ABSTAIN where our table did not decide."""
    known = {config: action for action, config in enumerate(catalogue.configs)}

    def action(decided: bool, algorithm: str | None, protocol: str | None, n: int) -> int | None:
        if not decided:
            return ABSTAIN_ACTION
        if algorithm is None or protocol is None:
            return None
        pair = Algorithm.parse(algorithm), Protocol.parse(protocol)
        return known.get(Config(*pair), known.get(Config(*pair, n)))

    ran = calls.select("decided", "actual_algorithm", "actual_protocol", "actual_num_channels")
    kinds = ran.unique()  # a handful, of millions of calls
    found = pl.Series("action", [action(*row) for row in kinds.iter_rows()], dtype=pl.Int64)
    joined = ran.join(
        kinds.with_columns(found),
        on=ran.columns,
        nulls_equal=True,
        how="left",
        maintain_order="left",
    )
    return joined["action"]


def _referenced(calls: pl.DataFrame, frame: pl.DataFrame) -> pl.DataFrame:
    unknown = [pl.lit(None).cast(frame.schema[name]).alias(name) for name in _NOT_COMPARED]
    asked = calls.with_columns(*unknown, launch_profile=pl.lit(DEFAULT_PROFILE))
    train = with_split(frame).filter(pl.col("split") == Split.TRAIN.value)
    found = with_reference(asked, train.with_columns(unknown))
    return found.filter(pl.col("reference_us").is_not_null())


def _told_by_sweeps(keys: pl.DataFrame, frame: pl.DataFrame) -> pl.DataFrame:
    """Task keys with the sweeps' facts and the bin centre's size, as the brain asks."""
    facts = frame.group_by("system").agg(
        pl.col(name).drop_nulls().first().alias(f"_{name}") for name in ENVIRONMENT_COLUMNS
    )
    joined = keys.join(facts, on="system", how="left", maintain_order="left")
    centres = pl.Series([bin_center_bytes(each) for each in keys["bin"]], dtype=pl.Int64)
    known = (pl.coalesce(name, f"_{name}").alias(name) for name in ENVIRONMENT_COLUMNS)
    return joined.with_columns(*known, size_bytes=centres)
