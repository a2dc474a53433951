"""Makes training steps of recorded calls: episodes in the order of a job's calls.

An episode is the calls of one task key (collective, size bin) on one communicator of a job, in
order; the next state is the next call of that key. Episodes are cut off, never terminated. A step's
window holds the calls before it.

Rewards need a reference time, NCCL's default in quiet, which calls do not have: it is taken from
the sweeps of the same data set. As with sweeps, only calls of training bins become steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import NOISE_KEY, quiet, tuned, usable
from dynamiccl.datasets.episodes import action_masks, call_columns, with_noise
from dynamiccl.datasets.features import cold_observations
from dynamiccl.datasets.history import UNKNOWN
from dynamiccl.datasets.reward import reward, with_reference
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.datasets.scoring import ENVIRONMENT_COLUMNS
from dynamiccl.datasets.splits import Split, with_split
from dynamiccl.datasets.steps import Steps, Tasks
from dynamiccl.nccl import Algorithm, Config, Protocol
from dynamiccl.sizes import bin_center_bytes

#: The columns of calls that steps are made of.
CALLS_USED: Final = (
    *("system", "sweep", "run", "comm", "sequence", "replay"),
    *("collective", "size_bytes", "num_nodes", "ranks_per_node", "nccl_version"),
    *("decided", "actual_algorithm", "actual_protocol", "actual_num_channels"),
    *("time_us", "skew_us", "ranks_agree"),
    *ENVIRONMENT_COLUMNS,
)
_TASK: Final = ("system", "nccl_version", "collective", "num_nodes", "ranks_per_node", "bin")
#: Calls of one task key of a communicator, and of one stream of the Trigger: under one config.
KEY_COLUMNS: Final = (*_TASK, "sweep", "run", "comm")
STREAM_COLUMNS: Final = (*KEY_COLUMNS, "actual_algorithm", "actual_protocol", "actual_num_channels")
#: What traces of other tools do not tell, and no step is made without: what ran, and whose choice.
_NEEDED: Final = (
    *("comm", "sequence", "replay", "size_bytes", "num_nodes"),
    *("decided", "actual_num_channels"),
)
#: Calls that are timed on all ranks, with equal arguments and complete attributes.
_IS_TIMED: Final = (
    (pl.col("time_us") > 0)
    & pl.col("ranks_agree")
    & pl.all_horizontal(pl.col(name).is_not_null() for name in _NEEDED)
)
#: Interference levels of timed calls, one each; -1 = unknown (train/trigger/detector.py).
Levels = Callable[[pl.DataFrame], npt.NDArray[np.float32]]
#: What a sweep says of a row and a call does not, or otherwise: not compared for a reference.
_NOT_COMPARED: Final = ("gpu", "datatype", "in_place")


@dataclass(frozen=True, slots=True)
class SequenceCounts:
    """How many calls became training steps, and why others did not."""

    calls: int
    #: Without a time from all ranks, or ranks that did not agree; or of a trace that does not tell
    #: what ran.
    unusable: int
    held_out: int
    #: Their config is not in the catalogue.
    without_action: int
    #: NCCL's default was not measured within an octave.
    without_reward: int
    steps: int
    episodes: int


def sequence_steps(  # noqa: PLR0913, PLR0917 - all that a data set says of calls
    calls: pl.DataFrame,
    frame: pl.DataFrame,
    catalogue: Catalogue,
    profiles: Sequence[str],
    noise: pl.DataFrame,
    levels: Levels | None = None,
    costs: pl.DataFrame | None = None,
) -> tuple[Steps | None, SequenceCounts]:
    """Steps of a calls frame, with rewards and masks by a measurements frame.

    `noise` is what `training_noise` gives of the frame, `levels` tells the interference of calls;
    without it none is known; `costs` as in `cold_observations`. Of the calls, the columns
    CALLS_USED are looked at. None when no call is left, with the counts that say why.
    """
    asked = tuned(calls)
    timed = timed_calls(asked)
    told = np.full(timed.height, UNKNOWN, dtype=np.float32) if levels is None else levels(timed)
    train = timed.with_columns(interference=told).filter(pl.col("split") == Split.TRAIN.value)
    acted = train.with_columns(_actions(train, catalogue)).drop_nulls("action")
    rows = _referenced(acted, frame).sort([*KEY_COLUMNS, "sequence", "replay"], nulls_last=True)
    rows = rows.with_columns(_episode=pl.struct(KEY_COLUMNS).rle_id())
    starts = rows["_episode"].unique_counts().to_numpy().cumsum()
    counts = SequenceCounts(
        calls=calls.height,
        unusable=asked.height - timed.height,
        held_out=timed.height - train.height,
        without_action=train.height - acted.height,
        without_reward=acted.height - rows.height,
        steps=rows.height,
        episodes=len(starts),
    )
    if rows.is_empty():
        return None, counts
    keys = rows.unique(_TASK, keep="first", maintain_order=True).with_row_index("task")
    episodes = rows.unique("_episode", keep="first", maintain_order=True)
    task = episodes.join(
        keys.select("task", *_TASK), on=_TASK, nulls_equal=True, maintain_order="left"
    )["task"]
    values = rows.select(reward(pl.col("time_us"), pl.col("reference_us"))).to_series()
    steps = Steps(
        tasks=_tasks(with_noise(keys, noise), rows, frame, catalogue, profiles, costs),
        starts=np.concatenate([[0], starts]).astype(np.int64),
        task=task.to_numpy().astype(np.int64),
        terminated=np.zeros(len(starts), dtype=np.bool_),
        calls=call_columns(rows.with_columns(pl.col("time_us").cast(pl.Float32))),
        action=rows["action"].to_numpy().astype(np.int16),
        reward=values.to_numpy().astype(np.float32),
    )
    return steps, counts


def timed_calls(calls: pl.DataFrame) -> pl.DataFrame:
    """The calls that have a time, with `bin` and `split`, in order by communicator.

    Those of traces that do not tell what ran and whose choice it was are left out.
    """
    rows = with_split(tuned(calls).filter(_IS_TIMED))
    return rows.sort(["system", "sweep", "run", "comm", "sequence", "replay"], nulls_last=True)


def _actions(calls: pl.DataFrame, catalogue: Catalogue) -> pl.Series:
    """The action of each call: what our table requested, ABSTAIN where it did not decide.

    A call tells what ran and not what was asked; a catalogue that leaves channels to NCCL holds the
    pair alone, else the channels that ran are looked for.
    """
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
    """Add `reference_us`; calls without one are dropped."""
    unknown = [pl.lit(None).cast(frame.schema[name]).alias(name) for name in _NOT_COMPARED]
    asked = calls.with_columns(*unknown, launch_profile=pl.lit(DEFAULT_PROFILE))
    train = with_split(quiet(tuned(usable(frame)))).filter(pl.col("split") == Split.TRAIN.value)
    found = with_reference(asked, train.with_columns(unknown))
    return found.filter(pl.col("reference_us").is_not_null())


def _tasks(
    keys: pl.DataFrame,
    rows: pl.DataFrame,
    frame: pl.DataFrame,
    catalogue: Catalogue,
    profiles: Sequence[str],
    costs: pl.DataFrame | None,
) -> Tasks:
    # What the plugin did not tell of the machine, the sweeps did.
    facts = frame.group_by("system").agg(
        pl.col(name).drop_nulls().first().alias(f"_{name}") for name in ENVIRONMENT_COLUMNS
    )
    keys = keys.join(facts, on="system", how="left", maintain_order="left").with_columns(
        pl.coalesce(name, f"_{name}").alias(name) for name in ENVIRONMENT_COLUMNS
    )
    mask = action_masks(frame, keys, catalogue)
    taken = rows.join(keys.select("task", *_TASK), on=_TASK, nulls_equal=True)
    mask[taken["task"].to_numpy(), taken["action"].to_numpy()] = 1.0
    # Each call has its own size, but NCCL's costs of a task key are those of its bin's centre: a
    # decision is about the key, and the brain asks with these, too.
    centres = [bin_center_bytes(each) for each in keys["bin"]]
    asked = keys.with_columns(size_bytes=pl.Series(centres, dtype=pl.Int64))
    return Tasks(
        context=cold_observations(asked, profiles, costs).context,
        mask=mask,
        group=keys.select(pl.struct(NOISE_KEY).rank("dense")).to_series().to_numpy() - 1,
    )
