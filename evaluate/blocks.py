"""A table of a page: what `job` shows."""

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
