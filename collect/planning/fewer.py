"""Reductions of a sweep that is too long, the least loss first.

A reduction takes a sweep and the times of its calls, and returns the changed settings with what
that leaves out and why, or None where it has nothing to give. Each can be asked for again.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from dynamiccl.collect.benchmark.grid import is_slow
from dynamiccl.collect.planning.times import CallTimes
from dynamiccl.collect.sweep.load import Sweep
from dynamiccl.collect.sweep.settings import SweepFile
from dynamiccl.collect.sweep.text import size_text
from dynamiccl.collect.sweep.trial import Setting, Trial
from dynamiccl.nccl import Algorithm, Protocol

#: The changed settings, and what they leave out.
Less = tuple[SweepFile, str]
Reduction = Callable[[Sweep, CallTimes], Less | None]

#: A config is far from the best where it takes more than so many times as long.
_FAR: Final = 2.0
#: Fewer repeats than this tell no noise from a gain (strategies/belief.py asks for two rounds).
_FEW_CYCLES: Final = 3
_FEWEST_CYCLES: Final = 2
#: One size for each two octaves, and this much in all, is the least that shows a crossover.
_WIDEST_FACTOR: Final = 4
_LEAST_MAX_BYTES: Final = 16 << 20
_LEAST_SIZES: Final = 4


def no_far_configs(sweep: Sweep, times: CallTimes) -> Less | None:
    """Drop configs that the model never predicts within twice the best config's time."""
    why = f"by {times.system.name} they take more than {_FAR:g} times the best's time"
    return _without_others(sweep, _FarConfigs(sweep, times, unknown=True), why)


def no_unknown_configs(sweep: Sweep, times: CallTimes) -> Less | None:
    """Drop configs that the model has no time for."""
    why = f"{times.system.name} has no such call"
    return _without_others(sweep, _FarConfigs(sweep, times, unknown=False), why)


def _without_others(sweep: Sweep, near: "_FarConfigs", why: str) -> Less | None:
    file, words = sweep.file, []
    kept: dict[str, tuple[Any, ...]] = {
        "algorithms": tuple(
            name for name in file.algorithms if Algorithm.parse(name) not in near.far_algorithms
        ),
        "protocols": tuple(
            name for name in file.protocols if Protocol.parse(name) not in near.far_protocols
        ),
        "num_channels": tuple(n for n in file.num_channels if n not in near.far_channels),
    }
    update: dict[str, Any] = {}
    for key, values in kept.items():
        gone = [str(value) for value in getattr(file, key) if value not in values]
        if values and gone:
            update[key] = values
            words.append(f"{key} {', '.join(gone)}")
    if 0 < near.slow_max_bytes < near.slow_sizes_to:
        update["runner"] = file.runner.model_copy(update={"slow_max": near.slow_max_bytes})
        bound = size_text(near.slow_max_bytes)
        words.append(f"LL and up to two channels above {bound} (runner.slow_max)")
    if not update:
        return None
    return file.model_copy(update=update), f"{'; '.join(words)}: {why}"


class _FarConfigs:
    """Configs that are never predicted within twice the best config's time.

    `unknown` is whether what the model has no time for counts as near.
    """

    def __init__(self, sweep: Sweep, times: CallTimes, *, unknown: bool) -> None:
        tasks: dict[tuple[Setting, int], list[Trial]] = {}
        for trial in sweep.trials:
            if trial.infeasible is None:
                tasks.setdefault(trial.task, []).append(trial)
        every = [trial for trials in tasks.values() for trial in trials]
        near = [trial for trials in tasks.values() for trial in _near(trials, times, unknown)]

        def far(value: Callable[[Trial], Any]) -> set[Any]:
            return {value(trial) for trial in every} - {value(trial) for trial in near}

        self.far_algorithms = far(lambda trial: trial.config.algorithm)
        self.far_protocols = far(lambda trial: trial.config.protocol)
        self.far_channels = far(lambda trial: trial.config.num_channels or 0)
        slow_max = sweep.file.runner.slow_max
        slow = [trial for trial in every if is_slow(trial.config)]
        #: The largest sizes at which the slow ones are measured, and come near.
        self.slow_sizes_to = _largest(t for t in slow if t.size_bytes <= slow_max)
        self.slow_max_bytes = _largest(t for t in near if is_slow(t.config))


