"""Checks of an MLflow store by its URI, before MLflow is imported."""

import logging
import os
from pathlib import Path
from urllib.parse import unquote, urlparse

from dynamiccl.errors import MachineError, MissingPath


def absolute_uri(tracking_uri: str) -> str:
    """The URI with an absolute path, for processes with another working directory.

    >>> absolute_uri("http://server:5000")
    'http://server:5000'
    """
    scheme, separator, rest = tracking_uri.partition(":///")
    if separator and scheme.startswith("sqlite") and rest:
        return f"{scheme}:///{Path(rest).absolute()}"
    return tracking_uri if ":" in tracking_uri else str(Path(tracking_uri).absolute())


def database_of(tracking_uri: str) -> Path | None:
    """The file of an SQLite store; None for other stores.

    >>> database_of("sqlite:///out/mlflow.db")
    PosixPath('out/mlflow.db')
    """
    scheme, separator, rest = tracking_uri.partition(":///")
    return Path(rest) if separator and scheme.startswith("sqlite") and rest else None


def check_there(tracking_uri: str, named: str) -> None:
    """Raise MissingPath for a missing database, which MLflow would create empty.

    What `named` says of files elsewhere (`s3://...`) is not looked up in it.
    """
    if ":/" in named and named.partition(":/")[0] not in {"runs", "models"}:
        return
    path = database_of(tracking_uri)
    if path is not None and not path.exists():
        fix = (
            f"'{named}' is no directory, so it is looked for there: give a directory, name the "
            "store with --tracking-uri, or work where the runs were tracked"
        )
        raise MissingPath("MLflow store", path, fix)


def check_writable(tracking_uri: str) -> None:
    """Raise MachineError for a read-only database, which MLflow retries for two minutes."""
    path = database_of(tracking_uri)
    if path is None:
        return
    if not path.parent.is_dir():
        raise MissingPath("directory", path.parent, f"make it, for the MLflow store {path}")
    # SQLite writes its journal beside the file.
    for each in (path.parent, *([path] if path.exists() else [])):
        if not os.access(each, os.W_OK):
            raise MachineError(
                f"the MLflow store {path} cannot be written: {each.absolute()} is read-only here; "
                "work in another directory, or name another store with --tracking-uri"
            )


def local_folder(uri: str) -> Path | None:
    """The folder that an artifact address means; None where it is not on this file system.

    >>> local_folder("file:///mlruns/1"), local_folder("s3://bucket/1")
    (PosixPath('/mlruns/1'), None)
    """
    parsed = urlparse(uri)
    return Path(unquote(parsed.path)) if parsed.scheme in {"", "file"} else None


def kept_folder(directory: Path | None, run_id: str) -> Path:
    """Where a run keeps what is not over yet: its local artifacts, else the user's state folder."""
    if directory is not None:
        return directory
    #   XDG_STATE_HOME  keeps what `--resume` needs of runs on an MLflow server. Default:
    #                   ~/.local/state.
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return home / "dynamiccl" / run_id


def quiet_mlflow() -> None:
    """Log warnings alone: MLflow logs the migrations of a new database line by line."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    #   GIT_PYTHON_REFRESH  set to quiet where it is not set: no warning without git.
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
