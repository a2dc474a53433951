"""Arguments and options that several commands share; consoles and tables are those of train."""

from pathlib import Path
from typing import Annotated

import typer

from dynamiccl.train.options import Json, folding_table, stderr, stdout, tell, wide_stdout

__all__ = ["ArtifactDir", "Json", "System", "folding_table", "stderr", "stdout", "wide_stdout"]

ArtifactDir = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="Artifact directory.")]
System = Annotated[str | None, typer.Option(help="System, where several have this shape.")]


def warn(text: str) -> None:
    """Print a warning on stderr."""
    tell(stderr, f"warning: {text}")
