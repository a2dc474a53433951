"""Finds the largest sweep that fits in given hours, by the simulator's times.

From the whole sweep down, one reduction (fewer.py) after the other, the first one that fits is
taken: with the sweep's own strategy, else as `adaptive`, else as `exhaustive`. Playing an adaptive
sweep takes seconds, so it is played only where it would fit if it needed the same share of the
exhaustive sweep's time as it does of the whole one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from dynamiccl.collect.planning.adaptive import ADAPTIVE, AdaptiveEstimate, play, with_strategy
from dynamiccl.collect.planning.fewer import ORDER, Reduction, fewer_cycles
from dynamiccl.collect.planning.plan import cost_of
from dynamiccl.collect.planning.times import CallTimes
from dynamiccl.collect.sweep.load import Sweep, parse_sweep
from dynamiccl.collect.sweep.settings import SweepFile
from dynamiccl.collect.sweep.text import size_text, sweep_text
from dynamiccl.errors import UserError

_EXHAUSTIVE: Final = "exhaustive"
_WHERE: Final = "the shorter sweep"


@dataclass(frozen=True, slots=True)
class Fitted:
    """A sweep that fits, and what it leaves out, with the reasons."""

    sweep: Sweep
    left_out: tuple[str, ...]
    #: Of an adaptive one, how it went in the simulator.
    played: AdaptiveEstimate | None = None


@dataclass(frozen=True, slots=True)
class _ReducedSweep:
    """A reduced sweep, and what was left out so far."""

    file: SweepFile
    given_up: tuple[tuple[Reduction, str], ...] = ()


def check_hours(hours: float) -> None:
    """Raise UserError for a number of hours that is not positive."""
    if not (math.isfinite(hours) and hours > 0):
        raise UserError(f"--hours {hours:g} is no time; give a number above 0, e.g. --hours 2")


def fit_to_hours(sweep: Sweep, hours: float, times: CallTimes, played: AdaptiveEstimate) -> Fitted:
    """The largest sweep of a file that fits in `hours`, by the model; the file itself if it does.

    `played` is the whole sweep as an adaptive one. Raises UserError for hours that are none, and
    with the least that would do.
    """
    check_hours(hours)
    most_s = hours * 3600
    if _seconds(sweep, times, played) <= most_s:
        return Fitted(sweep, ())
    kinds = [*dict.fromkeys((sweep.file.strategy.kind, ADAPTIVE, _EXHAUSTIVE))]
    whole_s = _exhaustive_s(sweep, times)
    adaptive_share = played.cost.total_s / whole_s if whole_s else 1.0
    for rung in _reduced_sweeps(sweep, times):
        for kind in kinds:
            tried = _fitted(sweep, rung, kind, hours)
            found = _if_in_time(tried, times, most_s, adaptive_share)
            if found is not None:
                return found
    seconds, kind = min((_seconds(_fitted(sweep, rung, k, hours).sweep, times), k) for k in kinds)
    enough = math.ceil(100 * seconds / 3600 + 1e-9) / 100
    raise UserError(
        f"--hours {hours:g} is too little for sweep '{sweep.file.name}': the smallest of it that "
        f"says something ({_shape(rung.file, kind)}) takes {enough:g} hours; give --hours "
        f"{enough:g}, or fewer collectives, groups, datatypes, profiles or interference"
    )


def _if_in_time(
    fitted: Fitted, times: CallTimes, most_s: float, adaptive_share: float
) -> Fitted | None:
    if fitted.sweep.file.strategy.kind != ADAPTIVE:
        return fitted if cost_of(fitted.sweep, times).total_s <= most_s else None
    if adaptive_share * _exhaustive_s(fitted.sweep, times) > most_s:
        return None
    played = play(fitted.sweep, times, most_seconds=most_s)
    return replace(fitted, played=played) if played.cost.total_s <= most_s else None


def _reduced_sweeps(sweep: Sweep, times: CallTimes) -> Iterator[_ReducedSweep]:
    """The whole sweep, and the sweep after each further reduction."""
    rung = _ReducedSweep(sweep.file)
    yield rung
    for reduction in ORDER:
        found = reduction(parse_sweep(sweep_text(rung.file), where=_WHERE), times)
        if found is not None:
            file, why = found
            rung = _ReducedSweep(file, (*rung.given_up, (reduction, why)))
            yield rung


def _fitted(sweep: Sweep, rung: _ReducedSweep, kind: str, hours: float) -> Fitted:
    """A reduced sweep with a strategy, named after its hours."""
    whole, file, words = sweep.file, rung.file, [why for _, why in rung.given_up]
    update = {
        "name": f"{whole.name}-{hours:g}h",
        "strategy": file.strategy.model_copy(update={"kind": kind}),
        # A cluster that is slower than the model ends in time all the same.
        "budget": file.budget.model_copy(
            update={"max_hours": min(hours, file.budget.max_hours or hours)}
        ),
    }
    if kind == ADAPTIVE:
        # It repeats where it is in doubt, whatever the number of cycles.
        update["cycles"] = whole.cycles
        words = [why for reduction, why in rung.given_up if reduction is not fewer_cycles]
    if kind != whole.strategy.kind:
        words.append(
            f"strategy {kind} in place of {whole.strategy.kind}: the cheaper way by the model"
        )
    head = "\n".join(
        [f"What fits in {hours:g} hours of sweep {whole.name}, by dynamiccl-collect plan."]
        + [f"Left out: {word}" for word in words]
    )
    text = sweep_text(file.model_copy(update=update), head=head)
    return Fitted(parse_sweep(text, where=_WHERE), tuple(words))


def _seconds(sweep: Sweep, times: CallTimes, played: AdaptiveEstimate | None = None) -> float:
    """Seconds that a sweep takes with its own strategy."""
    if sweep.file.strategy.kind == ADAPTIVE:
        return (played or play(sweep, times)).cost.total_s
    return cost_of(sweep, times).total_s


def _exhaustive_s(sweep: Sweep, times: CallTimes) -> float:
    return cost_of(with_strategy(sweep, _EXHAUSTIVE), times).total_s


def _shape(file: SweepFile, kind: str) -> str:
    ladder = file.sizes.ladder()
    cycles = "" if kind == ADAPTIVE else f", {file.cycles} cycles"
    return f"{len(ladder)} sizes up to {size_text(ladder[-1])}, {kind}{cycles}"
