"""The split of a data set into train, validation and test.

Usually by size bins, the same for every data set, so that these can be joined without a leak. Whole
octaves are held out: even ones train; of the odd ones every other is for validation and every other
for test. A sweep that has nothing to train or to validate on, such as one over powers of four, is
split by turns of the octaves that it has.

Else whole group shapes, systems or runs are held out, by turns (`shape:0`, `shape:1`, ...) of those
that there are; what was measured later is for test, too. With runs held out every task is asked
again as another run measured it: what that tells is how far noise misleads.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

import polars as pl

from dynamiccl.errors import NotEnoughData, UnknownName
from dynamiccl.sizes import BINS_PER_OCTAVE, size_bin


class Split(StrEnum):
    """What a task is used for."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


class SplitBy(StrEnum):
    """What is held out."""

    SIZE = "size"
    SHAPE = "shape"
    SYSTEM = "system"
    RUN = "run"


_BY_OCTAVE: Final = (Split.TRAIN, Split.VALIDATION, Split.TRAIN, Split.TEST)
_BY_TURN: Final = (Split.TRAIN, Split.VALIDATION, Split.TEST, Split.TRAIN)
#: With fewer values one part would be empty.
_LEAST: Final = 3
_OCTAVE: Final = pl.col("bin") // BINS_PER_OCTAVE
_USUAL: Final = (_OCTAVE % len(_BY_OCTAVE)).replace_strict(
    {place: split.value for place, split in enumerate(_BY_OCTAVE)}, return_dtype=pl.String
)
_RANKS: Final = pl.col("num_nodes").cast(pl.Int64) * pl.col("ranks_per_node").cast(pl.Int64)
#: What is held out, by name, and the order of turns; equals by name.
_HELD_OUT: Final = {
    SplitBy.SIZE: (_OCTAVE.cast(pl.String), _OCTAVE),
    SplitBy.SHAPE: (pl.format("{}x{}", "num_nodes", "ranks_per_node"), _RANKS),
    SplitBy.SYSTEM: (pl.col("system"), pl.lit(0)),
    SplitBy.RUN: (pl.col("run"), pl.lit(0)),
}


@dataclass(frozen=True, slots=True)
class Splits:
    """Training and validation parts; all else is for test."""

    by: SplitBy = SplitBy.SIZE
    #: Octaves, shapes (`4x8`), systems or runs. Empty: the octaves of every data set.
    train: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()

    @classmethod
    def of(cls, frame: pl.DataFrame, by: str = SplitBy.SIZE) -> Self:
        """Raises UnknownName for `by` (as `split_by`), and NotEnoughData."""
        kind, turn = split_by(by)
        rows = with_bins(frame)
        is_usual = {Split.TRAIN.value, Split.VALIDATION.value} <= set(
            rows.select(_USUAL).to_series()
        )
        # Test sizes may have been left out on purpose.
        if kind == SplitBy.SIZE and not turn and is_usual:
            return cls()
        name, order = _HELD_OUT[kind]
        ordered = rows.select(name=name, order=order).unique()
        names: list[str] = ordered.sort("order", "name")["name"].to_list()
        if len(names) < max(_LEAST, turn + 1):
            if kind == SplitBy.SIZE and not turn:  # what is missing is said where it is missed
                return cls()
            raise NotEnoughData(
                f"--set split={by} holds out {kind}s, and the data have {len(names)} "
                f"({', '.join(names)}): measure {max(_LEAST, turn + 1)} or more, leave split=size"
                f"{f', or take a turn from 0 to {len(names) - 1}' if turn else ''}"
            )
        parts: dict[Split, list[str]] = {split: [] for split in Split}
        for place, held in enumerate([*names[turn:], *names[:turn]]):
            parts[_BY_TURN[place % len(_BY_TURN)]].append(held)
        return cls(kind, tuple(parts[Split.TRAIN]), tuple(parts[Split.VALIDATION]))

    def assign(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Add `bin` and `split`; sizes without a bin (0) are dropped."""
        rows = with_bins(frame)
        if not self.train:
            return rows.with_columns(split=_USUAL)
        known = dict.fromkeys(self.train, Split.TRAIN.value)
        known |= dict.fromkeys(self.validation, Split.VALIDATION.value)
        name, _ = _HELD_OUT[self.by]
        split = name.replace_strict(known, default=Split.TEST.value, return_dtype=pl.String)
        return rows.with_columns(split=split)

    def text(self) -> str:
        """The test part, as text."""
        if self.by == SplitBy.SIZE and not self.train:
            return "octaves 3, 7, 11, ... of the size"
        known = ", ".join([*self.train, *self.validation])
        return f"every {self.by.value if self.by != SplitBy.SIZE else 'octave'} but {known}"


def split_by(text: str) -> tuple[SplitBy, int]:
    """What is held out, and the turn, of `shape:1`; raises UnknownName."""
    by, _, turn = text.partition(":")
    if by not in list(SplitBy) or not (turn or "0").isdecimal():
        where = "--set split (or one of them and its turn, such as shape:1)"
        raise UnknownName("split", text, [each.value for each in SplitBy], where=where)
    return SplitBy(by), int(turn or 0)


def with_split(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows with `bin` and `split`, by the usual split if they have none."""
    return frame if "split" in frame.columns else Splits().assign(frame)


def with_bins(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows with `bin`; sizes that are unknown or have none (0) are dropped."""
    sizes = frame["size_bytes"].drop_nulls().unique().to_list()
    table = pl.DataFrame(
        {"size_bytes": sizes, "bin": [size_bin(size) for size in sizes]},
        schema={"size_bytes": pl.Int64, "bin": pl.Int64},
    ).filter(pl.col("bin") >= 0)
    return frame.join(table, on="size_bytes", how="inner", maintain_order="left")
