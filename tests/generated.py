"""Pages with a part that a program writes, between two marks."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class GeneratedPart:
    """The text of a page between `begin` and `end`, which stay."""

    page: Path
    begin: str
    end: str

    def written(self) -> str:
        """The text that stands there."""
        text = self.page.read_text(encoding="utf-8")
        return text[text.index(self.begin) + len(self.begin) : text.index(self.end)]

    def main(self, render: Callable[[], str]) -> None:
        """Put what `render` returns there, where the command line has `--write`."""
        if "--write" in sys.argv:
            text = self.page.read_text(encoding="utf-8")
            before = text[: text.index(self.begin) + len(self.begin)]
            after = text[text.index(self.end) :]
            self.page.write_text(before + render() + after, encoding="utf-8")
