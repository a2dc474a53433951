"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]
ArtifactDir = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="Artifact directory.")]
System = Annotated[str | None, typer.Option(help="System, where several have this shape.")]
Plugin = Annotated[Path | None, typer.Option(help="The built plugin; default out/plugin.")]

stdout: Final = Console()
stderr: Final = Console(stderr=True)
