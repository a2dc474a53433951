"""Elements of a report page: tables and figures, with titles and captions."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TableBlock:
    """A table; `heads` and every row are of one length."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    #: First cells of the rows that stand out: those of the policies that the report is about.
    ours: frozenset[str] = frozenset()
    #: How the page lays it out: `scores` of policies, `numbers` that stay on one line, `reasons`
    #: that end in a sentence; empty: as it comes.
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


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page."""

    title: str
    blocks: Sequence[Block]
    simulated: bool = False
    text: str = ""
    verdicts: Sequence[str] = field(default_factory=tuple)
    #: Shown folded.
    details: Sequence[Block] = field(default_factory=tuple)
    #: Whether the whole section is shown folded; then the page has a table of contents.
    folded: bool = False
