"""The Trigger: what it computes, a detector over many streams, and what cells feel of a level.

What it computes, point by point, is in docs/trigger.md. A *stream* is the calls of one task key
under one config. Its state is a row of numbers: many streams advance at once, and a call of a
stream is one step. Residuals and references are in units of the stream's scale.

A level says by how much calls were slower than quiet, under a config that felt it. Others need not
feel it alike: what slows host threads slows rings and not NVLS. So of each cell there is a share: a
call under it takes 1 + share x level times its quiet time (`level_shares_of`).

N streams, S numbers a stream.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import nn

from dynamiccl.datasets.manifest import trigger_file
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.steps import KEY_COLUMNS, STREAM_COLUMNS, timed_calls
from dynamiccl.sizes import BINS_PER_OCTAVE
from dynamiccl.train.policy import load_trigger

FloatArray = npt.NDArray[np.float32]
WARM_UP: Final = 16
#: Residuals whose median is the interference; hidden units.
_RECENT: Final = 7
_HIDDEN: Final = 12
#: The smallest slowdown that is looked for.
SMALLEST_SLOWDOWN: Final = 1.15
#: Reference values of the CUSUM, in scales.
RUNGS: Final = tuple(2.0 ** (-i / 2) for i in range(7))
#: Calls after which another config's level is halved; docs/trigger.md has 100 and 1000.
HALF_LIFE: Final = 300.0
#: Interference without a forecast (`datasets.history.UNKNOWN`).
UNKNOWN: Final = -1.0
#: Calls that entered, level and log scale of log time, both sums, whether alarmed, calls that wait,
#: mean log size, and sums of residuals (in scales) and signs of calls that wait.
NUMBERS: Final = (
    *("count", "level", "log_scale", "up", "down", "alarmed"),
    *("age", "log_size", "waiting", "signs"),
)


class TriggerModule(nn.Module):
    """(state (N, S), log time (N,), log size (N,)) -> (state, alarm (N,), level (N,)).

    Natural logarithms of us and bytes. Alarm: 1 while slow, -1 at a call that proves the stream
    faster than what was taken for quiet. Level: how much longer than quiet (1: twice the time).
    """

    #: Residuals are clipped here, in scales.
    clip: Final[float] = 3.0
    #: The least noise: nobody wants an alarm for 3 %.
    least_log_scale: Final[float] = math.log(0.01)
    half_shift: Final[float] = 0.5 * math.log(SMALLEST_SLOWDOWN)
    #: Standard normal: MAD to sigma, and the gain that makes a sign recursion as fast as a mean.
    mad: Final[float] = 0.6745
    scale_gain: Final[float] = 1.2
    #: Means are over at most so many calls, to follow slower drift.
    most_calls: Final[float] = 512.0
    #: Calls that the site's usual scale counts for.
    prior_calls: Final[float] = 8.0
    #: Widens the reference, over calls ** 0.75: with less a wrong first level freezes for good.
    level_error: Final[float] = 8.0
    #: The LSTM moves a forecast by at most so many scales.
    most_shift: Final[float] = 2.0
    #: A call moves the level by at most so many scales.
    huber: Final[float] = 1.5
    warm_up: Final[int] = WARM_UP
    unknown: Final[float] = UNKNOWN
    keep: Final[float] = 0.5 ** (1.0 / HALF_LIFE)

    rungs: torch.Tensor
    thresholds: torch.Tensor
    edges: torch.Tensor
    #: Numbers, warm-up, latest residuals, and the LSTM's two.
    parts: list[int]

    def __init__(self, prior_scale: float = 0.1) -> None:
        """`prior_scale`: the usual robust sigma of log time on the site."""
        super().__init__()
        self.cell = nn.LSTMCell(2, _HIDDEN)
        self.head = nn.Linear(_HIDDEN + 2, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("rungs", torch.tensor(RUNGS))
        # The exponential tail of a CUSUM, until calibration.
        self.register_buffer("thresholds", torch.tensor([9.0 / rung for rung in RUNGS]))
        between = [math.sqrt(a * b) for a, b in pairwise(RUNGS)]
        self.register_buffer("edges", torch.tensor(between[::-1]))
        self.parts = [len(NUMBERS), WARM_UP, _RECENT, _HIDDEN, _HIDDEN]
        self.state_size = sum(self.parts)
        self.prior_scale = float(prior_scale)

    @torch.jit.export
    def new_state(self, count: int) -> torch.Tensor:
        """The initial state (N, S) of streams."""
        return torch.zeros(count, self.state_size)

    def forward(
        self, state: torch.Tensor, log_time: torch.Tensor, log_size: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One call of each of N streams; see the class."""
        state, alarm, level, _ = self.step(state, log_time, log_size)
        return state, alarm, level

    @torch.jit.export
    def new_keys(self, count: int) -> torch.Tensor:
        """The initial carried state (N, 2) of task keys: a level, and its stream."""
        return torch.full((count, 2), self.unknown)

    @torch.jit.export
    def carry(
        self, carried: torch.Tensor, stream: torch.Tensor, level: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, 2) carried, and levels (N,); a higher one of another stream stands, and fades."""
        before, owner = torch.unbind(carried, dim=1)
        faded = torch.where(before >= 0.0, before * self.keep, before)
        number = stream.to(carried.dtype)
        takes = (level >= 0.0) & ((number == owner) | (level >= faded))
        told = torch.where(takes, level, faded)
        return torch.stack([told, torch.where(takes, number, owner)], dim=1), told

    @torch.jit.export
    def step(
        self, state: torch.Tensor, log_time: torch.Tensor, log_size: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`forward`, and the forecast of quiet log times (N,), invalid during warm-up."""
        numbers, first, latest, hidden, cell = torch.split(state, self.parts, dim=1)
        count, mean, log_scale, up, down, alarmed, age, mean_size, waiting, signs = torch.unbind(
            numbers, dim=1
        )
        scale = torch.exp(log_scale)
        size_shift = ((log_size - mean_size) / scale).clamp(-self.clip, self.clip)
        extra = torch.stack([0.25 * torch.log1p(age), size_shift], dim=1)
        shift = self.head(torch.cat([hidden, extra], dim=1)).squeeze(1)
        forecast = mean + scale * self.most_shift * torch.tanh(shift)
        residual = log_time - forecast.detach()

        clipped = (residual / scale).clamp(-self.clip, self.clip)
        rung = self.edges.size(0) - torch.bucketize(self.half_shift / scale, self.edges)
        threshold = self.thresholds[rung]
        was_alarmed = alarmed > 0.5
        latest = torch.cat([latest[:, 1:], residual.unsqueeze(1)], dim=1)
        middle = latest.median(dim=1)[0]
        reference = self.rungs[rung] + self.level_error * count.clamp(min=1.0).pow(-0.75)
        # While alarmed, the question is whether it is still half as slow.
        half = 0.5 * (middle / scale).clamp(0.0, self.clip)
        up_reference = torch.where(was_alarmed, torch.maximum(reference, half), reference)
        new_up = (up + clipped - up_reference).clamp(min=0.0)
        new_down = (down - clipped - reference).clamp(min=0.0)
        crossed = new_up >= threshold
        is_alarmed = crossed | (was_alarmed & (new_up > 0.0))
        is_faster = (new_down >= threshold) & ~crossed
        new_up = torch.minimum(new_up, threshold)
        evidence = torch.where(is_alarmed, torch.ones_like(new_up), new_up / threshold)
        level = evidence * torch.expm1(middle.clamp(min=0.0, max=8.0))

        # A call enters if both sums were zero before it; those that waited, once they are again.
        was_still = (up + down) <= 0.0
        standard = ((log_time - mean) / scale).clamp(-self.clip, self.clip)
        waiting = waiting + standard.clamp(-self.huber, self.huber)
        signs = signs + torch.where(torch.abs(residual) > self.mad * scale, 1.0, -1.0)
        age = age + 1.0
        enters = was_still | ((new_up + new_down <= 0.0) & ~was_alarmed)
        known = count.clamp(max=self.most_calls)
        moved = mean + scale * waiting / (known + age)
        step = self.scale_gain / (count + age + self.prior_calls).clamp(max=self.most_calls)
        widened = (log_scale + (signs * step).clamp(-1.0, 1.0)).clamp(min=self.least_log_scale)
        size_gain = 1.0 / (known + 1.0)
        zero = torch.zeros_like(age)
        dropped = enters | was_alarmed  # whoever waited during an alarm
        entered = [
            torch.where(enters, count + age, count),
            torch.where(enters, moved, mean),
            torch.where(enters, widened, log_scale),
            new_up,
            new_down,
            is_alarmed.to(state.dtype),
            torch.where(dropped, zero, age),
            torch.where(enters, mean_size + (log_size - mean_size) * size_gain, mean_size),
            torch.where(dropped, zero, waiting),
            torch.where(dropped, zero, signs),
        ]
        new_hidden, new_cell = self.cell(torch.stack([standard, size_shift], dim=1), (hidden, cell))
        entering = was_still.unsqueeze(1)
        advanced = torch.cat(
            [
                torch.stack(entered, dim=1).detach(),
                first,
                latest.detach(),
                torch.where(entering, new_hidden, hidden),
                torch.where(entering, new_cell, cell),
            ],
            dim=1,
        )
        advanced = torch.where(is_faster.unsqueeze(1), torch.zeros_like(advanced), advanced)

        is_warm = count >= self.warm_up
        state = torch.where(is_warm.unsqueeze(1), advanced, self.begin(state, log_time, log_size))
        alarm = torch.where(is_alarmed, 1, torch.where(is_faster, -1, 0))
        alarm = torch.where(is_warm, alarm, 0)
        level = torch.where(is_warm & ~is_faster, level, self.unknown)
        return state, alarm, level, forecast

    def begin(
        self, state: torch.Tensor, log_time: torch.Tensor, log_size: torch.Tensor
    ) -> torch.Tensor:
        """Process a call of the warm-up; the last one sets level and scale."""
        numbers, first, latest, hidden, cell = torch.split(state, self.parts, dim=1)
        count, mean_size = numbers[:, 0], numbers[:, 7]
        first = torch.cat([first[:, 1:], log_time.unsqueeze(1)], dim=1)
        mean = self.middle(first)
        sigma = self.middle(torch.abs(first - mean.unsqueeze(1))) / self.mad
        prior = self.prior_calls * self.prior_scale * self.prior_scale
        variance = (prior + self.warm_up * sigma * sigma) / (self.prior_calls + self.warm_up)
        log_scale = (0.5 * torch.log(variance)).clamp(min=self.least_log_scale)
        mean_size = mean_size + (log_size - mean_size) / (count + 1.0)
        zero = torch.zeros_like(count)
        begun = [count + 1.0, mean, log_scale, zero, zero, zero, zero, mean_size, zero, zero]
        return torch.cat([torch.stack(begun, dim=1), first, latest, hidden, cell], dim=1)

    def middle(self, values: torch.Tensor) -> torch.Tensor:
        """Median (N,) of rows (N, W), W even or odd."""
        return 0.5 * (values.median(dim=1)[0] - (-values).median(dim=1)[0])


