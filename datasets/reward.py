"""The reward: minus the time, in units of NCCL's default.

    r = -time / reference - lambda_switch * [config changed] - lambda_congestion * congestion

The last two terms apply to recorded calls only, whose order is known: `Steps.charged` subtracts
them. `reference` is the median time of the default's training repeats, in quiet, in the user's
untouched environment (launch profile `default`), of the same run; if that run did not measure it,
of all runs; if the size was not measured, by log-log interpolation between measured default sizes
at most one octave away on each side. Without any of these a row has no reward. -1 is "as good as
default".

Rows measured beside interference have the default beside the same interference as reference: -1 is
"as good as default would be now".
"""

import math
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.cells import PLACED_COLUMNS, interfered, quiet, usable
from dynamiccl.datasets.schema import DEFAULT_PROFILE, DefaultScope

#: Largest distance in octaves to a measured default on each side.
MAX_GAP_OCTAVES: Final = 1.0
#: log2(2^29) is not exactly 29 in floating point; no two sizes lie so close to one another.
_LOG_TOLERANCE: Final = 1e-9
#: Columns of tasks that share one reference default: without launch conditions.
_DISTURBED_BY: Final = ("num_comms", "comm_split", "interference_kind", "interference_level")
_REFERENCE_KEY: Final = tuple(
    name for name in PLACED_COLUMNS if name not in {"launch_profile", *_DISTURBED_BY}
)
#: Columns that identify a run: its name is unique within its sweep only.
_RUN: Final = ("sweep", "run")
#: Columns of rows measured in one run beside the same interference.
_BESIDE: Final = (*_REFERENCE_KEY, *_RUN, *_DISTURBED_BY)
#: Bounds of an interference level; the Trigger's residuals of log time are clipped at 8.
_LEVELS: Final = (0.0, math.expm1(8.0))
_Column = TypeVar("_Column", pl.Expr, npt.NDArray[np.floating[Any]])
_CURVE_KEY: Final = tuple(name for name in _REFERENCE_KEY if name != "size_bytes")


def with_reference(frame: pl.DataFrame, training: pl.DataFrame) -> pl.DataFrame:
    """Add `reference_us`, and whether it was measured at this size, to measurement rows.

    Args:
        frame: measurement rows that need a reference.
        training: the rows that references may be taken from (training repeats only).
    """
    untouched = quiet(_untouched(training))
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

    Their `reference_us` is the median of the default's training repeats beside the same
    interference, in the same run. `interference` is its excess over the default's quiet time (1:
    twice the time), which is the level that an accurate Trigger reports. Both are null where the
    default was not measured both ways.
    """
    now = interfered(_untouched(training)).group_by(_BESIDE).agg(_now_us=pl.col("time_us").median())
    joined = with_reference(frame, training).join(
        now, on=_BESIDE, how="left", nulls_equal=True, maintain_order="left"
    )
    level = (pl.col("_now_us") / pl.col("reference_us") - 1.0).clip(*_LEVELS)
    return joined.with_columns(
        interference=pl.when("reference_measured").then(level),
        reference_us=pl.when("reference_measured").then(pl.col("_now_us")),
    ).drop("_now_us")


def _untouched(frame: pl.DataFrame) -> pl.DataFrame:
    """Usable rows of NCCL's default in the user's own environment."""
    is_untouched = pl.col("default_scope") == DefaultScope.UNTOUCHED.value
    own = (pl.col("launch_profile") == DEFAULT_PROFILE) & is_untouched
    return usable(frame).filter(pl.col("is_default") & own)


def _interpolate(frame: pl.DataFrame, points: pl.DataFrame) -> pl.DataFrame:
    """Add `_between_us`: log-log between the nearest measured sizes below and above."""
    log = points.with_columns(
        _log_size=pl.col("size_bytes").log(2.0), _log_us=pl.col("_any_us").log(2.0)
    )
    wanted = frame.select(*_CURVE_KEY, "size_bytes").unique()
    pairs = wanted.join(
        log.select(*_CURVE_KEY, "_log_size", "_log_us"), on=_CURVE_KEY, nulls_equal=True
    ).with_columns(_gap=pl.col("_log_size") - pl.col("size_bytes").log(2.0))
    below, above = pl.col("_gap") <= 0, pl.col("_gap") >= 0
    near = pairs.filter(pl.col("_gap").abs() <= MAX_GAP_OCTAVES + _LOG_TOLERANCE).sort("_gap")
    ends = near.group_by([*_CURVE_KEY, "size_bytes"], maintain_order=True).agg(
        _g0=pl.col("_gap").filter(below).last(),
        _u0=pl.col("_log_us").filter(below).last(),
        _g1=pl.col("_gap").filter(above).first(),
        _u1=pl.col("_log_us").filter(above).first(),
    )
    span = pl.col("_g1") - pl.col("_g0")
    share = pl.when(span > 0).then(-pl.col("_g0") / span).otherwise(0.0)
    ends = ends.with_columns(
        _between_us=pl.lit(2.0).pow(pl.col("_u0") + share * (pl.col("_u1") - pl.col("_u0")))
    ).select(*_CURVE_KEY, "size_bytes", "_between_us")
    return frame.join(ends, on=[*_CURVE_KEY, "size_bytes"], how="left", nulls_equal=True)


def reward(time_us: _Column, reference_us: _Column) -> _Column:
    """The reward of one call, unitless; -1 is as good as NCCL's default.

    Columns of a table, or arrays of one shape: the simulated environment's are these, too.

    >>> pl.select(reward(pl.lit(15.0), pl.lit(10.0))).item()
    -1.5
    """
    return -1.0 * time_us / reference_us
