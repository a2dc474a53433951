"""A report's first screen: what each policy gains on each system, in one sentence, and a verdict.

Figures are of test tasks alone, at measured times. A gain counts beyond the noise band.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.evaluate.metrics import Summary, simple_baselines
from dynamiccl.evaluate.page import percent
from dynamiccl.evaluate.policies import Actions

#: Noise bands by (system, collective), and by (system, None) for all collectives; fractions.
Bands = Mapping[tuple[str, str | None], float]
#: Ranges of sizes that are named one by one, of one collective.
_MOST_RANGES: Final = 2
_UNITS: Final = ((30, "GiB"), (20, "MiB"), (10, "KiB"))


@dataclass(frozen=True, slots=True)
class _Size:
    """A policy at one size of one collective, all group shapes together."""

    size_bytes: int
    #: Most and least time saved over NCCL's default, as fractions of its time.
    most: float
    least: float
    acts: bool
    #: What the fastest measured config would save at most.
    possible: float


def first_sentence(
    system: str, grid: TaskGrid, actions: Actions, oracle: Actions, bands: Bands
) -> str:
    """Where a policy is faster than NCCL's default, and where slower, beyond the noise.

    `actions` and `oracle` (T,) are choices on the tasks of `grid`, those of other systems among
    them.
    """
    gains, losses, kept, possible = [], [], [], []
    mine = grid.tasks.with_row_index("row").filter(pl.col("system") == system)
    for (name,), part in mine.group_by("collective", maintain_order=True):
        collective = str(name)
        band = bands.get((system, collective), bands.get((system, None), 0.0))
        sizes = _by_size(grid, part["row"].to_numpy().astype(np.int64), actions, oracle)
        # Faster: default / time - 1 over the band. Slower: time / default - 1 over it.
        faster = [s.acts and s.most > band / (1 + band) and s.least >= -band for s in sizes]
        slower = [s.acts and s.least < -band for s in sizes]
        if any(faster):
            most = max(s.most for s, is_one in zip(sizes, faster, strict=True) if is_one)
            gains.append(f"{collective} {_ranges(sizes, faster)}: up to {percent(most)} less time")
        if any(slower):
            most = max(-s.least for s, is_one in zip(sizes, slower, strict=True) if is_one)
            losses.append(f"{collective} {_ranges(sizes, slower)}: up to {percent(most)} MORE time")
        kept += [s for s, *is_told in zip(sizes, faster, slower, strict=True) if not any(is_told)]
        open_ones = [(s.possible, s.size_bytes) for s in sizes if s.possible > band / (1 + band)]
        possible += [(saved, f"{collective} {size_text(size)}") for saved, size in open_ones]
    unknown = " (noise unknown: no repeats)" if (system, None) not in bands else ""
    return "; ".join([*gains, *losses, *_rest(gains + losses, kept, possible)]) + unknown


def _rest(
    told: Sequence[str], kept: Sequence[_Size], possible: Sequence[tuple[float, str]]
) -> Iterator[str]:
    """What is to be said of the sizes at which nothing is faster or slower."""
    acts = any(size.acts for size in kept)
    stands = "as fast as NCCL's own choice within the noise" if acts else "NCCL's own choice stands"
    if told:
        if kept:
            yield f"elsewhere {stands}"
        return
    yield f"{stands[0].upper()}{stands[1:]} everywhere" if acts else f"{stands} everywhere"
    if possible:
        saved, where = max(possible)
        yield f"a measured config takes up to {percent(saved)} less time ({where})"
    else:
        yield "no measured config is faster beyond the noise"


def _by_size(
    grid: TaskGrid, rows: npt.NDArray[np.int64], actions: Actions, oracle: Actions
) -> list[_Size]:
    sizes = grid.tasks["size_bytes"].to_numpy()[rows]
    saved = (1.0 - grid.chosen_us(actions) / grid.default_us)[rows]
    possible = (1.0 - grid.chosen_us(oracle) / grid.default_us)[rows]
    acts = (actions != ABSTAIN_ACTION)[rows]
    found = []
    for size in np.unique(sizes).tolist():
        at = sizes == size
        most, least = float(saved[at].max()), float(saved[at].min())
        found.append(_Size(size, most, least, bool(acts[at].any()), float(possible[at].max())))
    return found


def _ranges(sizes: Sequence[_Size], chosen: Sequence[bool]) -> str:
    """The sizes that are chosen, neighbours as one range; a count where there are many ranges."""
    runs: list[list[int]] = []
    for index, is_one in enumerate(chosen):
        if not is_one:
            continue
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    if len(runs) > _MOST_RANGES:
        first, last = sizes[runs[0][0]].size_bytes, sizes[runs[-1][-1]].size_bytes
        return f"at {sum(chosen)} of {len(sizes)} sizes, {range_text(first, last)}"
    return " and ".join(range_text(sizes[r[0]].size_bytes, sizes[r[-1]].size_bytes) for r in runs)


def size_text(size_bytes: int) -> str:
    """A message size with its unit.

    >>> size_text(1 << 20), size_text(1482910), size_text(512)
    ('1 MiB', '1.41 MiB', '512 B')
    """
    for exponent, unit in _UNITS:
        if size_bytes >= 1 << exponent:
            digits = 3 if size_bytes % (1 << exponent) else 4
            return f"{size_bytes / (1 << exponent):.{digits}g} {unit}"
    return f"{size_bytes} B"


def range_text(low: int, high: int) -> str:
    """A range of message sizes; a unit that both have is said once.

    >>> range_text(1 << 20, 16 << 20), range_text(1 << 19, 1 << 20), range_text(8, 8)
    ('1-16 MiB', '512 KiB-1 MiB', '8 B')
    """
    first, last = size_text(low), size_text(high)
    if low == high:
        return first
    number, _, unit = first.partition(" ")
    return f"{number}-{last}" if last.endswith(f" {unit}") else f"{first}-{last}"


def table_verdict(
    name: str, summaries: Sequence[Summary], learned: Sequence[str], band: float | None
) -> str:
    """One sentence: is a policy worth more than the simple tables and regressions?"""
    ours = next(each for each in summaries if each.policy == name)
    simple = simple_baselines(summaries, learned)
    best = min(simple, key=lambda each: each.mean)
    figures = f"mean regret {ours.mean:.2%} against {best.mean:.2%} of {best.policy}"
    if best.mean >= ours.mean:
        return f"No simple table is better than {name}: {figures}."
    by_far = [each for each in simple if each.mean < ours.mean - (band or 0.0)]
    if not by_far:
        return f"{name} is level with the best simple table within the noise: {figures}."
    count = f"{len(by_far)} of {len(simple)} simple tables are"
    if len(by_far) == 1:
        count = f"1 of {len(simple)} simple tables is"
    beyond = "" if band is None else " beyond the noise"
    return f"{count} better than {name}{beyond}: {figures}."