class Detector:
    """Watches streams, numbered by the caller from 0; memory goes with the largest."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._state: torch.Tensor = module.new_state(0)
        self._carried: torch.Tensor = module.new_keys(0)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load from a run, a policy or a file; raises MissingPath and CorruptFile."""
        return cls(load_trigger(trigger_file(path)))

    def observe(
        self,
        stream: npt.ArrayLike,
        log_time: npt.ArrayLike,
        log_size: npt.ArrayLike | None = None,
        key: npt.ArrayLike | None = None,
    ) -> tuple[npt.NDArray[np.int8], FloatArray]:
        """Alarm (N,) and level (N,) of one call of each of N different streams; ln(us), ln(bytes).

        With `key`, N different task keys, what was found under another config stands for a while. A
        stream faster than what was taken for quiet is learned anew. Raises ValueError.
        """
        index = np.array(stream, dtype=np.int64)
        if len(index) == 0:
            return np.zeros(0, dtype=np.int8), np.zeros(0, dtype=np.float32)
        if index.min() < 0 or len(np.unique(index)) != len(index):
            raise ValueError("streams are different numbers from 0 on, one call of each at a time")
        more = int(index.max()) + 1 - len(self._state)
        if more > 0:
            new = self._module.new_state(max(more, len(self._state)))
            self._state = torch.cat([self._state, new])
        time = torch.from_numpy(np.array(log_time, dtype=np.float32))
        size = torch.zeros_like(time)
        if log_size is not None:
            size = torch.from_numpy(np.array(log_size, dtype=np.float32))
        rows = torch.from_numpy(index)
        with torch.inference_mode():
            state, alarm, level = self._module(self._state[rows], time, size)
            self._state[rows] = state
            if key is not None:
                keys = torch.from_numpy(np.array(key, dtype=np.int64))
                more = int(keys.max()) + 1 - len(self._carried)
                if more > 0:
                    self._carried = torch.cat([self._carried, self._module.new_keys(more)])
                self._carried[keys], level = self._module.carry(self._carried[keys], rows, level)
        return alarm.numpy().astype(np.int8), level.numpy()