def _near(trials: list[Trial], times: CallTimes, unknown: bool) -> Iterator[Trial]:
    if not times.of(trials[0].setting).is_modelled:
        # No model says that any of them is far.
        yield from trials
        return
    found = {trial: _call_us(trial, times) for trial in trials}
    best_us = min((taken_us for taken_us in found.values() if taken_us is not None), default=0.0)
    for trial, taken_us in found.items():
        if unknown if taken_us is None else taken_us <= _FAR * best_us:
            yield trial


def _call_us(trial: Trial, times: CallTimes) -> float | None:
    setting = trial.setting
    size = setting.benchmark_bytes(trial.size_bytes)
    known = times.of(setting)
    return None if known.parts(size, trial.config) is None else known.call_us(size, trial.config)


def _largest(trials: Iterable[Trial]) -> int:
    return max((trial.size_bytes for trial in trials), default=0)


def fewer_cycles(sweep: Sweep, _: CallTimes) -> Less | None:
    """Three cycles, then two."""
    cycles = sweep.file.cycles
    fewer = _FEW_CYCLES if cycles > _FEW_CYCLES else _FEWEST_CYCLES
    if cycles <= fewer:
        return None
    why = (
        f"{cycles - fewer} of {cycles} cycles: fewer repeats tell small gains from noise less well"
    )
    return sweep.file.model_copy(update={"cycles": fewer}), why


def half_the_sizes(sweep: Sweep, _: CallTimes) -> Less | None:
    """Fewer sizes an octave, down to one for two octaves; every second one of a list."""
    sizes = sweep.file.sizes
    ladder = sizes.ladder()
    if len(ladder) <= _LEAST_SIZES:
        return None
    if sizes.list:
        update: dict[str, Any] = {"list": ladder[::-1][::2][::-1]}
    elif (sizes.steps_per_octave or 1) > 1:
        update = {"steps_per_octave": (sizes.steps_per_octave or 1) // 2}
    elif (sizes.factor or 2) < _WIDEST_FACTOR:
        update = {"min": ladder[0], "factor": _WIDEST_FACTOR, "steps_per_octave": None}
    else:
        return None
    fewer = sizes.model_copy(update=update)
    gone = len(ladder) - len(fewer.ladder())
    why = f"{gone} of {len(ladder)} sizes: those between are decided by their neighbours"
    return sweep.file.model_copy(update={"sizes": fewer}), why


def half_the_channels(sweep: Sweep, _: CallTimes) -> Less | None:
    """NCCL's own number, and every second channel count from the largest down."""
    counts = sweep.file.num_channels
    forced = sorted((count for count in counts if count), reverse=True)
    kept = forced[:-1:2]
    if not forced or (not kept and 0 not in counts):
        return None
    left = tuple(count for count in counts if count == 0 or count in kept)
    gone = ", ".join(str(count) for count in counts if count not in left)
    why = f"num_channels {gone}: time is smooth in the number of channels"
    return sweep.file.model_copy(update={"num_channels": left}), why


def no_chunk_sizes(sweep: Sweep, _: CallTimes) -> Less | None:
    """NCCL's own chunk size only."""
    gone = [size_text(size) for size in sweep.file.chunk_sizes if size]
    if not gone:
        return None
    why = f"chunk_sizes {', '.join(gone)}: the mildest of the knobs"
    return sweep.file.model_copy(update={"chunk_sizes": (0,)}), why


def lower_max(sweep: Sweep, _: CallTimes) -> Less | None:
    """Divide the largest size by four, as long as some sizes are left."""
    sizes = sweep.file.sizes
    ladder = sizes.ladder()
    bound = ladder[-1] // 4
    left = tuple(size for size in ladder if size <= bound)
    if bound < _LEAST_MAX_BYTES or len(left) < _LEAST_SIZES:
        return None
    fewer = sizes.model_copy(update={"list": left} if sizes.list else {"max": bound})
    why = f"sizes above {size_text(bound)}: they take longest"
    return sweep.file.model_copy(update={"sizes": fewer}), why


#: In this order; each as often as it stands here.
ORDER: Final[tuple[Reduction, ...]] = (
    no_far_configs,
    fewer_cycles,
    half_the_sizes,
    no_unknown_configs,
    half_the_channels,
    half_the_sizes,
    half_the_channels,
    no_chunk_sizes,
    half_the_sizes,
    fewer_cycles,
    half_the_channels,
    half_the_channels,
    *(lower_max,) * 8,
)
