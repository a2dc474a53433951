"""Elements of pages: tables and figures, with titles and captions."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableBlock:
    """A table; `heads` and every row are of one length."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    #: How the page lays it out: `numbers` that stay on one line, `reasons` that end in a sentence;
    #: empty: as it comes.
    layout: str = ""


@dataclass(frozen=True, slots=True)
class FigureBlock:
    """A figure; `name` is what its file is called, without an ending."""

    title: str
    name: str
    svg: str
    #: What it shows, for who cannot see it.
    note: str


Block = TableBlock | FigureBlock
