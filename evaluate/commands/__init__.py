"""Commands of `dynamiccl-evaluate` with a file of their own, and what they share."""

from pathlib import Path

from dynamiccl.errors import MissingPath, UserError


def check_plan_file(path: Path) -> None:
    """Raise UserError or MissingPath when `--plan` cannot create the file."""
    if path.exists():
        raise UserError(f"--plan {path}: it exists already; name another file, or remove it")
    if not path.parent.is_dir():
        raise MissingPath("directory", path.parent, "make it, or write elsewhere")
