"""The Trigger in Python: numpy in and out, a state for each stream; and what cells feel of a level.

A level says by how much calls were slower than quiet, under a config that felt it. Others need not
feel it alike: what slows host threads slows rings and not NVLS, what slows one network rail slows
those that send over it. So of each cell there is a share: a call under it takes 1 + share x level
times its quiet time (`level_shares_of`).
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from dynamiccl.datasets.manifest import TRIGGER_FACTS_NAME, TRIGGER_NAME, find_trigger_in
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.steps import KEY_COLUMNS, STREAM_COLUMNS, timed_calls
from dynamiccl.errors import CorruptFile, MissingPath
from dynamiccl.sizes import BINS_PER_OCTAVE
from dynamiccl.train.policy import load_script

FloatArray = npt.NDArray[np.float32]
#: What a message says of a folder without one.
_FIX: Final = "give a run directory of 'dynamiccl-train trigger', or a policy that has one"


class Detector:
    """Watches any number of streams: calls of one task key under one config.

    A stream is a number of the caller's choice, from 0 on; memory goes with the largest.
    """

    def __init__(self, module: Any) -> None:
        """Wrap a `TriggerModule`, scripted or not; room for streams grows as needed."""
        self._module = module
        self._state: torch.Tensor = module.new_state(0)
        self._carried: torch.Tensor = module.new_keys(0)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load the trigger of a run, a policy or a file; raises MissingPath and CorruptFile."""
        found = trigger_file(path)
        module = load_script(found)
        if not hasattr(module, "new_state"):
            raise CorruptFile(f"{found} is TorchScript, but no trigger; {_FIX}")
        return cls(module)

    def observe(
        self,
        stream: npt.ArrayLike,
        log_time: npt.ArrayLike,
        log_size: npt.ArrayLike | None = None,
        key: npt.ArrayLike | None = None,
    ) -> tuple[npt.NDArray[np.int8], FloatArray]:
        """Take one call of each of N streams, none of them twice: alarm (N,) and level (N,).

        Where the numbers of their task keys are given, none of them twice, levels are those of the
        keys: what was found under another config before stands for a while.

        Natural logarithms of the time in us and, where sizes of a stream differ, of NCCL's nBytes.
        Alarm: 1 while the stream is slow, -1 at a call that says that it is faster than what was
        taken for quiet (it is learned anew), else 0. Level: how much longer than quiet, 1 = twice
        the time; -1 (unknown) in the first calls. Raises ValueError.
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


def trigger_file(path: Path) -> Path:
    """Path of the `trigger.pt` of a run, a policy, or a file; raises MissingPath."""
    found = path if path.is_file() else find_trigger_in(path)
    if found is None:
        raise MissingPath("trigger", path / TRIGGER_NAME, _FIX)
    return found


def copy_trigger(path: Path, folder: Path) -> dict[str, Any]:
    """Copy a trigger beside a policy; returns its facts. Raises MissingPath."""
    found = trigger_file(path)
    facts = found.with_name(TRIGGER_FACTS_NAME)
    if not facts.is_file():
        raise MissingPath("facts of the trigger", facts, _FIX)
    for each in (found, facts):
        shutil.copyfile(each, folder / each.name)
    read: dict[str, Any] = json.loads(facts.read_text(encoding="utf-8"))
    return read


#: Levels up to the one are quiet, and from the other on a call is disturbed.
QUIET_LEVEL: Final = 0.05
DISTURBED_LEVEL: Final = 0.25
#: Calls, quiet and disturbed ones each, without which a share is not told.
LEAST_CALLS: Final = 20
MOST_SHARE: Final = 1.5
#: What a share is of.
FELT_KEY: Final = ("system", "collective", "algorithm", "protocol", "octave")
_STREAM: Final = (
    *("system", "nccl_version", "collective", "num_nodes", "ranks_per_node", "size_bytes"),
    *("algorithm", "protocol", "num_channels"),
)
_OF_CALLS: Final = {
    "algorithm": "actual_algorithm",
    "protocol": "actual_protocol",
    "num_channels": "actual_num_channels",
}


def level_shares_of(
    calls: pl.DataFrame, levels: Callable[[pl.DataFrame], npt.NDArray[np.float32]]
) -> pl.DataFrame:
    """The share of each cell at each octave of sizes, FELT_KEY and `share`, 0 to MOST_SHARE.

    `calls` have the columns `datasets.sequences.CALLS_USED`; `levels` tells the interference of
    timed calls, one each. Test bins are left out. Quiet times are medians of the same config on the
    same size. Cells with under LEAST_CALLS calls in either state are not told.
    """
    timed = timed_calls(calls)
    ran = {name: pl.col(of_call) for name, of_call in _OF_CALLS.items()}
    told = timed.with_columns(level=pl.Series(levels(timed)), **ran).filter(
        pl.col("split") != Split.TEST.value
    )
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
    """(N,) levels of calls with times, each communicator's in its order; -1 = unknown.

    All task keys advance side by side, one call of each a step.
    """
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
