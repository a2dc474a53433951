"""A table for terminals that breaks lines between words, where its words fit at all."""

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table


class WordTable(Table):
    """Columns at least as wide as their longest word, where all fit.

    Where they do not, cells are folded anywhere (a run id that is cut names nothing), and heads are
    not if those fit. Rich narrows columns whatever their `min_width` is, so `width` is set.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Choose widths for the console at hand, and render."""
        heads = [str(column.header) for column in self.columns]
        cells = [[str(text) for text in column.cells] for column in self.columns]
        words = []
        for column, head, texts in zip(self.columns, heads, cells, strict=True):
            together = "\n".join([head, *texts])
            words.append(longest(together.splitlines() if column.no_wrap else together.split()))
        for padding in (1, 0):
            # A column has a padding on both sides, and a line or blank on one; the table one more.
            spare = options.max_width - sum(words) - (1 + 2 * padding) * len(words) - 1
            spare += 0 if self.pad_edge else 2 * padding
            if spare >= 0:
                # What is left keeps cells on one line, then heads; those that need least first.
                widths = widened(words, [longest(texts) for texts in cells], spare)
                widths = widened(widths, [*map(len, heads)], spare + sum(words) - sum(widths))
                for column, width in zip(self.columns, widths, strict=True):
                    column.width = width
                self.padding = (0, padding)
                return super().__rich_console__(console, options)
        least = [longest(head.split()) for head in heads]
        if sum(least) + 4 * len(least) <= options.max_width:
            for column, width in zip(self.columns, least, strict=True):
                column.min_width = width
        return super().__rich_console__(console, options)


def widened(widths: list[int], wanted: list[int], spare: int) -> list[int]:
    """The widths with `spare` characters shared out to what is wanted, the least want first."""
    wider = [*widths]
    for i in sorted(range(len(widths)), key=lambda i: wanted[i] - widths[i]):
        wider[i] += min(max(0, wanted[i] - widths[i]), spare)
        spare -= wider[i] - widths[i]
    return wider


def longest(texts: list[str]) -> int:
    """Characters of the longest text."""
    return max(map(len, texts), default=0)
