"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from dynamiccl.train.commands.options import WordTable

ArtifactDir = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="Artifact directory.")]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]
System = Annotated[str | None, typer.Option(help="System, where several have this shape.")]

stdout: Final = Console()
stderr: Final = Console(stderr=True)


def wide_stdout(least: int = 100) -> Console:
    """Standard output for tables, at least `least` columns wide when not a terminal."""
    return stdout if stdout.is_terminal else Console(width=max(stdout.width, least))


def warn(text: str) -> None:
    """Print a warning on stderr."""
    stderr.print(f"warning: {text}", soft_wrap=True, highlight=False)


def folding_table(*heads: str, title: str | None = None) -> Table:
    """A table whose cells are folded where it is narrow."""
    table = WordTable(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, overflow="fold")
    return table