QUIET_LEVEL: Final = 0.05
DISTURBED_LEVEL: Final = 0.25
#: Quiet and disturbed calls each, without which no share is told.
LEAST_CALLS: Final = 20
MOST_SHARE: Final = 1.5
FELT_KEY: Final = ("system", "collective", "algorithm", "protocol", "octave")
_STREAM: Final = (
    *("system", "nccl_version", "collective", "num_nodes", "ranks_per_node", "size_bytes"),
    *("algorithm", "protocol", "actual_num_channels"),
)


def level_shares_of(
    calls: pl.DataFrame, levels: Callable[[pl.DataFrame], npt.NDArray[np.float32]]
) -> pl.DataFrame:
    """FELT_KEY and `share` (0 to MOST_SHARE): a call takes 1 + share x level times its quiet time.

    `calls` have CALLS_USED; `levels` tells the interference of timed calls. Without test bins, and
    cells with under LEAST_CALLS calls in either state.
    """
    timed = timed_calls(calls)
    told = timed.with_columns(
        level=pl.Series(levels(timed)), algorithm="actual_algorithm", protocol="actual_protocol"
    ).filter(pl.col("split") != Split.TEST.value)
    is_quiet = (pl.col("level") >= 0.0) & (pl.col("level") <= QUIET_LEVEL)
    quiet_us = pl.col("time_us").filter(is_quiet).median().over(_STREAM)
    disturbed = told.with_columns(
        quiet_us=quiet_us,
        quiet_calls=is_quiet.sum().over(_STREAM),
        octave=pl.col("bin") // BINS_PER_OCTAVE,
    ).filter(
        pl.col("level") >= DISTURBED_LEVEL,
        pl.col("quiet_calls") >= LEAST_CALLS,
        pl.col("algorithm").is_not_null() & pl.col("protocol").is_not_null(),
    )
    slowdown = pl.col("time_us") / pl.col("quiet_us") - 1.0
    return (
        disturbed.group_by(FELT_KEY)
        .agg(share=(slowdown / pl.col("level")).median().clip(0.0, MOST_SHARE), calls=pl.len())
        .filter(pl.col("calls") >= LEAST_CALLS)
        .select(*FELT_KEY, "share")
        .sort(FELT_KEY)
    )


def interference_levels(detector: Detector, calls: pl.DataFrame) -> npt.NDArray[np.float32]:
    """(N,) levels of calls with times, in each communicator's order; -1 = unknown."""
    asked = calls.select(
        stream=pl.struct(STREAM_COLUMNS).rank("dense").cast(pl.Int64) - 1,
        key=pl.struct(KEY_COLUMNS).rank("dense").cast(pl.Int64) - 1,
        log_time=pl.col("time_us").log(),
        log_size=pl.col("size_bytes").cast(pl.Float64).log(),
    ).with_row_index("row")
    place = pl.int_range(pl.len()).over("key")
    levels = np.full(calls.height, -1.0, dtype=np.float32)
    steps = asked.with_columns(place=place).sort("place", "row").partition_by("place")
    for step in steps:
        told = (step[name].to_numpy() for name in ("stream", "log_time", "log_size", "key"))
        levels[step["row"].to_numpy()] = detector.observe(*told)[1]
    return levels
